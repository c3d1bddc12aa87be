"""The whole loop on Ray, disturbed and undisturbed.

Catches: a killed worker or learner, or a run that was interrupted and started again, that changes anything but times;
weights that do not arrive at the workers; a resumed run that trains a step twice or skips one; a checkpoint that cannot
be decoded with; processes that outlive Ctrl-C.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest
import torch

from bebop_megatron.mcore.checkpoints import weight_bytes
from bebop_megatron.rl.actors import cluster
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.loop import Loop
from bebop_megatron.rl.tasks import make_task
from tests.launch import ROOT

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

# what depends on the machine
TIMES = {"rollout_seconds", "learner_seconds", "step_seconds", "tokens_per_second"}


@pytest.fixture(scope="module")
def config(checkpoint):
    return RLConfig(
        load=checkpoint,
        task="letters",
        steps=6,
        groups=4,
        groups_per_rollout=2,
        group_size=4,
        micro_batch_size=8,
        max_new_tokens=10,
        gamma=2,
        lr=3e-3,
        temperature=1.5,
        # so that every step moves the policy, whatever it is rewarded with
        entropy_bonus=0.1,
        strategy="online-tv",
        save_interval=2,
        early_steps=3,
    )


@pytest.fixture(scope="module")
def ray(config):
    with cluster(config, weight_bytes(config.load)) as started:
        yield started


class _Stop(Exception):
    """In place of Ctrl-C."""


def _run(ray, config, folder, report=lambda loop, row: None):
    vocab_size = make_task(config.task).codec(None).vocab_size
    loop = Loop(replace(config, output=str(folder)), vocab_size, ray, lambda row: report(loop, row))
    try:
        loop.run()
    finally:
        for actor in [*loop.learners, *(slot.actor for slot in loop.slots)]:
            ray.kill(actor)
    return loop


def _rows(folder, without=TIMES):
    rows = [json.loads(line) for line in (folder / "steps.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if name not in without} for row in rows]


def _events(folder):
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def undisturbed(ray, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("undisturbed")
    _run(ray, config, folder)
    return folder


def test_rows_say_what_happened(undisturbed):
    rows = _rows(undisturbed, without=())
    assert [row["step"] for row in rows] == list(range(6))
    assert [row["staleness"] for row in rows] == [0, 1, 1, 1, 1, 1]
    # on policy, the rollout's log-probabilities are the learner's
    assert rows[0]["importance"] == pytest.approx(1, abs=1e-5)
    assert all(abs(row["importance"] - 1) > 1e-5 for row in rows[1:])
    for row in rows:
        assert 1 <= row["accept_length"] <= 3
        assert row["accept_rate"] == pytest.approx((row["accept_length"] - 1) / 2)
        assert set(row["expected"]["accept_length"]) == {"rejection", "target-only"}
        assert row["mtp_loss"] is not None
        assert (row["entropy_part"] is None) == (row["step"] < 3)
    last = rows[-1]
    start = [sum(row[name] for row in rows[:3]) / 3 for name in ("accept_length", "entropy")]
    assert last["entropy_part"] + last["mismatch_part"] == pytest.approx(last["accept_length"] - start[0])


def test_the_trace_shows_rollouts_while_the_learner_works(undisturbed):
    events = _events(undisturbed)
    assert {"decode", "reward", "probe", "weights", "train", "export", "save"} <= {event["event"] for event in events}
    assert all(event["begin"] <= event["end"] for event in events)
    busy = [event for event in events if event["event"] in ("train", "save")]
    decoding = [event for event in events if event["event"] == "decode"]
    assert any(d["begin"] < b["end"] and b["begin"] < d["end"] for d in decoding for b in busy)


def test_deaths_and_interruptions_change_nothing_but_times(ray, config, undisturbed, tmp_path):
    done = set()

    def disturb(loop, row):
        # each once: the steps after the checkpoint are trained again
        if row["step"] in done:
            return
        done.add(row["step"])
        if row["step"] == 0:
            os.kill(loop.pids["worker-0"], signal.SIGKILL)
        if row["step"] == 2:
            os.kill(loop.pids["learner-0"], signal.SIGKILL)
        if row["step"] == 4:
            raise _Stop

    with pytest.raises(_Stop):
        _run(ray, config, tmp_path, disturb)
    assert {event["actor"] for event in _events(tmp_path) if event["event"] == "died"} == {"worker-0", "learner-0"}
    loop = _run(ray, config, tmp_path)
    assert loop.resumed_at in (2, 4)
    assert _rows(tmp_path) == _rows(undisturbed)
    # nothing is left to be done, and nothing is done
    before = (tmp_path / "steps.jsonl").read_text()
    assert Loop(replace(config, output=str(tmp_path)), 10, ray).run() is None
    assert (tmp_path / "steps.jsonl").read_text() == before


def test_other_settings_do_not_go_on_with_a_run(ray, config, undisturbed):
    with pytest.raises(ValueError, match=r"other settings \(lr\)"):
        Loop(replace(config, output=str(undisturbed), lr=1.0), 10, ray)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--task", "chess"], "unknown task 'chess'"),
        (["--load", "nowhere"], "is not a Megatron checkpoint"),
        (["--max-new-tokens", "100"], "need"),
    ],
)
def test_what_cannot_work_is_said_before_anything_starts(config, tmp_path, monkeypatch, flags, message):
    from bebop_megatron.rl import __main__ as command

    monkeypatch.setattr("bebop_megatron.rl.actors.cluster", lambda *_: pytest.fail("Ray was started"))
    base = ["--load", config.load, "--task", "letters", "--output", str(tmp_path)]
    with pytest.raises(SystemExit) as end:
        command.main([*base, *flags])
    assert message in str(end.value)


def test_an_interrupt_ends_everything(config, tmp_path):
    flags = ["--load", config.load, "--task", "letters", "--output", str(tmp_path), "--steps", "99999"]
    flags += ["--max-new-tokens", "16", "--lr", "3e-3", "--entropy-bonus", "0.1", "--staleness", "0"]
    command = [sys.executable, "-W", "ignore", "-m", "bebop_megatron.rl", *flags]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        env=environment,
        cwd=ROOT,
        start_new_session=True,
        # where the tests run in the background of a shell, its children ignore the interrupt
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    steps, deadline = tmp_path / "steps.jsonl", time.monotonic() + 600
    while not steps.is_file() or steps.read_text().count("\n") < 4:
        if run.poll() is not None or time.monotonic() > deadline:
            run.send_signal(signal.SIGINT)
            pytest.fail(f"no four steps; the run ended with {run.wait(120)}")
        time.sleep(0.5)
    started = psutil.Process(run.pid).children(recursive=True)
    assert "raylet" in {process.name() for process in started}
    # as a terminal does: to the whole group
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(120) == 130
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    # nothing is stale: rollouts come from the very weights that the learner has, step after step
    rows = _rows(tmp_path)
    assert all(row["grad_norm"] > 0 for row in rows)
    assert [row["importance"] for row in rows] == pytest.approx([1] * len(rows), abs=1e-4)
