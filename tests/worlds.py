"""Worlds of gloo processes that go through tables of cases.

Megatron is imported once for all tests of a session, in a process of its own; every rank of every world is a fork of
it. A rank that imported for itself would spend most of its time on that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import psutil
import torch

from bebop_megatron.launcher import LOOPBACK, free_port
from tests.forks import SERVER

# a rank that waits longer for the others fails: what would hang ends here
_LIMIT = timedelta(seconds=120)
# what the others then have to fail too, seconds
_GRACE = 20
# far more than any table of cases takes
_STALLED = 500

Compute = Callable[[Any, Path], Any]


def _rank_main(rank: int, world: int, folder: str, port: int, compute: Compute, cases: Mapping[str, Any]) -> None:
    from bebop_megatron.mcore.compat import write_checkpoints_in_process

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    # a file store is read again for each of Megatron's fifty process groups. Rank 0 serves it: a server has a thread,
    # and what is forked beside a thread may wait for ever for a lock that it held
    store = torch.distributed.TCPStore(LOOPBACK, port, is_master=rank == 0, wait_for_workers=False, timeout=_LIMIT)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_LIMIT)
    write_checkpoints_in_process()
    out: dict[str, Any] = {}
    failed = False
    for index, (name, case) in enumerate(cases.items()):
        try:
            out[name] = {"result": compute(case, Path(folder) / f"case{index}")}
        except BaseException:  # noqa: BLE001 - the test shows every rank's failure
            out[name] = {"error": traceback.format_exc()}
            failed = True
            break
    torch.save(out, f"{folder}/rank{rank}.pt")
    # ranks that failed leave at once: the others must not wait for them. The others need the store until all are done
    if not failed:
        with contextlib.suppress(RuntimeError):
            torch.distributed.barrier()
    os._exit(failed)


def _wait(ranks: Sequence[Any]) -> None:
    """Until all ranks have ended; a while after one has failed they are made to."""
    deadline = float("inf")
    while running := [rank for rank in ranks if rank.is_alive()]:
        connection.wait([rank.sentinel for rank in running], timeout=1)
        if any(rank.exitcode for rank in ranks):
            deadline = min(deadline, time.monotonic() + _GRACE)
        if time.monotonic() > deadline:
            for rank in running:
                rank.kill()
                rank.join()


def _worlds_main(folder: str, compute: Compute, worlds: Mapping[int, Mapping[str, Any]]) -> None:
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    # Megatron prints every argument
    sys.stdout = open(os.devnull, "w")  # noqa: SIM115
    from bebop_megatron.mcore import install
    from bebop_megatron.platform import enter

    enter()
    install()
    fork = multiprocessing.get_context("fork")
    for world, cases in worlds.items():
        inside = f"{folder}/{world}"
        os.mkdir(inside)
        port = free_port()
        ranks = [
            fork.Process(target=_rank_main, args=(rank, world, inside, port, compute, cases)) for rank in range(world)
        ]
        for process in ranks:
            process.start()
        _wait(ranks)


def _results(folder: Path, size: int, cases: Iterable[str]) -> dict[str, list[Any]]:
    """What each rank of one world returned for each case.

    Raises:
        AssertionError: with what every rank has to say.
    """
    files = [folder / f"rank{rank}.pt" for rank in range(size)]
    ranks = [torch.load(file, weights_only=True) if file.exists() else None for file in files]
    told = []
    for number, outcome in enumerate(ranks):
        if outcome is None:
            told.append(f"rank {number} of {size} died, or was ended because it still waited")
        else:
            told += [f"{name}, rank {number}:\n{case['error']}" for name, case in outcome.items() if "error" in case]
    assert not told, "\n".join(told)
    return {name: [outcome[name]["result"] for outcome in ranks if outcome is not None] for name in cases}


def run_worlds(compute: Compute, worlds: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, list[Any]]]:
    """Run `compute(case, folder)` for each case on every rank of the world of that many processes.

    `folder` does not exist yet and is the same for all ranks of a case. Gives world -> name -> what each rank returned
    (tensors and plain data).

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        parent = SERVER.Process(target=_worlds_main, args=(folder, compute, worlds))
        parent.start()
        parent.join(_STALLED)
        if parent.is_alive():
            for process in [*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)]:
                process.kill()
            raise AssertionError(f"a world stalled for {_STALLED} seconds")
        return {world: _results(Path(folder) / str(world), world, cases) for world, cases in worlds.items()}
