"""Launch scripts for clusters, on a machine without one.

Catches a wrong flag name, arguments that Megatron or we refuse, a layout that no model can be built in, and a job that
requeues itself for ever or not at all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bebop_megatron.estimate.presets import arguments

ROOT = Path(__file__).resolve().parent.parent
CLUSTER = ROOT / "examples" / "cluster"
LAUNCHES = {"qwen3_5_35b_a3b.sh": 16, "qwen3_5_397b_a17b.sh": 128}
INPUTS = {"CKPT": "ckpt", "DATA": "data/prefix", "TOKENIZER": "tokenizer", "STEPS": "1000"}


def stub(folder, name, text):
    path = folder / name
    path.write_text(f"#!/bin/bash\n{text}\n")
    path.chmod(0o755)


@pytest.fixture
def tools(tmp_path):
    """A PATH whose torchrun, python, srun and scontrol write down what they are asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in ("torchrun", "python"):
        stub(folder, name, f'printf "%s\\0" "$@" > {tmp_path}/arguments; env -0 > {tmp_path}/environment')
    # more names than a pipe holds: who reads the first alone must not take the rest for a failure
    nodes = 'if [ "$1" = show ]; then echo node-a; for n in {1..20000}; do echo node-b; done; fi'
    stub(folder, "scontrol", f'echo "$@" >> {tmp_path}/scontrol; {nodes}')
    # one task of the step, without the flags before the command
    task = 'SLURM_PROCID=3 SLURM_LOCALID=3 SLURM_NTASKS=16 "$@"'
    stub(folder, "srun", f'while [[ $1 == --* ]]; do shift; done\n{task}; exit "${{SRUN_STATUS:-0}}"')
    return tmp_path


def run(tools, script, *arguments, **variables):
    environment = {"PATH": f"{tools / 'bin'}:/usr/bin:/bin", "HOME": str(tools), **variables}
    return subprocess.run(
        ["bash", str(CLUSTER / script), *arguments],
        cwd=tools,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def asked(tools):
    return (tools / "arguments").read_text().split("\0")[:-1]


@pytest.mark.parametrize("script", sorted((ROOT / "examples").rglob("*.sh")), ids=lambda path: path.name)
def test_scripts_are_bash(script):
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", LAUNCHES)
def test_launch_and_estimate_pass_the_same_arguments(tools, script):
    assert run(tools, script, **INPUTS).returncode == 0
    words = asked(tools)
    at = words.index("bebop_megatron.pretrain")
    launched = words[at + 1 :]
    assert words[words.index("--nnodes") + 1] == str(LAUNCHES[script] // 8)
    assert run(tools, script, ESTIMATE="1", **INPUTS).returncode == 0
    words = asked(tools)
    assert words[: words.index("--")] == ["-m", "bebop_megatron.estimate", "--world-size", str(LAUNCHES[script])]
    assert words[words.index("--") + 1 :] == launched
    for flag, value in (("--pretrained-checkpoint", "ckpt"), ("--data-path", "data/prefix"), ("--train-iters", "1000")):
        assert launched[launched.index(flag) + 1] == value
    missing = run(tools, script, DATA="x", TOKENIZER="x")
    assert missing.returncode != 0
    assert "checkpoint to start from" in missing.stderr


def pairs(words):
    """Flags with their values."""
    found = []
    for word in words:
        if word.startswith("--"):
            found.append((word, []))
        else:
            found[-1][1].append(word)
    return {flag: values for flag, values in found}


@pytest.mark.parametrize("script", LAUNCHES)
def test_architecture_is_that_of_the_preset(tools, script):
    run(tools, script, **INPUTS)
    words = asked(tools)
    launched = pairs(words[words.index("bebop_megatron.pretrain") + 1 :])
    for flag, values in pairs(
        arguments(script.removesuffix(".sh").replace("qwen3_5_", "qwen3.5-").replace("_", "-"))
    ).items():
        assert launched.get(flag) == values, flag


@pytest.mark.parametrize("script", LAUNCHES)
def test_megatron_and_our_checks_accept_every_argument(tools, script):
    """Megatron's own parser, checks and model builder on the real arguments, sizes and ranks, without memory."""
    # a tokenizer folder is the cluster's; everything else is as it would be there
    inputs = {name: value for name, value in INPUTS.items() if name not in ("TOKENIZER", "DATA")}
    run(tools, script, ESTIMATE="1", EXIT_SIGNAL="SIGUSR1", WANDB_PROJECT="p", **inputs)
    words = asked(tools)
    done = estimate(*words[2 : words.index("--")], "--json", *words[words.index("--") :])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    billions = int(script.split("_")[2].removesuffix("b"))
    # with the MTP layer, which the name does not count, and without the vision tower, which it does
    assert found["parameters"] / 1e9 == pytest.approx(billions, rel=0.04)
    assert found["asked"] == "backbone frozen"
    assert 0 < max(stage["total"] for stage in found["stages"]["backbone frozen"]) < 72 * 2**30
    wrong = estimate(*words[2 : words.index("--") + 1], "--num-layerz", "4", *words[words.index("--") + 1 :])
    assert wrong.returncode == 2
    assert "num-layerz" in wrong.stderr


def estimate(*words):
    command = [sys.executable, "-m", "bebop_megatron.estimate", *words]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240, check=False)


SLURM = {
    "SLURM_JOB_NUM_NODES": "2",
    "SLURM_NTASKS_PER_NODE": "8",
    "SLURM_JOB_NODELIST": "node-[a-b]",
    "SLURM_JOB_ID": "77",
}


def submit(tools, done_steps, **variables):
    adapted = tools / "adapted"
    adapted.mkdir(exist_ok=True)
    if done_steps is not None:
        (adapted / "latest_checkpointed_iteration.txt").write_text(str(done_steps))
    (tools / "scontrol").unlink(missing_ok=True)
    script = str(CLUSTER / "qwen3_5_35b_a3b.sh")
    done = run(tools, "slurm.sh", script, ADAPTED=str(adapted), **(SLURM | INPUTS | variables))
    return done, "requeue 77" in (tools / "scontrol").read_text()


def test_slurm_starts_one_trainer_for_each_gpu_and_resumes_until_done(tools):
    done, again = submit(tools, None)
    assert done.returncode == 0, done.stderr
    assert again
    words = asked(tools)
    assert words[:2] == ["-m", "bebop_megatron.pretrain"]
    assert words[words.index("--exit-signal") + 1] == "SIGUSR1"
    environment = dict(e.split("=", 1) for e in (tools / "environment").read_text().split("\0") if "=" in e)
    expected = {"RANK": "3", "LOCAL_RANK": "3", "WORLD_SIZE": "16", "MASTER_ADDR": "node-a", "MASTER_PORT": "20077"}
    assert expected.items() <= environment.items()
    assert submit(tools, 400)[1]
    assert not submit(tools, 1000)[1]


def test_slurm_passes_a_failure_on_and_does_not_requeue_it(tools):
    done, again = submit(tools, 400, SRUN_STATUS="9")
    assert done.returncode == 9
    assert not again


def test_nemo_run_example_compiles():
    compile((CLUSTER / "nemo_run.py").read_text(), "nemo_run.py", "exec")
