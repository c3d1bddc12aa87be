"""Measures one case in fresh processes: correctness, time with all contenders in turn, or the memory of one of them."""

from __future__ import annotations

import ctypes
import gc
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bebop_megatron.losses.reference import reference_objective
from benchmarks.loss.cases import Case, Problem, make_problem
from benchmarks.loss.contenders import CONTENDERS, FLOOR, BareProducts, ours

# rows of one product; the floor takes the fastest
FLOOR_ROWS = {"cpu": (128, 256, 512, 1024), "cuda": (1024, 2048, 4096, 8192)}
# relative error of loss and gradient: rounding of the products, and of one softmax in half precision
TOLERANCE = {"float32": (1e-5, 1e-4), "bfloat16": (2e-2, 5e-2), "float16": (4e-3, 1e-2)}
_WARM_UP_TOKENS = 16


def in_fresh_processes(work: Callable[..., Any], case: Case, *rest: Any) -> Any:
    """What `work(case, group, *rest)` returns on rank 0 of `case.tp` new processes.

    Raises:
        torch.multiprocessing.ProcessRaisedException, ProcessExitedException: a process failed.
    """
    with TemporaryDirectory() as folder:
        mp.spawn(_rank, (work, case, rest, folder), nprocs=case.tp)
        return json.loads(Path(folder, "result.json").read_text())


def _rank(rank: int, work: Callable[..., Any], case: Case, rest: tuple[Any, ...], folder: str) -> None:
    torch.set_num_threads(max(1, case.threads // case.tp))
    group = None
    if case.tp > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=case.tp)
        group = dist.group.WORLD
    result = work(case, group, *rest)
    if rank == 0:
        Path(folder, "result.json").write_text(json.dumps(result))
    if group is not None:
        dist.destroy_process_group()


def _synchronize(device: torch.device, group: Any = None) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()
    if group is not None:
        dist.barrier(group=group)


def errors(case: Case, group: Any, names: list[str]) -> dict[str, str]:
    """Contenders that are wrong on a small case of this kind, and how far off they are."""
    small = replace(case, n=19, h=24, v=101 * case.tp)
    problem = make_problem(small, group)
    whole = problem if group is None else make_problem(small)
    draft = whole.draft.cpu().double().requires_grad_()
    weight, target = whole.weight.cpu().double(), whole.target.cpu().double()
    rows = whole.target_rows.cpu()
    valid = torch.ones_like(rows, dtype=torch.bool)
    loss = reference_objective(draft @ weight.t(), (target @ weight.t())[rows], "tv", valid=valid)
    (expected,) = torch.autograd.grad(loss, draft)
    products = (draft.detach() @ weight.t()) @ weight
    allowed_loss, allowed_grad = TOLERANCE[case.dtype]

    out = {}
    for rows_each in (4, 1000):
        error = _distance(BareProducts(problem, rows_each)(), products)
        if not error <= allowed_grad:
            out[FLOOR] = f"products off by {error:.2g}"
    runs = {name: CONTENDERS[name] for name in names}
    runs["ours, in chunks"] = lambda problem: ours(problem, chunk_tokens=5)
    for name, run in runs.items():
        value, grad = run(problem)
        off = _distance(value, loss.detach()), _distance(grad, expected)
        if not (off[0] <= allowed_loss and off[1] <= allowed_grad):
            out[name] = f"loss off by {off[0]:.2g} (allowed {allowed_loss:g}), gradient by {off[1]:.2g}"
    return out


def _distance(result: Tensor, expected: Tensor) -> float:
    """Euclidean error relative to the size of what was expected; NaN stays NaN."""
    return float((result.cpu().double() - expected).norm() / expected.norm())


@dataclass(frozen=True)
class Timing:
    """Seconds of each round by contender, all in turn; `floor_rows`: rows a product of the floor has. A contender
    that ran out of memory has no seconds.
    """

    seconds: dict[str, list[float]]
    floor_rows: int


def timing(case: Case, group: Any, names: list[str], rounds: int, rows: int | None = None) -> dict[str, Any]:
    """Fields of `Timing`; `rows`: how many a product of the floor has, None: as many as are fastest."""
    problem = make_problem(case, group)
    device = problem.draft.device
    rows = rows or fastest_rows(problem)
    floor = BareProducts(problem, rows)
    runs: dict[str, Callable[[], Any]] = {FLOOR: floor}
    runs |= {name: lambda name=name: CONTENDERS[name](problem) for name in names}
    # kernels are chosen and compiled by shape on a GPU; a CPU only sets up its libraries
    warm_up = problem if device.type == "cuda" else problem.first(_WARM_UP_TOKENS)
    for name in names:
        try:
            CONTENDERS[name](warm_up)
        except torch.OutOfMemoryError:
            del runs[name]
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(rounds):
        # another one first in each round, so that none profits from its place
        order = list(runs)[number % len(runs) :] + list(runs)[: number % len(runs)]
        for name in order:
            taken[name].append(seconds(runs[name], device, group))
    return vars(Timing(taken | {name: [] for name in names if name not in runs}, rows))


def seconds(run: Callable[[], Any], device: torch.device, group: Any = None) -> float:
    """Time of one run, until all of the group are done."""
    gc.collect()
    _synchronize(device, group)
    start = time.perf_counter()
    run()
    _synchronize(device, group)
    return time.perf_counter() - start


def fastest_rows(problem: Problem) -> int:
    """Rows per product that are fastest on a part of the problem; the same on all ranks."""
    sizes = FLOOR_ROWS[problem.draft.device.type]
    part = problem.first(max(sizes) // len(problem.draft))
    best = {}
    for rows in sizes:
        floor = BareProducts(part, rows)
        best[rows] = min(seconds(floor, part.draft.device, part.group) for _ in range(2))
    fastest = torch.tensor(min(best, key=lambda rows: best[rows]))
    if problem.group is not None:
        dist.broadcast(fastest, 0, group=problem.group)
    return int(fastest)


def peak_memory(case: Case, group: Any, name: str) -> int | None:
    """Most bytes in use at one time beyond the inputs, the gradient included; None: ran out of memory."""
    problem = make_problem(case, group)
    run = CONTENDERS[name]
    run(problem.first(_WARM_UP_TOKENS))
    return peak_of(lambda: run(problem), problem.draft.device)


def peak_of(run: Callable[[], Any], device: torch.device) -> int | None:
    """Most bytes in use at one time while something runs, beyond what is in use; None: ran out of memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            kept = run()
        except torch.OutOfMemoryError:
            return None
        torch.cuda.synchronize()
        del kept
        return torch.cuda.max_memory_allocated() - before
    _return_free_memory()
    with _PeakResident() as peak:
        kept = run()
    del kept
    return peak.extra


def _return_free_memory() -> None:
    """Hand freed heap back to the system, so that what is used next is seen as new (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


class _PeakResident:
    """Resident memory above that at the start: sampled, and exact where the kernel's own high-water mark rises."""

    def __enter__(self) -> _PeakResident:
        self._before, self._mark = _resident("VmRSS"), _resident("VmHWM")
        self._highest, self._done = self._before, threading.Event()
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()
        return self

    def _sample(self) -> None:
        while not self._done.wait(0.002):
            self._highest = max(self._highest, _resident("VmRSS"))

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        mark = _resident("VmHWM")
        self.extra = max(self._highest, mark if mark > self._mark else 0) - self._before


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}: resident memory can only be measured on Linux")
