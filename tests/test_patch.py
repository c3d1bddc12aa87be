"""Patches for a Megatron-LM source tree, and the tool that applies them.

Catches a tree that is not given back byte for byte, half-applied patches, changes of the user's that get mixed with
ours, and a patched script that does not train. BEBOP_MEGATRON_TREE names an untouched tree for the last part.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bebop_megatron import patch
from tests.launch import MODEL, RUN, log

ROOT = Path(__file__).resolve().parent.parent
UPSTREAM = os.environ.get("BEBOP_MEGATRON_TREE")
needs_upstream = pytest.mark.skipif(not UPSTREAM, reason="BEBOP_MEGATRON_TREE names no Megatron-LM source tree")

SCRIPT = """import sys

def rows():
    return 1

if __name__ == "__main__":
    config = rows()
    print(config)
    args = parse()
    train(config)
"""
PATCHED = SCRIPT.replace("    config = rows()\n", "    start()\n    config = rows()\n").replace(
    "    train(config)\n", "    use(args, config)\n    train(config)\n"
)


def git(folder, *arguments):
    identity = ("-c", "user.name=t", "-c", "user.email=t@t")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


def difference(folder, name, before, after):
    """A patch with full hashes, as git writes it."""
    repository = folder / "making" / name
    repository.mkdir(parents=True)
    git(repository, "init", "-q")
    (repository / name).write_text(before)
    git(repository, "add", ".")
    git(repository, "commit", "-qm", "before")
    (repository / name).write_text(after)
    return git(repository, "diff", "-U1", "--full-index")


@pytest.fixture
def patches(tmp_path):
    root = tmp_path / "patches"
    (root / "megatron-lm-0.19").mkdir(parents=True)
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        text = difference(tmp_path, name, SCRIPT, PATCHED)
        (root / "megatron-lm-0.19" / name.replace(".py", ".patch")).write_text(text)
    return root


def plain_tree(path, version="0.19.7"):
    major, minor, number = version.split(".")
    (path / "megatron" / "core").mkdir(parents=True)
    (path / "megatron" / "core" / "package_info.py").write_text(f"MAJOR = {major}\nMINOR = {minor}\nPATCH = {number}\n")
    for name in ("pretrain_gpt.py", "pretrain_hybrid.py"):
        (path / name).write_text(SCRIPT)
    (path / "pretrain_gpt.py").chmod(0o755)
    return path


@pytest.fixture
def tree(tmp_path):
    path = plain_tree(tmp_path / "tree")
    git(path, "init", "-q")
    git(path, "add", ".")
    git(path, "commit", "-qm", "release")
    return path


@pytest.fixture
def tool(patches, capsys):
    def call(path, action, *more):
        code = patch.main(["--megatron", str(path), "--patches", str(patches), *more, action])
        captured = capsys.readouterr()
        return code, captured.out + captured.err

    return call


def content(path):
    files = [p for p in path.rglob("*") if p.is_file() and ".git" not in p.relative_to(path).parts]
    return {str(p.relative_to(path)): (p.read_bytes(), p.stat().st_mode) for p in files}


def test_apply_is_idempotent_and_revert_restores_every_byte(tree, tool):
    before = content(tree)
    assert tool(tree, "check")[0] == 0
    assert content(tree) == before
    assert tool(tree, "apply")[0] == 0
    patched = content(tree)
    assert patched["pretrain_gpt.py"] == (PATCHED.encode(), before["pretrain_gpt.py"][1])
    assert patched["pretrain_hybrid.py"][0] == PATCHED.encode()
    code, text = tool(tree, "apply")
    assert (code, content(tree)) == (0, patched)
    assert "already applied" in text
    code, text = tool(tree, "check")
    assert code == 0
    assert text.count(": applied") == 2
    assert tool(tree, "revert")[0] == 0
    assert content(tree) == before
    assert git(tree, "status", "--porcelain") == ""
    code, text = tool(tree, "revert")
    assert (code, content(tree)) == (0, before)
    assert "no patch is applied" in text


def test_one_patch_alone(tree, tool):
    assert tool(tree, "apply", "--only", "pretrain_hybrid")[0] == 0
    assert (tree / "pretrain_gpt.py").read_text() == SCRIPT
    # the rest follows later, beside what is there already
    assert tool(tree, "apply")[0] == 0
    assert (tree / "pretrain_gpt.py").read_text() == PATCHED
    code, text = tool(tree, "apply", "--only", "pretrain_vlm")
    assert code == 2
    assert "choose out of pretrain_gpt, pretrain_hybrid" in text


@pytest.mark.parametrize("action", ["check", "apply"])
def test_uncommitted_changes_anywhere_are_refused(tree, tool, action):
    info = tree / "megatron" / "core" / "package_info.py"
    info.write_text(info.read_text() + "# mine\n")
    before = content(tree)
    code, text = tool(tree, action)
    assert (code, content(tree)) == (2, before)
    assert "not committed: megatron/core/package_info.py" in text


def test_uncommitted_changes_beside_ours_are_refused(tree, tool):
    tool(tree, "apply")
    (tree / "pretrain_gpt.py").write_text(PATCHED.replace("return 1", "return 2"))
    before = content(tree)
    for action in ("check", "revert"):
        code, text = tool(tree, action)
        assert (code, content(tree)) == (2, before)
        assert "not committed: pretrain_gpt.py." in text


def test_committed_changes_of_the_user_survive(tree, tool):
    mine = SCRIPT.replace("return 1", "return 2")
    (tree / "pretrain_gpt.py").write_text(mine)
    git(tree, "commit", "-qam", "mine")
    assert tool(tree, "apply")[0] == 0
    assert (tree / "pretrain_gpt.py").read_text() == PATCHED.replace("return 1", "return 2")
    git(tree, "commit", "-qam", "with the patch")
    assert tool(tree, "revert")[0] == 0
    assert (tree / "pretrain_gpt.py").read_text() == mine


def test_every_hunk_without_a_place_is_shown_and_nothing_is_written(tree, tool):
    (tree / "pretrain_gpt.py").write_text(
        SCRIPT.replace("rows()\n    print", "lines()\n    print").replace("train(", "fit(")
    )
    git(tree, "commit", "-qam", "mine")
    before = content(tree)
    for action in ("check", "apply", "revert"):
        code, text = tool(tree, action)
        assert (code, content(tree)) == (2, before)
        assert "pretrain_gpt  " in text
        assert "DOES NOT FIT" in text
        assert ">     config = rows()" in text
        assert ">     train(config)" in text
        assert "|     args = parse()" in text


def test_other_version_and_other_folder_are_refused(tmp_path, tool):
    code, text = tool(plain_tree(tmp_path / "new", "0.20.0"), "apply")
    assert code == 2
    assert "is Megatron-LM 0.20.0, for which there are no patches: there are patches for 0.19" in text
    code, text = tool(tmp_path, "apply")
    assert code == 2
    assert "no Megatron-LM source tree" in text


def test_tree_outside_git_must_be_the_release(tmp_path, tool):
    path = plain_tree(tmp_path / "archive")
    assert tool(path, "apply")[0] == 0
    assert tool(path, "revert")[0] == 0
    assert (path / "pretrain_gpt.py").read_text() == SCRIPT
    (path / "pretrain_gpt.py").write_text(SCRIPT + "# mine\n")
    code, text = tool(path, "apply")
    assert code == 2
    assert "not under git, and pretrain_gpt.py is not the file of release 0.19.7" in text
    assert (path / "pretrain_hybrid.py").read_text() == SCRIPT


def test_tree_inside_another_repository_and_foreign_git_settings(tmp_path, tool, monkeypatch):
    outer = tmp_path / "outer"
    path = plain_tree(outer / "vendor" / "megatron")
    git(outer, "init", "-q")
    git(outer, "config", "core.autocrlf", "true")
    git(outer, "add", ".")
    git(outer, "commit", "-qm", "vendored")
    before = content(path)
    assert tool(path, "apply")[0] == 0
    assert (path / "pretrain_gpt.py").read_bytes() == PATCHED.encode()
    assert tool(path, "check")[0] == 0
    assert tool(path, "revert")[0] == 0
    assert content(path) == before


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """A copy of the untouched tree, under git."""
    path = tmp_path_factory.mktemp("upstream") / "megatron-lm"
    shutil.copytree(UPSTREAM, path, ignore=shutil.ignore_patterns(".git", "tests", "docs"))
    git(path, "init", "-q")
    git(path, "add", "-f", ".")
    git(path, "commit", "-qm", "release")
    return path


def real(path, action):
    command = [sys.executable, "-m", "bebop_megatron.patch", "--megatron", str(path), action]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_upstream
def test_patches_fit_the_untouched_tree_and_come_off(upstream):
    before = content(upstream)
    assert real(upstream, "check").count("not applied, fits") == 2
    real(upstream, "apply")
    changed = {name for name, value in content(upstream).items() if value != before[name]}
    assert changed == {"pretrain_gpt.py", "pretrain_hybrid.py"}
    for file in (ROOT / "patches" / "megatron-lm-0.19").glob("*.patch"):
        # what the patch itself says the result is
        after = file.read_text().split("index ", 1)[1].split("..", 1)[1].split()[0]
        data = (upstream / f"{file.stem}.py").read_bytes()
        assert hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest() == after
    real(upstream, "revert")
    assert content(upstream) == before


def run_script(tree, script, *flags, processes=1, model=tuple(MODEL)):
    # the wheel's compiled helper: a source tree would build the same one with make
    from megatron.core.datasets import helpers_cpp

    shutil.copy(helpers_cpp.__file__, tree / "megatron" / "core" / "datasets")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += [script, *model, *RUN, "--mock-data", *flags]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=600, check=False)


@needs_upstream
@pytest.mark.dist
@pytest.mark.parametrize("processes", [1, 2], ids=["one-process", "pipeline"])
def test_patched_script_trains_as_our_entry_point_does(upstream, processes):
    from tests.launch import pretrain

    real(upstream, "apply")
    flags = ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone", "--train-iters", "3", "--clip-grad", "0"]
    layout = ["--pipeline-model-parallel-size", str(processes)]
    done = run_script(upstream, "pretrain_gpt.py", *flags, *layout, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = log(done.stdout), log(pretrain(*flags, *layout, processes=processes).stdout)
    assert sorted(theirs) == [1, 2, 3]
    for iteration in (1, 2, 3):
        for name in ("lm loss", "mtp tv loss", "mtp alpha/1"):
            assert float(theirs[iteration][name]) == pytest.approx(float(ours[iteration][name]), rel=1e-5)
    assert float(theirs[3]["mtp tv loss"]) != float(theirs[1]["mtp tv loss"])


@needs_upstream
@pytest.mark.dist
def test_patched_hybrid_script_trains(upstream):
    from tests.test_pretrain_features import COMMON, DELTA

    real(upstream, "apply")
    flags = ["--mtp-loss", "tv", "--train-iters", "2", "--hybrid-layer-pattern", "G-*-/*-/*-"]
    done = run_script(upstream, "pretrain_hybrid.py", *flags, model=[*COMMON, *DELTA])
    assert done.returncode == 0, done.stderr[-3000:]
    lines = log(done.stdout)
    assert 0 < float(lines[2]["mtp tv loss"]) < 1
    assert lines[2]["mtp tv loss"] != lines[1]["mtp tv loss"]


@needs_upstream
@pytest.mark.dist
def test_patched_script_without_our_flags_and_with_bad_ones(upstream):
    real(upstream, "apply")
    done = run_script(upstream, "pretrain_gpt.py", "--train-iters", "1")
    assert done.returncode == 0, done.stderr[-3000:]
    assert {"lm loss", "mtp_1 loss"} <= log(done.stdout)[1].keys()
    done = run_script(upstream, "pretrain_gpt.py", "--train-iters", "1", "--mtp-loss", "tvv")
    assert done.returncode != 0
    assert "error: unknown MTP loss 'tvv': choose one of" in done.stderr
