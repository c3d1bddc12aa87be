"""The training entry point, as a user runs it. Catches a freeze that is none, a resume that drifts, and late errors."""

from __future__ import annotations

import re
import shutil
import signal

import psutil
import pytest
import torch

from bebop_megatron.mcore.checkpoints import checkpoint_keys, latest_iteration_dir
from tests.launch import log, pretrain, start
from tests.saved import saved_tensors

FROZEN = {"adam": [], "distributed-optimizer": ["--use-distributed-optimizer"]}
FROZEN_STAGE = ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone", "--train-iters", "3"]
# what the error says -> the flags
BAD = {
    "choose one of ce, kl, lk, lk-hybrid, reverse-kl, tv, tv-step": ["--mtp-loss", "tvv"],
    "no per-depth horizon": ["--mtp-loss", "tv", "--mtp-loss-horizon", "per-depth"],
    "must be positive": ["--mtp-loss", "tv", "--mtp-loss-temperature", "0"],
    "unknown part 'head'": ["--mtp-loss", "tv", "--mtp-freeze-schedule", "head"],
    "the freeze schedule is empty": ["--mtp-loss", "tv", "--mtp-freeze-schedule", ""],
    "world size (1) is not divisible": ["--tensor-model-parallel-size", "2"],
    "--pretrained-checkpoint /nowhere is no Megatron checkpoint": ["--pretrained-checkpoint", "/nowhere"],
    "--load /nowhere holds no Megatron checkpoint": ["--load", "/nowhere"],
    "args.save_interval is not None": ["--save", "runs/none"],
    "--save /proc/x cannot be written": ["--save", "/proc/x", "--save-interval", "1"],
    "drop one": ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone", "--mtp-joint"],
}

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]


def under_torchrun(*flags, processes=1, status=0):
    """What a run prints that is started as users start it; the other runs of this file are forks of a warm process."""
    with start(*flags, processes=processes) as process:
        output = process.communicate(timeout=300)[0]
    assert process.returncode == status, output[-4000:]
    return output


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Backbone and head trained together for six steps, saved at three and six."""
    root = tmp_path_factory.mktemp("base")
    output = under_torchrun("--mtp-loss", "tv", "--train-iters", "6", "--save", str(root), "--save-interval", "3")
    return root, log(output)


@pytest.fixture(scope="module")
def runs(base, tmp_path_factory):
    """Everything that one process does after that: name -> run, and the folder of what they saved."""
    root, folder = base[0], tmp_path_factory.mktemp("runs")
    # a run that was stopped after three steps
    shutil.copytree(root / "iter_0000003", folder / "stopped" / "iter_0000003")
    (folder / "stopped" / "latest_checkpointed_iteration.txt").write_text("3")
    flags = {"resumed": ["--mtp-loss", "tv", "--train-iters", "6", "--load", str(folder / "stopped")]}
    # what must not be resumed
    shutil.copytree(folder / "stopped", folder / "overwritten")
    with next((folder / "overwritten").rglob("*.distcp")).open("r+b") as file:
        file.write(b"x" * 8)
    flags["longer"] = ["--train-iters", "7", "--load", str(folder / "stopped")]
    flags["overwritten"] = ["--train-iters", "6", "--load", str(folder / "overwritten")]
    for name, extra in FROZEN.items():
        saved = str(folder / name)
        (folder / name).mkdir()
        flags[name] = ["--mtp-loss", "tv", "--mtp-freeze-schedule", "backbone", "--weight-decay", "0.1"]
        flags[name] += ["--train-iters", "3", "--pretrained-checkpoint", str(root), "--load", saved, "--save", saved]
        flags[name] += ["--save-interval", "3", *extra]
    longer = ["--mtp-loss", "tv", "--train-iters", "4", "--override-opt-param-scheduler"]
    # the default format of a distributed optimizer
    flat = ["--mtp-loss", "tv", "--train-iters", "4", "--use-distributed-optimizer", "--load", str(folder / "flat")]
    flags["flat"] = [*flat, "--save", str(folder / "flat"), "--save-interval", "2"]
    flags["flat from the middle"] = [*flat, "--ckpt-step", "2"]
    # a format that none of the checks before a start can read
    legacy = ["--ckpt-format", "torch", "--load", str(folder / "legacy")]
    flags["saves legacy"] = ["--mtp-loss", "tv", "--train-iters", "3", "--save", str(folder / "legacy"), *legacy]
    flags["saves legacy"] += ["--save-interval", "3"]
    flags["legacy"] = [*longer, *legacy]
    # Megatron needs no file that names the newest where the step is given
    shutil.copytree(root / "iter_0000003", folder / "single" / "iter_0000003")
    flags["single"] = [*longer, "--load", str(folder / "single"), "--ckpt-step", "3"]
    flags["frozen"] = [*FROZEN_STAGE, "--pretrained-checkpoint", str(root)]
    flags["stock"] = ["--train-iters", "2", "--mtp-detach-heads"]
    plain = ["--mtp-num-layers", "0", "--train-iters", "1"]
    flags["no layers"] = [*plain, "--mtp-loss", "tv"]
    flags["saved without layers"] = [*plain, "--save", str(folder / "plain"), "--save-interval", "1"]
    flags["no weights"] = [*FROZEN_STAGE, "--pretrained-checkpoint", str(folder / "plain")]
    flags |= {message: ["--train-iters", "1", *bad] for message, bad in BAD.items()}
    return {name: pretrain(*given) for name, given in flags.items()}, folder


def test_log_line_has_objective_and_acceptance(base):
    line = base[1][6]
    assert 0 < float(line["mtp tv loss"]) < 1
    for rule in ("greedy-label", "greedy-target", "target-only", "rejection"):
        assert 1 <= float(line[f"mtp accept-length/{rule}"]) <= 3
    assert "lm loss" in line


def test_resumed_run_repeats_the_uninterrupted_one(base, runs):
    resumed = log(runs[0]["resumed"].succeeded())
    assert sorted(resumed) == [4, 5, 6]
    # Megatron's second log line after a start averages over the first as well, so 5 is not comparable
    for iteration in (4, 6):
        assert resumed[iteration] == base[1][iteration]


@pytest.mark.parametrize("name", ["legacy", "single"])
def test_every_checkpoint_that_megatron_resumes_from_is_let_through(runs, name):
    assert sorted(log(runs[0][name].succeeded())) == [4]


def test_resumed_distributed_optimizer_goes_on_with_its_step(runs):
    whole, resumed = (log(runs[0][name].succeeded()) for name in ("flat", "flat from the middle"))
    # the fourth loss is the first that an update after the start has moved
    assert [resumed[i]["mtp tv loss"] for i in (3, 4)] == [whole[i]["mtp tv loss"] for i in (3, 4)]


@pytest.mark.parametrize("name", FROZEN)
def test_frozen_backbone_is_bit_identical_and_head_moves(base, runs, name):
    runs[0][name].succeeded()
    before, after = (saved_tensors(latest_iteration_dir(root)) for root in (base[0], runs[1] / name))
    assert before.keys() == after.keys()
    backbone = [name for name in before if not name.startswith("mtp.")]
    head = [name for name in before if name.startswith("mtp.")]
    assert len(backbone) > 10
    assert len(head) > 5
    for weight in backbone:
        assert torch.equal(before[weight], after[weight]), weight
    for weight in head:
        assert not torch.equal(before[weight], after[weight]), weight
    # what does not train has no optimizer state either
    moments = [k for k in checkpoint_keys(runs[1] / name) if k.startswith("optimizer.") and "exp_avg" in k]
    assert FROZEN[name] or (moments and all(".mtp." in key for key in moments))


def test_frozen_pipeline_stage_gives_the_single_process_losses(base, runs):
    flags = [*FROZEN_STAGE, "--pretrained-checkpoint", str(base[0]), "--pipeline-model-parallel-size", "2"]
    one_log, two_log = log(runs[0]["frozen"].succeeded()), log(under_torchrun(*flags, processes=2))
    for iteration in (1, 2, 3):
        for name in ("lm loss", "mtp tv loss"):
            assert float(two_log[iteration][name]) == pytest.approx(float(one_log[iteration][name]), rel=1e-5)


def test_without_our_flags_it_is_megatron(runs):
    from tests.mcore.world import Layout, run

    line = log(runs[0]["stock"].succeeded())[2]
    assert {"lm loss", "mtp_1 loss", "mtp_2 loss"} <= line.keys()
    assert not [name for name in line if name.startswith("mtp ")]
    assert run([("stock", Layout(), None)])["stock"]["grads"]


# what the error says -> the run
LATE = {
    "begins with other bytes than were written": "overwritten",
    "--train-iters: 24 there, 28 here": "longer",
}


@pytest.mark.parametrize(("message", "name"), [*((message, message) for message in BAD), *LATE.items()])
def test_what_cannot_be_ends_with_one_clear_line(runs, message, name):
    run = runs[0][name]
    assert run.returncode != 0
    lines = [line for line in run.output.splitlines() if line.startswith("error:")]
    assert len(lines) == 1, run.output[-2000:]
    assert message in lines[0]


def test_loss_without_mtp_layers_and_checkpoint_without_mtp_weights_are_refused(runs):
    assert "add --mtp-num-layers" in runs[0]["no layers"].output
    runs[0]["saved without layers"].succeeded()
    assert runs[0]["no weights"].returncode != 0
    output = runs[0]["no weights"].output
    assert "has no MTP weights" in output
    assert "bebop_megatron.convert attach" in output


def test_termination_leaves_a_resumable_run(tmp_path):
    flags = ["--mtp-loss", "tv", "--train-iters", "100000", "--save", str(tmp_path), "--save-interval", "100000"]
    with start("--exit-signal-handler", *flags) as process:
        for line in process.stdout:
            if re.search(r"iteration +3/", line):
                break
        # to the worker, as Slurm does: torchrun would pass the signal on and kill whoever takes over 30 seconds
        (worker,) = psutil.Process(process.pid).children()
        worker.send_signal(signal.SIGTERM)
        process.communicate(timeout=240)
    stopped = int((tmp_path / "latest_checkpointed_iteration.txt").read_text())
    assert stopped >= 3
    # a shorter run than was planned: Megatron wants to be told that the schedule changes on purpose
    flags = ["--mtp-loss", "tv", "--train-iters", str(stopped + 2), "--override-opt-param-scheduler"]
    resumed = pretrain(*flags, "--load", str(tmp_path))
    assert resumed.returncode == 0, resumed.stderr[-3000:]
    assert sorted(log(resumed.stdout)) == [stopped + 1, stopped + 2]


def test_missing_data_file_is_named():
    done = pretrain("--train-iters", "1", "--data-path", "0.5", "/nowhere/corpus", mock_data=False)
    assert done.returncode != 0
    assert "error: --data-path /nowhere/corpus: /nowhere/corpus.bin does not exist" in done.stderr


def test_cpu_is_never_chosen_silently():
    output = under_torchrun("--train-iters", "1", "--distributed-backend", "nccl", status=1)
    assert "add --distributed-backend gloo" in output
