"""Training through NeMo's own trainer, against Megatron's schedule without NeMo on the same parameters and batch.

Catches: a loss mask that never reaches the MTP loss, a frozen part that moves, metrics that are logged nowhere.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys

import pytest
import torch

from bebop_megatron.bridges.nemo import adapt, optimizer
from bebop_megatron.config import ObjectiveConfig
from tests.launch import ROOT

needs_nemo = [
    pytest.mark.nemo,
    pytest.mark.skipif(importlib.util.find_spec("nemo") is None, reason="needs NeMo 2.7.3: make nemo-check"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]


@pytest.mark.parametrize("call", [lambda: adapt(None, ObjectiveConfig(loss="tv")), lambda: optimizer(None, None)])
def test_without_the_package_the_error_says_what_to_install(call, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'nemo_toolkit==2\.7\.3'.*megatron_bridge"):
        call()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("nemo") / "out.pt"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.bridges.nemo_process", str(path)],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    assert "from iteration 1: backbone frozen" in done.stdout
    return torch.load(path, weights_only=True)


@pytest.mark.parametrize("mark", [pytest.param(None, marks=needs_nemo)])
def test_mtp_loss_and_acceptance_are_those_of_megatron(trained, mark):
    reference, first = trained["reference"], trained["logged"][0]
    names = [name for name in reference if name.startswith("mtp ")]
    assert "mtp tv loss" in names
    for name in names:
        assert first[name] == pytest.approx(reference[name], rel=1e-6), name
    assert first["reduced_train_loss"] == pytest.approx(reference["lm loss"], rel=1e-6)


@pytest.mark.parametrize(
    ("part", "first", "last"),
    [pytest.param("backbone", 0, 2, marks=needs_nemo), pytest.param("mtp", 2, 4, marks=needs_nemo)],
)
def test_frozen_part_is_bit_identical_and_the_other_moves(trained, part, first, last):
    before, after = trained["states"][first], trained["states"][last]
    same = {name: name in before and torch.equal(before[name], value) for name, value in after.items()}
    owned = {name: equal for name, equal in same.items() if ("mtp" in name.split(".")) == (part == "mtp")}
    # Adam makes its moments at its first step
    assert all(equal for name, equal in owned.items() if name in before)
    assert not any(equal for name, equal in same.items() if name not in owned and "/" not in name)
