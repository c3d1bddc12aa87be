"""What is measured: sizes, their random inputs, and which sizes make up a suite."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

DEPTHS = (1, 2, 3, 5, 7)


@dataclass(frozen=True)
class Case:
    """k depths, n tokens, hidden size h, true vocabulary v over `tp` ranks; `threads` are shared by the ranks."""

    k: int = 3
    n: int = 2048
    h: int = 768
    v: int = 32_000
    tp: int = 1
    dtype: str = "float32"
    device: str = "cpu"
    threads: int = 2

    def __post_init__(self) -> None:
        if self.v % self.tp:
            raise ValueError(f"the vocabulary of {self.v:,} is not divided by tp={self.tp}")


@dataclass(frozen=True)
class Problem:
    """Shape: draft [k, n, h], target [n + k, h], weight [v/tp, h], target_rows [k, n]: depth i of anchor a meets row
    a + i, i from 1, so the rows that depth i meets are one slice.
    """

    draft: Tensor
    target: Tensor
    weight: Tensor
    target_rows: Tensor
    group: Any = None

    def first(self, n: int) -> Problem:
        """The same with n anchors only."""
        k = len(self.draft)
        draft, rows = self.draft[:, :n].contiguous(), self.target_rows[:, :n].contiguous()
        return replace(self, draft=draft, target=self.target[: n + k], target_rows=rows)


def make_problem(case: Case, group: Any = None) -> Problem:
    """A warm head: its hidden states are the target's and some noise, logits spread by two and a half."""
    device, dtype = torch.device(case.device), getattr(torch, case.dtype)
    g = torch.Generator(device).manual_seed(0)
    target = torch.randn(case.n + case.k, case.h, generator=g, device=device)
    rows = torch.arange(case.n, device=device) + torch.arange(1, case.k + 1, device=device)[:, None]
    draft = torch.randn(case.k, case.n, case.h, generator=g, device=device).mul_(0.3)
    for depth, own in enumerate(rows):
        draft[depth] += target[own]
    weight = torch.randn(case.v, case.h, generator=g, device=device).mul_(2.5 / case.h**0.5)
    if group is not None:
        columns = case.v // case.tp
        weight = weight[dist.get_rank(group) * columns :][:columns].clone()
    return Problem(draft.to(dtype), target.to(dtype), weight.to(dtype), rows, group)


@dataclass(frozen=True)
class Suite:
    """`default` is timed with most rounds; `timed` maps a sweep's name to its cases; `weighed` are cases whose memory
    is measured, from the fewest depths to the most, that of the other contenders only at `compared` depths.
    """

    default: Case
    timed: dict[str, list[Case]]
    weighed: list[Case]
    rounds: int
    sweep_rounds: int
    compared: tuple[int, ...] = DEPTHS

    @property
    def cases(self) -> list[Case]:
        return [self.default, *(case for cases in self.timed.values() for case in cases)]


def cpu_suite(threads: int) -> Suite:
    """The judged sizes; sweeps are timed on fewer tokens, so that all of it takes minutes."""
    default = Case(threads=threads)
    base = replace(default, n=256)
    return Suite(
        default,
        timed={
            "depths": [replace(base, k=k) for k in DEPTHS],
            "vocabulary": [replace(base, v=v) for v in (8_000, 64_000)],
            "tokens": [replace(base, n=n) for n in (64, 512)],
            "tensor parallel": [replace(base, n=128, tp=tp) for tp in (2, 4)],
        },
        weighed=[replace(default, k=k) for k in DEPTHS],
        rounds=5,
        sweep_rounds=3,
        compared=(1, 3, 7),
    )


def gpu_suite() -> Suite:
    """The sizes of a large model; one GPU has no tensor-parallel group."""
    default = Case(k=5, n=8192, h=4096, v=151_936, dtype="bfloat16", device="cuda")
    return Suite(
        default,
        timed={
            "depths": [replace(default, k=k) for k in DEPTHS],
            "vocabulary": [replace(default, v=v) for v in (32_000, 248_320)],
            "tokens": [replace(default, n=n) for n in (1024, 4096)],
        },
        weighed=[replace(default, k=k) for k in DEPTHS],
        rounds=10,
        sweep_rounds=5,
    )


def quick_suite(suite: Suite) -> Suite:
    """The same shapes with an eighth of the tokens and few rounds: shows that it runs and roughly what comes out."""
    default = replace(suite.default, n=suite.default.n // 8)
    return Suite(
        default,
        timed={
            "depths": [replace(default, k=k) for k in (1, 7)],
            "tensor parallel": [replace(c, n=64) for c in suite.timed.get("tensor parallel", [])[:1]],
        },
        weighed=[replace(default, k=k) for k in sorted({1, default.k, 7})],
        rounds=3,
        sweep_rounds=2,
    )
