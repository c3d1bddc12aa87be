"""README says what the code does. Catches a renamed flag, a forgotten objective, a command that no longer parses."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from bebop_megatron.losses import OBJECTIVES

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
DEMO = (ROOT / "examples/quickstart_cpu.sh").read_text()


def table(title):
    """First cells of the rows of the table below a heading."""
    section = README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]
    return re.findall(r"^\| `(--)?([a-z-]+)[^`]*` \|", section, flags=re.M)


def commands(pattern):
    """Shell commands in README's bash blocks, continuation lines joined, that match a pattern."""
    blocks = re.findall(r"```bash\n(.*?)```", README, flags=re.S)
    lines = "\n".join(blocks).replace("\\\n", " ").splitlines()
    return [line.split("#")[0].strip() for line in lines if re.search(pattern, line)]


def test_objective_tables_are_the_registry():
    assert [name for dashes, name in table("Objectives") if not dashes] == list(OBJECTIVES), "README.md, Objectives"
    method = (ROOT / "docs" / "method.md").read_text().split("## The losses\n", 1)[1].split("\n**", 1)[0]
    assert re.findall(r"^\| \**`([a-z][a-z-]*)`", method, flags=re.M) == list(OBJECTIVES), "docs/method.md, The losses"


def test_flag_table_is_our_parser():
    from bebop_megatron.mcore.arguments import add_mtp_arguments

    parser = add_mtp_arguments(argparse.ArgumentParser(add_help=False))
    ours = {option for action in parser._actions for option in action.option_strings}
    assert {f"--{name}" for _, name in table("Add it to your launch")} == ours
    # the launch diff uses only flags that we or Megatron have
    diff = re.search(r"```diff\n(.*?)```", README, flags=re.S)
    assert diff
    assert set(re.findall(r"--mtp-(?:loss|freeze)[a-z-]*", diff[1])) <= ours


@pytest.mark.parametrize("command", commands("^make "))
def test_make_targets_exist(command):
    done = subprocess.run(["make", "-n", command.split()[1]], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def words_of(command, **paths):
    """A command's words, with the folders that it names replaced."""
    for name, path in paths.items():
        command = command.replace(name, path)
    return command.replace("\\\n", " ").split()


@pytest.mark.dist
@pytest.mark.slow
def test_demo_and_the_commands_below_it_run(tmp_path):
    """The whole story in miniature: the script behind `make demo`, then README's other commands on what it left."""
    out = tmp_path / "demo"
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "OUT": str(out),
        "BACKBONE_STEPS": "4",
        "HEAD_STEPS": "2",
        "EVAL_TOKENS": "150",
        "LOSSES": "ce tv",
        "OMP_NUM_THREADS": "1",
    }
    script = ["bash", str(ROOT / "examples/quickstart_cpu.sh")]
    done = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=900, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    summary = json.loads((out / "summary.json").read_text())
    assert {(r["loss"], r["rule"]) for r in summary["results"]} == {
        (loss, rule) for loss in ("ce", "tv") for rule in ("rejection", "target-only")
    }
    assert all(r["num_tokens"] >= 150 and r["gamma"] == 3 for r in summary["results"])
    assert summary["baseline_tokens_per_second"] or all(r["baseline_tokens_per_second"] for r in summary["results"])
    assert (out / "acceptance.png").stat().st_size > 5000
    assert "accept" in (out / "report.md").read_text()

    # a second run repeats nothing
    checkpoints = {p: p.stat().st_mtime_ns for p in out.rglob("*.distcp")}
    again = subprocess.run(script, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert again.returncode == 0, again.stderr[-3000:]
    assert {p: p.stat().st_mtime_ns for p in out.rglob("*.distcp")} == checkpoints

    ran = [
        words_of(line, **{'"': "", "$DATA": str(out / "data")}) for line in re.findall(r"^ +(python -m .*)", DEMO, re.M)
    ]
    for command in commands("^python -m"):
        if re.search(r"\b[A-Z]{4,}\b", command):
            # of the reader's own folders: tests/bridges/test_convert.py runs it on some
            continue
        words = words_of(command, **{"runs/demo": str(out), "runs/eval": str(tmp_path / "eval"), "6000": "100"})
        # the script has run the commands that make the data, word for word
        made = words in ran
        assert made == ("bebop_megatron.data" in words), command
        done = subprocess.run(
            [sys.executable, *words[1:]], capture_output=True, text=True, cwd=ROOT, env=environment, check=False
        )
        if made:
            # and says that it has, rather than overwrite
            assert done.returncode != 0, command
            assert "overwrite" in done.stderr, done.stderr[-2000:]
        else:
            assert done.returncode == 0, done.stderr[-3000:]
