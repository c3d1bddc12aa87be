"""The whole loop on Ray: a run that is disturbed in every way, gone on with, and one that is left alone.

Catches: a killed worker or learner, or an interruption, that changes anything but times; processes that outlive Ctrl-C,
or that it waits for; weights that do not arrive at the workers; a resumed run that trains a step twice, skips one, or
cannot be made longer.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
import torch

from bebop_megatron.mcore.checkpoints import weight_bytes
from bebop_megatron.rl.actors import cluster
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.ledger import Order
from bebop_megatron.rl.loop import Loop
from tests.launch import ROOT
from tests.rl.raising import Raising

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

# with the bonus every step moves the policy, whatever it is rewarded with
FLAGS = """--task tests.rl.raising/Raising --groups 4 --groups-per-rollout 2 --group-size 4 --micro-batch-size 8
--max-new-tokens 10 --gamma 2 --lr 3e-3 --temperature 1.5 --entropy-bonus 0.1 --mtp-strategy online-tv
--save-interval 2 --early-steps 3""".split()
VOCAB_SIZE = Raising().codec(None).vocab_size
# what depends on the machine
TIMES = {"rollout_seconds", "learner_seconds", "step_seconds", "tokens_per_second"}


@pytest.fixture(scope="module")
def config(checkpoint):
    """Settings of a run, by its folder and number of steps."""

    def made(folder: Path, steps: int, *more: str) -> RLConfig:
        return RLConfig.from_arguments(
            ["--load", checkpoint, "--output", str(folder), "--steps", str(steps), *FLAGS, *more]
        )

    return made


def _read(file: Path):
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


def _rows(folder: Path):
    return [{name: row[name] for name in row if name not in TIMES} for row in _read(folder / "steps.jsonl")]


def _died(folder: Path) -> set[str]:
    return {event["actor"] for event in _read(folder / "trace.jsonl") if event["event"] == "died"}


@dataclass
class _Disturbed:
    """How a run ended that was interrupted, and what was left of it."""

    folder: Path
    status: int
    seconds: float
    outlived: list[psutil.Process]
    # processes of Ray's that the interrupt of a terminal ends, by name
    reached: set[str]


def _ignores_interrupt(process: psutil.Process) -> bool:
    ignored = re.search(r"SigIgn:\s*(\w+)", Path(f"/proc/{process.pid}/status").read_text())
    return ignored is not None and bool(int(ignored[1], 16) >> (signal.SIGINT - 1) & 1)


@pytest.fixture(scope="module")
def disturbed(checkpoint, tmp_path_factory):
    """A run as a user starts it: its worker is killed, then its learner, then it is interrupted from the terminal."""
    folder = tmp_path_factory.mktemp("disturbed")
    flags = ["--load", checkpoint, "--output", str(folder), "--steps", "99999", *FLAGS]
    run = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "bebop_megatron.rl", *flags],
        stdout=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        # a group of its own, as a shell gives to a command
        start_new_session=True,
        # where the tests run in the background of a shell, its children ignore the interrupt
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )

    def wait_for(condition):
        deadline = time.monotonic() + 300
        while not condition():
            assert run.poll() is None, f"the run ended with {run.returncode}"
            assert time.monotonic() < deadline, "the run does not get on"
            time.sleep(0.05)

    def steps() -> int:
        return len(_rows(folder))

    def kill(actor: str) -> None:
        for child in psutil.Process(run.pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if " ".join(child.cmdline()).startswith(f"ray::{actor}"):
                    child.kill()

    try:
        wait_for(lambda: steps() >= 1)
        kill("WorkerActor")
        wait_for(lambda: "worker-0" in _died(folder) and steps() >= 3)
        kill("LearnerActor")
        wait_for(lambda: "learner-0" in _died(folder))
        # the steps behind the checkpoint are trained again
        known = steps()
        wait_for(lambda: steps() >= max(5, known + 1))
        started = psutil.Process(run.pid).children(recursive=True)
        servers = {process.name(): process for process in started if process.name() in ("gcs_server", "raylet")}
        assert len(servers) == 2
        reached = {name for name, process in servers.items() if not _ignores_interrupt(process)}
        began = time.monotonic()
        # as a terminal does: to the whole group
        os.killpg(run.pid, signal.SIGINT)
        status = run.wait(120)
        seconds = time.monotonic() - began
    finally:
        if run.poll() is None:
            run.send_signal(signal.SIGINT)
            run.wait(120)
    return _Disturbed(folder, status, seconds, psutil.wait_procs(started, timeout=5)[1], reached)


@pytest.fixture(scope="module")
def ray(checkpoint, config, tmp_path_factory):
    with cluster(config(tmp_path_factory.mktemp("logs"), 1), weight_bytes(checkpoint)) as started:
        yield started


def _end(ray, loop):
    for actor in [*loop.learners, *(slot.actor for slot in loop.slots)]:
        ray.kill(actor)


@pytest.fixture(scope="module")
def resumed(disturbed, ray, config):
    """The disturbed run, gone on with for two steps."""
    committed = json.loads((disturbed.folder / "committed.json").read_text())["step"]
    loop = Loop(config(disturbed.folder, committed + 2), VOCAB_SIZE, ray)
    assert loop.resumed_at == committed
    loop.run()
    _end(ray, loop)
    return disturbed.folder


@dataclass
class _Undisturbed:
    """A run's folder, and a step that was taken behind it on rollouts of the newest policy."""

    folder: Path
    on_policy: dict[str, float]


@pytest.fixture(scope="module")
def undisturbed(resumed, ray, config, tmp_path_factory):
    """A run of as many steps as the other."""
    folder, steps = tmp_path_factory.mktemp("undisturbed"), len(_rows(resumed))
    loop = Loop(config(folder, steps), VOCAB_SIZE, ray)
    loop.run()
    worker, (learner,) = loop.slots[0].actor, loop.learners
    orders = [Order(number, steps, steps) for number in loop.ledger.numbers(steps)]
    rollouts = [worker.rollout.remote(order, ("newest", steps), loop.weights[steps]) for order in orders]
    trained = ray.get(learner.step.remote(steps, ray.get(rollouts)))
    _end(ray, loop)
    return _Undisturbed(folder, trained["values"])


def test_an_interrupt_ends_everything(disturbed):
    assert disturbed.status == 130
    assert disturbed.seconds < 20
    assert not disturbed.outlived
    # without them Ray's own end may wait for a minute
    assert not disturbed.reached


def test_deaths_and_interruptions_change_nothing_but_times(resumed, undisturbed, ray, config):
    rows = _rows(resumed)
    assert len(rows) >= 4
    assert rows == _rows(undisturbed.folder)
    # nothing is left to be done, and nothing is done
    before = (resumed / "steps.jsonl").read_text()
    assert Loop(config(resumed, len(rows)), VOCAB_SIZE, ray).run() is None
    assert (resumed / "steps.jsonl").read_text() == before


def test_workers_decode_with_the_weights_that_the_learner_has(undisturbed):
    # on policy, the rollout's log-probabilities are the learner's
    assert undisturbed.on_policy["importance"] == pytest.approx(1, abs=1e-5)
    assert abs(undisturbed.on_policy["kl"]) < 1e-6
    rows = _rows(undisturbed.folder)
    assert rows[0]["importance"] == pytest.approx(1, abs=1e-5)
    assert all(abs(row["importance"] - 1) > 1e-5 for row in rows[1:])


def test_rows_say_what_happened(undisturbed):
    rows = _read(undisturbed.folder / "steps.jsonl")
    assert [row["step"] for row in rows] == list(range(len(rows)))
    assert [row["staleness"] for row in rows] == [0] + [1] * (len(rows) - 1)
    for row in rows:
        assert 1 <= row["accept_length"] <= 3
        assert row["accept_rate"] == pytest.approx((row["accept_length"] - 1) / 2)
        assert set(row["expected"]["accept_length"]) == {"rejection", "target-only"}
        assert row["mtp_loss"] is not None
        assert row["grad_norm"] > 0
        assert (row["entropy_part"] is None) == (row["step"] < 3)
    failed = [row for row in rows if row["failed_rewards"]]
    assert failed
    assert all(row["reward_error"] == "KeyError: 'no such thing'" for row in failed)
    start, last = sum(row["accept_length"] for row in rows[:3]) / 3, rows[-1]
    assert last["entropy_part"] + last["mismatch_part"] == pytest.approx(last["accept_length"] - start)


def test_the_trace_shows_rollouts_while_the_learner_works(undisturbed):
    events = _read(undisturbed.folder / "trace.jsonl")
    assert {"decode", "reward", "probe", "weights", "train", "export", "save"} <= {event["event"] for event in events}
    assert all(event["begin"] <= event["end"] for event in events)
    busy = [event for event in events if event["event"] in ("train", "save")]
    decoding = [event for event in events if event["event"] == "decode"]
    assert any(d["begin"] < b["end"] and b["begin"] < d["end"] for d in decoding for b in busy)


def test_other_settings_do_not_go_on_with_a_run(config, undisturbed):
    with pytest.raises(ValueError, match=r"other settings \(lr\)"):
        Loop(config(undisturbed.folder, 6, "--lr", "1.0"), VOCAB_SIZE, ray=None)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "chess"], "unknown task 'chess'"),
        (["--load", "nowhere"], "is not a Megatron checkpoint"),
        (["--max-new-tokens", "100"], "need"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(checkpoint, tmp_path, monkeypatch, flags, message):
    from bebop_megatron.rl import __main__ as command

    monkeypatch.setattr("bebop_megatron.rl.actors.cluster", lambda *_: pytest.fail("Ray was started"))
    base = ["--load", checkpoint, "--task", "letters", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        command.main([*base, *flags])
    assert message in str(end.value)
