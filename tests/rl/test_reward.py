"""Whatever a reward function does, the run goes on.

Catches: an exception, an endless loop (in Python and inside C), an exit, a crash or a print that reaches the worker; a
child that outlives its parent.
"""

from __future__ import annotations

import ctypes
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil
import pytest

from bebop_megatron.rl.reward import Scorer
from bebop_megatron.rl.task import Problem

PROBLEM = Problem("question", "answer")


@dataclass(frozen=True)
class Bad:
    """Does what the completion says."""

    def reward(self, problem, completion):
        if completion == "raise":
            raise KeyError("no such thing")
        if completion == "loop":
            while True:
                pass
        if completion == "regex":
            # one call that does not come back to the interpreter
            re.match("(a*)*$", "a" * 64 + "b")
        if completion == "exit":
            os._exit(0)
        if completion == "quit":
            sys.exit(3)
        if completion == "crash":
            ctypes.string_at(0)
        if completion == "nan":
            return float("nan")
        if completion == "print":
            print("standard output is taken")
        return float(len(completion))


@pytest.fixture(scope="module")
def scorer():
    with Scorer(Bad(), timeout=0.5) as made:
        yield made


@pytest.mark.parametrize("word", ["raise", "nan"])
def test_a_bad_reward_is_worth_nothing_and_keeps_the_process(scorer, word):
    scorer.score(PROBLEM, "warm")
    before, child = scorer.failures, scorer._child.pid
    assert scorer.score(PROBLEM, word) == 0
    assert scorer.failures == before + 1
    assert ("KeyError" if word == "raise" else "nan") in scorer.last_error
    assert scorer.score(PROBLEM, "fine") == 4
    assert scorer._child.pid == child


@pytest.mark.parametrize("word", ["loop", "regex", "exit", "crash", "quit"])
def test_a_reward_that_hangs_or_ends_its_process_costs_no_more(scorer, word):
    before, began = scorer.failures, time.monotonic()
    assert scorer.score(PROBLEM, word) == 0
    assert scorer.failures == before + 1
    assert scorer.score(PROBLEM, "fine") == 4
    assert time.monotonic() - began < 60


def test_printing_is_allowed(scorer):
    assert scorer.score(PROBLEM, "print") == 5


def test_nothing_outlives_a_killed_parent():
    program = (
        "from tests.rl.test_reward import Bad, PROBLEM\n"
        "from bebop_megatron.rl.reward import Scorer\n"
        "scorer = Scorer(Bad(), timeout=1.0)\n"
        "scorer.score(PROBLEM, 'start')\n"
        "print(scorer._child.pid, flush=True)\n"
        "scorer.score(PROBLEM, 'regex')\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    try:
        psutil.Process(child).wait(timeout=60)
    except psutil.NoSuchProcess:
        return
