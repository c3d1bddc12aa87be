"""Cross entropy of logits that are there anyway: the target's, which a frozen backbone's own loss can share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.losses.rows import block_rows, blocks


@torch.no_grad()
def label_nll(logits: Tensor, labels: Tensor, scale: float = 1.0, group: Any = None) -> Tensor:
    """Negative log-likelihood of labels over the whole, padded vocabulary, as Megatron's language-model loss has it.

    Shape: logits [n, v/tp], to be multiplied by `scale` > 0, labels [n] int64 global ids -> [n] float32; a label that
    no rank holds counts as logit 0.
    Gradient: none.
    Collectives: two all-reduces over `group`.
    Memory: one float32 block of a few rows.
    """
    n, columns = logits.shape
    top = logits.amax(-1).float() * scale
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    column = labels - (0 if group is None else dist.get_rank(group) * columns)
    held = (column >= 0) & (column < columns)
    own = logits.gather(1, torch.where(held, column, 0)[:, None])[:, 0].float() * scale - top
    total = torch.empty_like(top)
    size = block_rows(n, columns, logits.device)
    space = logits.new_empty(size, columns, dtype=torch.float32)
    for part in blocks(n, size):
        # converted first: a product in half precision would be rounded
        above = space[: part.stop - part.start].copy_(logits[part]).mul_(scale).sub_(top[part, None])
        torch.sum(above.exp_(), -1, out=total[part])
    sums = torch.stack([torch.where(held, own, 0), total])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[1].log() - sums[0]
