"""Validation metrics and the best checkpoint in Megatron's own loop.

Catches: metrics that change training, validation numbers missing from the line or TensorBoard or mixed up with those
of training, a best checkpoint that is not the best, is lost or forgotten at a restart, or does not load, an early phase
that a restart begins anew, and a frozen head that nobody measures.
"""

from __future__ import annotations

import json
import re
import shutil

import pytest
import torch

from bebop_megatron.mcore.checkpoints import latest_iteration_dir
from tests.launch import log, pretrain

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

LENGTH = "mtp accept-length/rejection"
BASE = ["--mtp-loss", "tv", "--train-iters", "8", "--eval-interval", "2", "--eval-iters", "2"]
KEEP = ["--mtp-metrics", "full", "--mtp-keep-best", "--mtp-entropy-baseline", "3", "--save-interval", "4"]
SHORT = ["--train-iters", "4"]


def validations(output):
    """Validation lines inside the run: iteration -> name -> value."""
    found = {}
    for line in output.splitlines():
        match = re.match(r" validation loss at iteration (\d+) \| (.*)", line)
        if match:
            pairs = re.findall(r"([^|]+?) value: (\S+) \|", match[2])
            found[int(match[1])] = {name.strip(): float(value) for name, value in pairs}
    return found


def losses(output):
    return [{k: v for k, v in line.items() if k in ("lm loss", "mtp tv loss")} for line in log(output).values()]


def scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    # the first of a step: behind the last one Megatron evaluates once more, on the next validation data
    return {tag: {e.step: e.value for e in reversed(events.Scalars(tag))} for tag in events.Tags()["scalars"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """One run in full, the same without metrics, and what goes on from its checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    whole, resumed, from_best = folder / "whole", folder / "resumed", folder / "from-best"
    board = ["--tensorboard-dir", str(folder / "board"), "--tensorboard-log-interval", "1"]
    frozen = [*BASE, "--train-iters", "2", "--mtp-freeze-schedule", "mtp:2,none:2"]
    found = {
        "folder": folder,
        "whole": pretrain(*BASE, *KEEP, "--save", str(whole), *board).succeeded(),
        "off": pretrain(*BASE, "--mtp-metrics", "off").succeeded(),
        "frozen": pretrain(*frozen).succeeded(),
    }
    shutil.copytree(whole, resumed)
    shutil.copytree(whole / "best", from_best)
    (resumed / "latest_checkpointed_iteration.txt").write_text("4")
    shutil.rmtree(resumed / "iter_0000008")
    # as a run leaves it that is killed between the two renames
    (resumed / "best").rename(resumed / "best.partial")
    again = pretrain(*BASE, *KEEP, "--load", str(resumed), "--save", str(resumed))
    best = pretrain(*BASE, "--load", str(from_best), "--eval-interval", "100")
    single = pretrain(*BASE, *KEEP, *SHORT, "--pretrained-checkpoint", str(whole), "--save", str(folder / "single"))
    return found | {"resumed": again.succeeded(), "from best": best.succeeded(), "single": single.succeeded()}


def record(folder):
    return json.loads((folder / "best" / "accept_length.json").read_text())


def test_metrics_do_not_change_training(runs):
    assert losses(runs["whole"]) == losses(runs["off"])
    assert not [name for name in log(runs["off"])[8] if name.startswith("mtp") and name != "mtp tv loss"]
    assert all(set(line) == {"lm loss"} for line in validations(runs["off"]).values())


WRITTEN = ("mtp tv loss", LENGTH, "mtp accept-prefix/target-only/2", "mtp entropy slope/rejection", "mtp kl")


def test_training_and_validation_lines_have_every_metric(runs):
    lines, training = validations(runs["whole"]), log(runs["whole"])
    assert sorted(lines) == [2, 4, 6, 8]
    for name in WRITTEN:
        assert all(name in line for line in lines.values()), name
        # also what is negative, which Megatron itself leaves out
        assert all(name in line for line in training.values()), name
    assert not [name for name in (*lines[8], *training[8]) if "bin" in name or name.startswith("mtp_")]
    assert float(training[8][LENGTH]) != lines[8][LENGTH]
    assert re.search(rf"iteration 8 on test set \|.*{LENGTH} value", runs["whole"])


def test_tensorboard_has_what_the_lines_have(runs):
    pytest.importorskip("tensorboard")
    lines = validations(runs["whole"])
    board = scalars(runs["folder"] / "board")
    for name in WRITTEN:
        for iteration, values in lines.items():
            assert board[f"{name} validation"][iteration] == pytest.approx(values[name], rel=1e-5), name
            assert board[f"{name} validation vs samples"][4 * iteration] == pytest.approx(values[name], rel=1e-5)
        assert board[name].keys() == set(range(1, 9)), name
    # of the test set, which Megatron evaluates at the end, under a name of its own
    assert 8 in board[f"{LENGTH} test"]
    assert any(name.startswith("mtp entropy bin/rejection/") for name in board)
    assert "mtp_1_acceptance_rate" in board


def test_best_checkpoint_is_that_of_the_largest_validation_accept_length(runs):
    lines = {i: values[LENGTH] for i, values in validations(runs["whole"]).items()}
    # behind the last step Megatron evaluates once more, on the next validation data
    last = re.findall(
        r"validation loss at iteration 8 on validation set \|.*?accept-length/rejection value: (\S+)", runs["whole"]
    )
    candidates = [*lines.items(), (8, float(last[0]))]
    iteration, value = max(candidates, key=lambda pair: pair[1])
    best = record(runs["folder"] / "whole")
    assert best["value"] == pytest.approx(value, rel=1e-6)
    assert best["iteration"] == iteration
    assert best["rule"] == "rejection"
    assert latest_iteration_dir(runs["folder"] / "whole" / "best").name == f"iter_{iteration:07d}"
    assert not (runs["folder"] / "whole" / "best.partial").exists()
    assert not (runs["folder"] / "whole" / "best.old").exists()


def test_best_checkpoint_loads(runs):
    iteration = record(runs["folder"] / "whole")["iteration"]
    if iteration == 8:
        assert "successfully loaded checkpoint" in runs["from best"]
    else:
        assert min(log(runs["from best"])) == iteration + 1


def test_restart_remembers_the_best_and_the_early_phase(runs):
    assert record(runs["folder"] / "resumed") == record(runs["folder"] / "whole")
    assert runs["resumed"].count("best validation accept length so far") == 0
    whole, again = log(runs["whole"]), log(runs["resumed"])
    assert sorted(again) == [5, 6, 7, 8]
    # two parts, of which one is negative more often than not
    assert {"mtp entropy part/rejection", "mtp mismatch part/rejection"} <= whole[4].keys()
    assert "mtp entropy part/rejection" not in whole[3]
    for iteration in (7, 8):
        assert again[iteration] == whole[iteration]


def test_frozen_head_is_still_measured_on_validation_data(runs):
    assert not [name for name in log(runs["frozen"])[2] if name.startswith("mtp accept-length")]
    assert 1 <= validations(runs["frozen"])[2][LENGTH] <= 3


def test_pipeline_ranks_agree_on_the_best(runs, tmp_path):
    flags = [*BASE, *KEEP, *SHORT, "--pretrained-checkpoint", str(runs["folder"] / "whole"), "--save", str(tmp_path)]
    done = pretrain(*flags, "--pipeline-model-parallel-size", "2", processes=2)
    assert done.returncode == 0, done.stderr[-3000:]
    single, found = validations(runs["single"]), validations(done.stdout)
    for iteration in (2, 4):
        assert found[iteration] == pytest.approx(single[iteration], rel=1e-4, abs=1e-5)
    assert log(done.stdout)[4]["mtp mismatch part/rejection"]
    best = record(runs["folder"] / "single")
    assert record(tmp_path)["iteration"] == best["iteration"]
    assert record(tmp_path)["value"] == pytest.approx(best["value"], rel=1e-5)
    # rank 0 holds no MTP layers, but writes the arguments
    from bebop_megatron.mcore.compat import saved_arguments

    assert saved_arguments(latest_iteration_dir(tmp_path)).bebop_early_phase["seen"] == 3


REFUSED = {
    "needs --save": ["--mtp-loss", "tv"],
    "drop --mtp-metrics off": ["--mtp-loss", "tv", "--mtp-metrics", "off"],
    "needs --mtp-loss": [],
}


def test_keeping_nothing_is_refused_in_one_line():
    for message, own in REFUSED.items():
        run = pretrain("--train-iters", "1", "--mtp-keep-best", *own)
        assert run.returncode != 0
        assert re.findall(rf"^error: .*{message}", run.output, flags=re.M), run.output[-2000:]
