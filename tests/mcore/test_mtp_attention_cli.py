"""`--mtp-attention` as a user gives it. Catches: a flag dropped on the way, refusals after the model is built."""

from __future__ import annotations

import pytest
import torch

from tests.launch import log, pretrain

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]


def third_loss(*flags, processes=1):
    # no padding columns, so that every tensor-parallel size has the same weights
    fixed = ["--mtp-loss", "tv", "--train-iters", "3", "--make-vocab-size-divisible-by", "48"]
    done = pretrain(*fixed, *flags, processes=processes)
    assert done.returncode == 0, done.stderr[-3000:]
    return float(log(done.stdout)[3]["mtp tv loss"])


def test_flag_and_spec_train_the_same_head_under_every_layout(tmp_path):
    save = ["--save", str(tmp_path), "--save-interval", "2"]
    expected = third_loss("--mtp-attention", "chain", *save)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("2")
    load = ["--load", str(tmp_path), "--no-load-optim", "--no-load-rng"]
    split = ["--tensor-model-parallel-size", "2", "--sequence-parallel"]
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"]
    spec = ["--spec", "bebop_megatron.mcore.spec", "chain"]
    assert third_loss(*load, *spec, *split, *recompute, processes=2) == pytest.approx(expected, rel=1e-5)


def test_what_cannot_work_ends_with_one_clear_line():
    done = pretrain("--train-iters", "1", "--mtp-attention", "chain", "--attention-dropout", "0.1")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert "--mtp-attention chain does not work here" in line
    assert "--attention-dropout 0" in line
