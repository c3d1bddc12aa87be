"""The documents. Catches a renamed flag or file, a dead link, an import that no longer works, a page nobody finds."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(
    p for pattern in ("*.md", "docs/*.md", "patches/**/*.md") for p in ROOT.glob(pattern) if not p.name.startswith(".")
)
# flags of other programs that our pages call: torchrun, pip, pytest, pyxis; slime, vLLM, SGLang
FOREIGN = """--help --nproc-per-node --signals-to-handle --no-deps --no-build-isolation --container-save --basetemp
--custom-megatron-init-path --custom-model-provider-path --enable-mtp-training --hf-checkpoint
--per-request-spec-decode-metrics --model-path""".split()
# of SGLang and vLLM
FOREIGN_PREFIXES = ("--sglang", "--speculative-")


def name(page):
    return page.relative_to(ROOT).as_posix()


def code(text):
    """Code blocks and code in lines, joined."""
    blocks = re.findall(r"```.*?```", text, flags=re.S)
    return "\n".join([*blocks, *re.findall(r"`([^`\n]+)`", re.sub(r"```.*?```", "", text, flags=re.S))])


@pytest.fixture(scope="module")
def parser():
    """Megatron's with our flags: that of `bebop_megatron.pretrain`."""
    from megatron.training.arguments import add_megatron_arguments

    from bebop_megatron.mcore.arguments import add_mtp_arguments

    return add_mtp_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False)))


@pytest.fixture(scope="module")
def flags(parser):
    """Every flag of the launcher, and every one that a source file of ours spells out."""
    known = {option for action in parser._actions for option in action.option_strings}
    for folder in ("bebop_megatron", "benchmarks", "examples", "docs"):
        for file in (f for f in (ROOT / folder).rglob("*") if f.suffix in (".py", ".sh")):
            known |= set(re.findall(r"[\"' ](--[a-z][a-z0-9-]+)", file.read_text()))
    # of a loop over names
    return known | {"--tp", "--pp", "--cp", "--ep", "--etp"} | set(FOREIGN)


def test_index_lists_every_page_with_its_question():
    index = (ROOT / "docs" / "README.md").read_text()
    asked = dict(re.findall(r"^\| \[(\w+\.md)\]\(\w+\.md\) \| (.+\?) \|$", index, flags=re.M))
    pages = {p.name: p.read_text() for p in (ROOT / "docs").glob("*.md") if p.name != "README.md"}
    starts = {page: re.match(r"# .+\n\n\*(.+)\*\n\n", text) for page, text in pages.items()}
    assert {page: start and start[1] for page, start in starts.items()} == asked


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_links_lead_somewhere(page):
    targets = re.findall(r"\]\(([^)\s]+)\)", page.read_text())
    local = [t.split("#")[0] for t in targets if not t.startswith(("http", "#"))]
    assert [t for t in local if not (page.parent / t).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_files_exist(page):
    folders = "bebop_megatron|benchmarks|docs|examples|patches|tests"
    named = re.findall(rf"(?<![\w./-])((?:{folders})/[\w./-]*[\w/])", code(page.read_text()))
    # what make docs writes
    assert [f for f in named if not (ROOT / f).exists() and not f.startswith("docs/api")] == []
    modules = re.findall(r"-m ((?:bebop_megatron|benchmarks)[\w.]*)", page.read_text())
    files = [ROOT / m.replace(".", "/") for m in modules]
    assert [f for f in files if not (f.with_suffix(".py").exists() or (f / "__main__.py").exists())] == []


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_named_flags_exist(page, flags):
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+\w", code(page.read_text())))
    # argparse.BooleanOptionalAction
    named = {flag for flag in named if flag.replace("--no-", "--", 1) not in flags}
    unknown = {flag for flag in named - flags if not flag.startswith(FOREIGN_PREFIXES)}
    assert unknown == set(), "no program of ours or Megatron's has these; FOREIGN lists those of other programs"


@pytest.mark.parametrize("page", PAGES, ids=name)
def test_imports_of_snippets_work(page):
    for block in re.findall(r"```python\n(.*?)```", page.read_text(), flags=re.S):
        compile(block, name(page), "exec")
        for line in re.findall(r"^(?:from|import) .+$", block, flags=re.M):
            exec(line, {})


def test_help_of_the_launcher_prints(parser):
    """Docs send the reader to it. Megatron's own parser alone cannot print its help in 0.19.2."""
    text = parser.format_help()
    ours = text.split("bebop-megatron: multi-token prediction", 1)[1]
    assert "--mtp-loss" in ours
    assert "{losses}" not in ours
    assert "1.10 = 10%)" in text


def test_support_matrix_names_cases_that_exist():
    from tests.mcore import test_features

    text = (ROOT / "docs" / "support_matrix.md").read_text()
    cases = set(re.findall(r"features\[([\w-]+)\]", text)) - {"x"}
    source = Path(test_features.__file__).read_text()
    assert {case for case in cases if f'"{case}"' not in source} == set()
