"""The API reference. Catches a public name without a docstring, a tensor without shape, an unannounced error.

The package's docstring lists the public modules; `docs/reference.py` writes their pages.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import textwrap
from pathlib import Path

import pytest

import bebop_megatron

ROOT = Path(__file__).resolve().parent.parent
MODULES = re.findall(r"^- `([\w.]+)`: \S", bebop_megatron.__doc__, flags=re.M)


def functions(cls):
    """Public methods and properties that a class defines itself, as functions."""
    for name, member in vars(cls).items():
        function = member.fget if isinstance(member, property) else getattr(member, "__func__", member)
        if not name.startswith("_") and inspect.isfunction(function):
            yield name, function


def public(module):
    """Classes and functions of a module: what `__all__` names, or what it defines, and their methods."""
    names = getattr(module, "__all__", None) or [
        name for name, value in vars(module).items() if getattr(value, "__module__", None) == module.__name__
    ]
    for name in names:
        value = getattr(module, name)
        if name.startswith("_") or not (inspect.isclass(value) or inspect.isfunction(value)):
            continue
        yield name, value
        if inspect.isclass(value):
            yield from ((f"{name}.{method}", function) for method, function in functions(value))


def missing(value):
    """What the docstring of a class or function does not say."""
    # not a base class's
    text = value.__doc__ or ""
    if not text or text.startswith(f"{value.__name__}("):
        return "a docstring"
    if inspect.isclass(value):
        takes, gives = list(vars(value).get("__annotations__", {}).values()), None
        makers = [m for m in (vars(value).get("__init__"), vars(value).get("__post_init__")) if inspect.isfunction(m)]
        # not what dataclass and Protocol generate
        own = [m for m in makers if m.__code__.co_filename == inspect.getsourcefile(value)]
        source = "".join(map(inspect.getsource, own))
    else:
        annotations = dict(value.__annotations__)
        gives = annotations.pop("return", None)
        takes, source = list(annotations.values()), inspect.getsource(value)
    if any("Tensor" in str(annotation) for annotation in takes) and "Shape:" not in text:
        return "Shape: of what it takes"
    if "Tensor" in str(gives) and not re.search(r"Shape:|\[[^\]]*\]", text):
        return "the shape of what it gives"
    if re.search(r"^\s+raise (Value|Runtime|Type|File\w+)Error", textwrap.dedent(source), flags=re.M):
        return None if "Raises:" in text else "Raises:"
    return None


def test_the_package_lists_its_public_modules():
    assert len(MODULES) > 10
    assert len(MODULES) == bebop_megatron.__doc__.count("\n- ")


@pytest.mark.parametrize("module", MODULES)
def test_every_public_name_says_what_its_user_must_know(module):
    found = {name: missing(value) for name, value in public(importlib.import_module(module))}
    assert found
    wrong = [f"{name}: {what}" for name, what in found.items() if what]
    assert not wrong, "docstrings without " + ", ".join(wrong)


def test_missing_headings_are_noticed():
    """A docstring test that sees nothing would pass for ever."""

    def silent(x: torch.Tensor): ...  # noqa: F821  # pyright: ignore

    def shapeless(x: torch.Tensor):  # noqa: F821  # pyright: ignore
        """Do something."""

    def unannounced(x: int):
        """Do something."""
        raise ValueError(x)

    assert missing(silent) == "a docstring"
    assert missing(shapeless) == "Shape: of what it takes"
    assert missing(unannounced) == "Raises:"


def test_pages_are_written(tmp_path):
    pytest.importorskip("pdoc", reason="pdoc is not installed: pip install -e '.[docs]'")
    spec = importlib.util.spec_from_file_location("reference", ROOT / "docs" / "reference.py")
    assert spec
    assert spec.loader
    reference = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(reference)
    assert reference.public_modules() == MODULES
    reference.write(tmp_path)
    pages = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*.html")}
    assert pages == {f"{name.replace('.', '/')}.html" for name in ("bebop_megatron", *MODULES)} | {"index.html"}
    page = (tmp_path / "bebop_megatron" / "losses.html").read_text()
    assert 'id="fused_linear_objective"' in page
    # a heading is a paragraph of its own, an error an item of a list
    assert "<p><strong>Collectives:</strong>" in page
    assert "<li><code>ValueError</code>:" in page
