"""One CPU Megatron world for each module that decodes in its own process."""

from __future__ import annotations

import json

import pytest
import torch

from tests.evaluation import tiny
from tests.launch import pretrain


@pytest.fixture(scope="module")
def megatron():
    """Megatron on the CPU for the tests of a module."""
    if torch.cuda.is_available():
        pytest.skip("checks the CPU platform, and a CUDA device is present")
    with tiny.megatron_world():
        yield


@pytest.fixture(scope="session")
def prompts(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompts") / "ids.jsonl"
    lines = [json.dumps({"tokens": tokens}) for tokens in tiny.prompts(9, 3, 12, 5, 7, 4)]
    path.write_text("\n".join(lines) + "\n")
    return str(path)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    """A few steps of training with settings that Megatron's own `--use-checkpoint-args` leaves out."""
    root = tmp_path_factory.mktemp("checkpoint")
    flags = ["--mtp-loss", "kl", "--norm-epsilon", "1e-3", "--rotary-base", "5000", "--lr", "3e-2"]
    done = pretrain(*flags, "--train-iters", "12", "--save", str(root), "--save-interval", "12")
    assert done.returncode == 0, done.stderr[-3000:]
    return str(root)
