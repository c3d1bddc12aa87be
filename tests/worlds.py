"""Worlds of gloo processes that go through tables of cases.

Megatron is imported once for all tests of a session, in a process of its own; every rank of every world is a fork of
it. A rank that imported for itself would spend most of its time on that.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import queue
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import torch

from bebop_megatron.launcher import LOOPBACK, free_port
from tests.forks import SERVER

_LIMIT = timedelta(seconds=120)
# far more than any table of cases takes
_STALLED = 500

Compute = Callable[[Any, Path], Any]


def _rank_main(rank: int, world: int, folder: str, port: int, compute: Compute, cases: Mapping[str, Any]) -> None:
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world), LOCAL_RANK=str(rank))
    # a file store is read again for each of Megatron's fifty process groups. Rank 0 serves it: a server has a thread,
    # and what is forked beside a thread may wait for ever for a lock that it held
    store = torch.distributed.TCPStore(LOOPBACK, port, is_master=rank == 0, wait_for_workers=False, timeout=_LIMIT)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=_LIMIT)
    # Megatron would start a Python process per rank for a queue that only its asynchronous writer needs
    filesystem_async._results_queue = queue.Queue()
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
    os._exit(0)


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
        for process in ranks:
            process.join()


def run_worlds(compute: Compute, worlds: Mapping[int, Mapping[str, Any]]) -> dict[int, dict[str, list[Any]]]:
    """Run `compute(case, folder)` for each case on every rank of the world of that many processes.

    `folder` does not exist yet and is the same for all ranks of a case. Gives world -> name -> what each rank returned
    (tensors and plain data).

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    found: dict[int, dict[str, list[Any]]] = {}
    with tempfile.TemporaryDirectory() as folder:
        parent = SERVER.Process(target=_worlds_main, args=(folder, compute, worlds))
        parent.start()
        parent.join(_STALLED)
        if parent.is_alive():
            for process in [*psutil.Process(parent.pid).children(recursive=True), psutil.Process(parent.pid)]:
                process.kill()
            raise AssertionError(f"a world stalled for {_STALLED} seconds")
        for world, cases in worlds.items():
            files = [Path(folder) / str(world) / f"rank{rank}.pt" for rank in range(world)]
            assert all(file.exists() for file in files), f"a rank of the world of {world} processes died"
            ranks = [torch.load(file, weights_only=True) for file in files]
            for name in cases:
                errors = [f"rank {i}:\n{r[name]['error']}" for i, r in enumerate(ranks) if "error" in r.get(name, {})]
                assert not errors, f"{name}:\n" + "\n".join(errors)
            found[world] = {name: [rank[name]["result"] for rank in ranks] for name in cases}
    return found
