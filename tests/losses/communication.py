"""How many bytes an anchor costs, as docs/loss.md states it, counted at the all-reduces of a gloo group.

A case of the world of `test_vocab_parallel.py`. Catches: a statistic more than the formula has, a target row that is
communicated once per depth, statistics in double precision, and anything that grows with the vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_megatron.losses import fused_linear_objective
from tests.losses.collectives import counting

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


def check_bytes(group: Any) -> None:
    """The same bytes in one chunk and in several, with few columns and with many."""
    for kind, labelled in (("tv", False), ("tv", True), ("lk-hybrid", False), ("ce", False)):
        for k in (1, 5):
            for dtype in DTYPES:
                statistics, gradient = formula(k, N, kind, dtype, labelled)
                for chunk_tokens, columns in ((None, 11), (7, 300)):
                    calls = measured(k, kind, dtype, columns, chunk_tokens, labelled, group)
                    what = f"{kind}, k={k}, {dtype}, chunks of {chunk_tokens} tokens, {columns} columns: {calls}"
                    assert {name for name, _ in calls} == {"all_reduce"}, what
                    assert len(calls) > 6 or chunk_tokens is None, f"one chunk only: {what}"
                    assert calls[-1][1] == gradient, what
                    assert sum(size for _, size in calls[:-1]) == statistics, what
