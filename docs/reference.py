"""Writes the API reference of the public modules, which the package's docstring lists, as HTML: `make docs`.

pdoc does the work; this file teaches it the headings of our docstrings.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pdoc

import bebop_megatron

HEADINGS = ("Shape", "Units", "Gradient", "Collectives", "Memory", "Work", "Raises")


def public_modules() -> list[str]:
    """Names of the public modules, in the order of the package's docstring."""
    return re.findall(r"^- `([\w.]+)`:", bebop_megatron.__doc__ or "", flags=re.M)


def markdown(docstring: str) -> str:
    """A docstring whose headings are paragraphs of their own, and whose errors are a list."""
    text = re.sub(rf"^({'|'.join(HEADINGS)}):", r"\n**\1:**", docstring, flags=re.M)
    return re.sub(r"^    (\w+(?:Error|Exit)): ", r"\n- `\1`: ", text, flags=re.M)


def _all(documented: pdoc.doc.Doc) -> Iterator[pdoc.doc.Doc]:
    """It and everything in it."""
    yield documented
    # a module's own submodules have pages of their own, or none
    for member in getattr(documented, "own_members", ()):
        if not isinstance(member, pdoc.doc.Module):
            yield from _all(member)


def write(folder: Path) -> None:
    """Write a page for each public module, an index and the search index."""
    pdoc.render.configure(docformat="markdown", show_source=True, footer_text="bebop-megatron")
    modules = {name: pdoc.doc.Module.from_name(name) for name in ("bebop_megatron", *public_modules())}
    for module in modules.values():
        for member in _all(module):
            member.docstring = markdown(member.docstring)
    for name, module in modules.items():
        page = folder / f"{name.replace('.', '/')}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        page.write_text(pdoc.render.html_module(module, modules))
    (folder / "index.html").write_text(pdoc.render.html_index(modules))
    (folder / "search.js").write_text(pdoc.render.search_index(modules))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("docs/api"))
    options = parser.parse_args()
    write(options.output)
    print(f"open {options.output}/index.html")
