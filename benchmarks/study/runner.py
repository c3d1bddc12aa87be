"""Runs jobs in forks of one process that has paid for Megatron's import, a few at a time; says how far it is."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

from bebop_megatron.launcher import rank_environment
from benchmarks.forked import work_and_exit
from benchmarks.study.jobs import Job

_POLL_SECONDS = 0.1


class Work(Protocol):
    """A study, as the runner sees it."""

    @property
    def output(self) -> Path: ...

    def jobs(self) -> list[Job]: ...

    def done(self, job: Job) -> bool: ...

    def work(self, job: Job) -> None: ...


def warm_up() -> None:
    """Import once what every job needs; the forks share it. One thread each: the steps are too small to share."""
    import torch

    os.environ |= {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false", "PYTHONWARNINGS": "ignore"}
    torch.set_num_threads(1)
    with warnings.catch_warnings():
        # Megatron's import tells at length which optional packages are missing
        warnings.simplefilter("ignore")
        from bebop_megatron.platform import enter

        enter()
        import megatron.training.training  # noqa: F401
        import transformers  # noqa: F401

        import bebop_megatron.evaluation
        import bebop_megatron.pretrain  # noqa: F401


def start(study: Work, job: Job, log: Path) -> int:
    """Fork a process that does the job and writes what it says to `log`; returns its id."""
    log.parent.mkdir(parents=True, exist_ok=True)
    log.unlink(missing_ok=True)
    environment = rank_environment()
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    # a group of its own, in which the checkpoint writer's process can be ended with it; whoever is first makes it
    with contextlib.suppress(OSError):
        os.setpgid(child, child)
    if child:
        return child
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ |= environment
    work_and_exit(lambda: study.work(job), str(log), str(log))


class Progress:
    """One line for every job that ends, with the time that the rest will take at the pace so far."""

    def __init__(self, todo: Sequence[Job], workers: int, say: Callable[[str], None]) -> None:
        self.todo, self.workers, self.say = {job.name: job for job in todo}, workers, say
        self.total, self.began = len(todo), time.monotonic()
        self.seconds: dict[str, list[float]] = defaultdict(list)

    def left(self) -> float:
        """Seconds that the remaining jobs take; a cell, not a decoding job, is the unit."""
        known = [value for values in self.seconds.values() for value in values]
        usual = sum(known) / len(known) if known else 0.0
        rest = 0.0
        for job in self.todo.values():
            values = self.seconds.get(job.kind)
            rest += max(1, len(job.cells)) * (sum(values) / len(values) if values else usual)
        return rest / self.workers

    def ended(self, job: Job, seconds: float, outcome: str) -> None:
        """Note and show it."""
        del self.todo[job.name]
        self.seconds[job.kind].append(seconds / max(1, len(job.cells)))
        elapsed = time.monotonic() - self.began
        count = self.total - len(self.todo)
        self.say(
            f"[{count:>{len(str(self.total))}}/{self.total}] {elapsed / 60:5.1f} min, about {self.left() / 60:.0f} "
            f"more | {job.name}: {outcome} ({seconds:.0f} s)"
        )


class Runner:
    """Does the jobs of a study that are not done, in order, `workers` at a time."""

    def __init__(
        self, study: Work, workers: int, say: Callable[[str], None], outcome: Callable[[Job], str] | None = None
    ) -> None:
        self.study, self.workers, self.say = study, workers, say
        self.outcome = outcome or (lambda job: "done")
        self.failed: dict[str, str] = {}

    def run(self) -> dict[str, str]:
        """Names of jobs that failed, or that wait for one that did, with the reason."""
        todo = [job for job in self.study.jobs() if not self.study.done(job)]
        names = {job.name for job in todo}
        if not todo:
            return {}
        warm_up()
        progress = Progress(todo, self.workers, self.say)
        running: dict[int, tuple[Job, float]] = {}
        try:
            while todo or running:
                ready = [job for job in todo if not any(need in names for need in job.needs)]
                while ready and len(running) < self.workers:
                    job = ready.pop(0)
                    todo.remove(job)
                    running[start(self.study, job, self._log(job))] = (job, time.monotonic())
                process, status = _wait(running)
                job, began = running.pop(process)
                code = os.waitstatus_to_exitcode(status)
                if code or not self.study.done(job):
                    todo = self._give_up(job, todo, f"failed with {code}, see {self._log(job)}", progress)
                else:
                    names.discard(job.name)
                    progress.ended(job, time.monotonic() - began, self.outcome(job))
        finally:
            for process in running:
                os.killpg(process, signal.SIGTERM)
            for process in running:
                os.waitpid(process, 0)
        return self.failed

    def _log(self, job: Job) -> Path:
        return self.study.output / "logs" / f"{job.name.replace(' ', '-')}.log"

    def _give_up(self, job: Job, todo: list[Job], reason: str, progress: Progress) -> list[Job]:
        """Note the failure; returns what remains without all that waited for it."""
        self.failed[job.name] = reason
        progress.ended(job, 0.0, reason)
        lost = {job.name}
        for other in todo:
            if lost & set(other.needs):
                lost.add(other.name)
                self.failed[other.name] = f"needs {job.name}"
                progress.todo.pop(other.name, None)
        return [other for other in todo if other.name not in lost]


def _wait(running: dict[int, tuple[Job, float]]) -> tuple[int, int]:
    """The first of our processes to end, and its status."""
    while True:
        for process in running:
            ended, status = os.waitpid(process, os.WNOHANG)
            if ended:
                return ended, status
        time.sleep(_POLL_SECONDS)
