"""Cross entropy of logits that are there anyway: the target's, which a frozen backbone's own loss can share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def label_nll(logits: Tensor, column: Tensor, group: Any = None, *, padding: Tensor | None = None) -> Tensor:
    """Negative log-likelihood of labels over the whole, padded vocabulary, as Megatron's language-model loss has it.

    Shape: logits [n, columns] of this rank, column [n] int64 of each label among them (out of range where another rank
    holds it), padding [n, c] logits of this rank's padding columns, if it has any -> [n] float32.
    Gradient: none.
    Collectives: two all-reduces over `group`.
    Memory: float32 blocks of the size of the logits.
    """
    blocks = [block.float() for block in (logits, padding) if block is not None and block.shape[1]]
    top = logits.new_full((len(logits),), -torch.inf, dtype=torch.float32)
    for block in blocks:
        top = torch.maximum(top, block.amax(-1))
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    sums = top.new_zeros(2, len(top))
    held = (column >= 0) & (column < logits.shape[1])
    if logits.shape[1]:
        own = logits.gather(1, torch.where(held, column, 0)[:, None])[:, 0].float()
        sums[0] = torch.where(held, own - top, 0)
    for block in blocks:
        sums[1] += (block - top[:, None]).exp_().sum(-1)
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[1].log() - sums[0]
