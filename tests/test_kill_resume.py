"""A run killed anywhere goes on under another layout as if nothing had happened.

Catches: an optimizer state that is not restored or loses its step, data read twice or skipped, an embedding copy that
starts from another value, a half-written checkpoint taken for a whole one.
"""

from __future__ import annotations

import random
import re
import time

import psutil
import pytest
import torch

from tests.launch import log, pretrain, start

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

ITERATIONS = 18
RUN = ["--mtp-loss", "tv", "--train-iters", str(ITERATIONS), "--lr", "1e-3", "--use-distributed-optimizer"]
RUN += ["--dist-ckpt-optim-fully-reshardable", "--save-interval", "2"]


def kill(process) -> None:
    """SIGKILL the workers and their launcher: nobody gets to clean up."""
    children = psutil.Process(process.pid).children(recursive=True)
    process.kill()
    for child in children:
        child.kill()
    process.wait()


def run_until_killed(folder, seed: int) -> int:
    """Start a run, kill it at a random moment; the iteration of the last whole checkpoint."""
    moment = random.Random(seed)
    target = moment.randint(4, 7)
    with start(*RUN, "--save", str(folder)) as process:
        for line in process.stdout:
            if re.search(rf"iteration +{target}/", line):
                break
        time.sleep(moment.random() * 0.3)
        kill(process)
    return int((folder / "latest_checkpointed_iteration.txt").read_text())


def test_killed_run_resumes_under_another_layout_with_the_same_losses(tmp_path):
    seed = random.SystemRandom().randrange(10**6)
    uninterrupted = pretrain(*RUN)
    assert uninterrupted.returncode == 0, uninterrupted.stderr[-3000:]
    expected = log(uninterrupted.stdout)
    saved = run_until_killed(tmp_path, seed)
    layout = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    refused = pretrain(*RUN, *layout, "--load", str(tmp_path), processes=2)
    assert "--make-vocab-size-divisible-by 64" in refused.stderr
    layout += ["--make-vocab-size-divisible-by", "64"]
    resumed = pretrain(*RUN, *layout, "--load", str(tmp_path), processes=2)
    assert resumed.returncode == 0, (seed, resumed.stderr[-3000:])
    lines = log(resumed.stdout)
    assert sorted(lines) == list(range(saved + 1, ITERATIONS + 1)), seed
    # Megatron's second log line after a start averages over the first as well
    compared = [iteration for iteration in lines if iteration != saved + 2]
    assert len(compared) >= 10
    for iteration in compared:
        for name in ("lm loss", "mtp tv loss"):
            actual, wanted = float(lines[iteration][name]), float(expected[iteration][name])
            assert actual == pytest.approx(wanted, rel=1e-5), (seed, iteration, name)
