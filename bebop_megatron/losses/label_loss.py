"""Cross entropy of logits that are there anyway: the target's, which a frozen backbone's own loss can share."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def label_nll(logits: Tensor, labels: Tensor, group: Any = None) -> Tensor:
    """Negative log-likelihood of labels over the whole, padded vocabulary, as Megatron's language-model loss has it.

    Shape: logits [n, v/tp], labels [n] int64 global ids -> [n] float32; a label that no rank holds counts as logit 0.
    Gradient: none.
    Collectives: two all-reduces over `group`.
    Memory: one float32 block of the size of the logits.
    """
    values = logits.float()
    top = values.amax(-1)
    if group is not None:
        dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    values = values - top[:, None]
    rank = 0 if group is None else dist.get_rank(group)
    column = labels - rank * logits.shape[1]
    held = (column >= 0) & (column < logits.shape[1])
    own = values.gather(1, torch.where(held, column, 0)[:, None])[:, 0]
    sums = torch.stack([torch.where(held, own, 0), values.exp_().sum(-1)])
    if group is not None:
        dist.all_reduce(sums, group=group)
    return sums[1].log() - sums[0]
