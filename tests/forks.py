"""Runs modules as `python -m` and torchrun would, as forks of one process that has paid for Megatron's import."""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path

from bebop_megatron.launcher import free_port, rank_environment
from benchmarks.forked import work_and_exit

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.preload"])


@dataclass(frozen=True)
class Run:
    """What a run printed, on all of its processes, and how it ended."""

    returncode: int
    stdout: str
    stderr: str

    @property
    def output(self) -> str:
        """Both streams."""
        return self.stdout + self.stderr

    def succeeded(self) -> str:
        """Its standard output.

        Raises:
            AssertionError: it failed; with the end of what it printed.
        """
        assert self.returncode == 0, self.output[-4000:]
        return self.stdout


def _main(module: str, arguments: Sequence[str], environment: dict[str, str], folder: str, streams: str) -> None:
    os.environ |= environment
    os.chdir(folder)
    sys.argv = [module, *arguments]
    work_and_exit(
        lambda: runpy.run_module(module, run_name="__main__", alter_sys=True), f"{streams}/stdout", f"{streams}/stderr"
    )


def run_module(module: str, *arguments: str, processes: int = 0, timeout: float = 300, **environment: str) -> Run:
    """Run `module` as the main program, from the working directory of the caller, to its end.

    With `processes`, as under torchrun: that many ranks, of which the first that fails ends the others, and its status
    is the run's. Without, as a program that nobody launches.

    Raises:
        TimeoutError: it took longer than `timeout` seconds.
    """
    port = free_port()
    names = [rank_environment(rank, processes, port) for rank in range(processes)] or [{}]
    with tempfile.TemporaryDirectory() as streams:
        ranks = [
            SERVER.Process(
                target=_main,
                args=(module, arguments, environment | name, os.getcwd(), streams),
            )
            for name in names
        ]
        for rank in ranks:
            rank.start()
        code, deadline = 0, time.monotonic() + timeout
        while any(rank.is_alive() for rank in ranks):
            connection.wait([rank.sentinel for rank in ranks if rank.is_alive()], timeout=1)
            failed = [rank.exitcode for rank in ranks if rank.exitcode]
            late = time.monotonic() > deadline
            if failed or late:
                code = code or (failed[0] if failed else 1)
                for rank in ranks:
                    rank.kill()
                    rank.join()
            if late:
                raise TimeoutError(f"{module} took more than {timeout} s")
        code = code or max(rank.exitcode or 0 for rank in ranks)
        text = [(Path(streams) / name).read_text() for name in ("stdout", "stderr")]
    return Run(code, *text)
