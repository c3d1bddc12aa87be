"""Alternating phases in Megatron's own loop and checkpoints. Catches a resume that drifts, a step count that is lost or
shared, a changed schedule that goes unnoticed, and errors that come after work has been done.
"""

from __future__ import annotations

import shutil

import pytest
import torch

from bebop_megatron.mcore.checkpoints import latest_iteration_dir
from tests.launch import log, pretrain
from tests.saved import saved_tensors

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

SCHEDULE = ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone:2,mtp:2,none:2"]
OWN = ["--mtp-lr", "5e-3", "--mtp-lr-warmup-iters", "4", "--mtp-clip-grad", "0.3", "--weight-decay", "0.1"]
# parameter by parameter: the default format has padding in it, whose values mean nothing
DISTRIBUTED = ["--use-distributed-optimizer", "--overlap-grad-reduce", "--overlap-param-gather"]
DISTRIBUTED += ["--dist-ckpt-optim-fully-reshardable"]
OPTIMIZERS = {"adam": OWN, "distributed": [*DISTRIBUTED, "--weight-decay", "0.1"]}
# mid-phase, and exactly on a switch
STOPS = (3, 6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """For both optimizers one uninterrupted run of nine iterations, and runs resumed from two of its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")

    def flags(kind, root, *more):
        return [*SCHEDULE, *OPTIMIZERS[kind], "--train-iters", "9", "--save", str(root), *more]

    whole = {kind: folder / kind for kind in OPTIMIZERS}
    plain = ["--mtp-loss", "tv", "--train-iters", "2", "--save", str(folder / "plain"), "--save-interval", "2"]
    found = {
        (kind, 0): (root, pretrain(*flags(kind, root, "--save-interval", "3")).succeeded())
        for kind, root in whole.items()
    }
    pretrain(*plain).succeeded()
    later = {}
    for kind, root in whole.items():
        for stop in STOPS:
            copy = folder / f"{kind}-{stop}"
            shutil.copytree(root / f"iter_{stop:07d}", copy / f"iter_{stop:07d}")
            (copy / "latest_checkpointed_iteration.txt").write_text(str(stop))
            later[kind, stop] = copy
    changed = folder / "changed"
    shutil.copytree(later["adam", 3], changed)
    # a shorter run than was planned: Megatron wants to be told that its learning rate schedule changes on purpose
    shorter = "--override-opt-param-scheduler"
    for (kind, stop), root in later.items():
        run = pretrain(*flags(kind, root, "--load", str(root), "--save-interval", "100"))
        found[kind, stop] = (root, run.succeeded())
    one_phase = ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone", "--train-iters", "4", "--load", str(changed)]
    found["to one phase"] = pretrain(*one_phase, *OWN, shorter).succeeded()
    unscheduled = ["--train-iters", "3", "--load", str(folder / "plain")]
    found["from no schedule"] = pretrain(*SCHEDULE, *OWN, *unscheduled, shorter).succeeded()
    return found


@pytest.mark.parametrize("stop", STOPS)
@pytest.mark.parametrize("kind", sorted(OPTIMIZERS))
def test_resumed_run_equals_the_uninterrupted_one_bit_for_bit(runs, kind, stop):
    (whole, printed), (resumed, again) = runs[kind, 0], runs[kind, stop]
    expected, found = (saved_tensors(latest_iteration_dir(root), optimizer=True) for root in (whole, resumed))
    assert expected.keys() == found.keys()
    assert any(key.startswith("optimizer") for key in expected)
    for key, value in expected.items():
        assert torch.equal(found[key], value), key
    # Megatron's second log line after a start averages over the first as well
    for iteration in range(stop + 3, 10):
        assert log(again)[iteration] == log(printed)[iteration]


def test_phase_is_in_the_table_in_every_line_and_at_every_switch(runs):
    _, printed = runs["adam", 0]
    assert "  3-4         mtp       backbone       not run" in printed
    assert "repeats every 6 iterations" in printed
    lines = log(printed)
    phases = [lines[i]["freeze phase"] for i in range(1, 10)]
    cycle = ["backbone frozen 1/2", "backbone frozen 2/2", "mtp frozen 1/2", "mtp frozen 2/2", "joint 1/2", "joint 2/2"]
    assert phases == (cycle + cycle)[:9]
    assert "bebop_megatron: from iteration 7: backbone frozen 1/2" in printed
    # no MTP layer has run, so there is nothing to report about it
    assert "mtp tv loss" in lines[2]
    assert "mtp tv loss" not in lines[4]
    # warm-up over four steps of the head, which it does not make while frozen; the line shows the next step's rate
    rates = [float(lines[i]["mtp learning rate"]) for i in range(1, 8)]
    assert rates == pytest.approx([2.5e-3, 3.75e-3, 3.75e-3, 3.75e-3, 5e-3, 5e-3, 5e-3])


def test_changed_schedule_is_announced_and_holds(runs):
    printed = runs["to one phase"]
    assert "warning: the freeze schedule changes at iteration 3, from backbone:2,mtp:2,none:2 to backbone" in printed
    assert log(printed)[4]["freeze phase"] == "backbone frozen 4"
    printed = runs["from no schedule"]
    assert "changes at iteration 2, from none to backbone:2,mtp:2,none:2" in printed
    assert log(printed)[3]["freeze phase"] == "mtp frozen 1/2"
