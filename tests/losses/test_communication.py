"""How many bytes an anchor costs, as docs/loss.md states it, counted at the all-reduces of a gloo group.

Catches: a statistic more than the formula has, a target row that is communicated once per depth, statistics in double
precision, and anything that grows with the vocabulary.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bebop_megatron.losses import fused_linear_objective
from tests.losses.collectives import counting

pytestmark = pytest.mark.dist

WORLD = 2
N = 40
HIDDEN = 8
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def formula(k: int, n: int, kind: str, dtype: torch.dtype, labelled: bool) -> tuple[int, int]:
    """Bytes of the statistics and of the hidden gradient for n anchors of k depths, as docs/loss.md has them."""
    # each row of logits: its maximum and three sums; each draft row: nine statistics
    targets = 0 if kind == "ce" else n + k - 1 + labelled
    statistics = 4 * (4 * (k * n + targets) + 9 * k * n)
    # the language-model loss of the first n target rows: no depth meets row 0
    statistics += 4 * 3 * n * labelled
    # fp16 gradients are added up in fp32
    return statistics, k * n * HIDDEN * (2 if dtype == torch.bfloat16 else 4)


def measured(
    k: int, kind: str, dtype: torch.dtype, columns: int, chunk_tokens: int | None, labelled: bool, group: Any
) -> list[tuple[str, int]]:
    """Names and bytes of the collectives of one micro-batch: depth i of anchor a meets row a + i."""
    g = torch.Generator().manual_seed(0)
    target = torch.randn(N + k, HIDDEN, generator=g).to(dtype)
    draft = torch.randn(k, N, HIDDEN, generator=g).to(dtype).requires_grad_()
    weight = torch.randn(columns, HIDDEN, generator=g).to(dtype)
    rows = torch.arange(N) + torch.arange(1, k + 1)[:, None]
    with counting(group, size=lambda tensor: tensor.nbytes) as calls:
        out = fused_linear_objective(
            draft,
            None if kind == "ce" else target,
            weight,
            target_rows=rows,
            kind=kind,
            labels=torch.zeros(k, N, dtype=torch.int64),
            row_labels=torch.zeros(N, dtype=torch.int64) if labelled else None,
            chunk_tokens=chunk_tokens,
            group=group,
        )
        out.loss.backward()
    assert isinstance(draft.grad, Tensor)
    return calls


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    for kind, labelled in (("tv", False), ("tv", True), ("lk-hybrid", False), ("ce", False)):
        for k in (1, 5):
            for dtype in DTYPES:
                statistics, gradient = formula(k, N, kind, dtype, labelled)
                # one chunk and several, few columns and many: the same bytes
                for chunk_tokens, columns in ((None, 11), (None, 300), (7, 11)):
                    calls = measured(k, kind, dtype, columns, chunk_tokens, labelled, group)
                    what = f"{kind}, k={k}, {dtype}, chunks of {chunk_tokens} tokens, {columns} columns: {calls}"
                    assert {name for name, _ in calls} == {"all_reduce"}, what
                    assert len(calls) > 6 or chunk_tokens is None, f"one chunk only: {what}"
                    assert calls[-1][1] == gradient, what
                    assert sum(size for _, size in calls[:-1]) == statistics, what
    dist.destroy_process_group()
    Path(folder, f"done-{rank}").touch()


def test_bytes_are_those_of_the_formula(tmp_path: Path) -> None:
    mp.spawn(_rank, (str(tmp_path),), nprocs=WORLD)
    assert all((tmp_path / f"done-{rank}").exists() for rank in range(WORLD))
