"""Train for the distribution that is served: top-k and top-p of the target over a sharded vocabulary."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.losses.shard import VocabShard

# halvings of the interval that holds the threshold: below fp32's resolution of a log-probability
_HALVINGS = 40


def _kth_largest(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    local = logits.new_full((logits.shape[0], k), -torch.inf)
    here = min(k, shard.columns)
    if here:
        local[:, :here] = logits.topk(here, dim=-1).values
    if shard.group is not None and shard.group.size() > 1:
        parts = [torch.empty_like(local) for _ in range(shard.group.size())]
        dist.all_gather(parts, local, group=shard.group)
        local = torch.cat(parts, dim=1)
    return local.topk(k, dim=-1).values[:, -1]


def outside_top_k(logits: Tensor, k: int, shard: VocabShard) -> Tensor:
    """Which logits are smaller than the row's k-th largest: [n, columns] -> [n, columns] bool.

    Collectives: one all-gather of [n, k] over the group.
    """
    if k >= shard.vocab_size:
        return torch.zeros_like(logits, dtype=torch.bool)
    return logits < _kth_largest(logits, k, shard)[:, None]


def _outside_nucleus(logits: Tensor, top_p: float, shard: VocabShard) -> Tensor:
    own = logits.amax(-1) if shard.columns else logits.new_full(logits.shape[:1], -torch.inf)
    maximum = shard.maximum(own)
    shifted = logits - maximum[:, None]
    weights = shifted.exp()
    total = shard.sum(weights.sum(-1))
    low = torch.full_like(total, -100.0)
    high = torch.zeros_like(total)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        mass = shard.sum(torch.where(shifted >= middle[:, None], weights, 0).sum(-1))
        enough = mass >= top_p * total
        low, high = torch.where(enough, middle, low), torch.where(enough, high, middle)
    # the shifted logits decide: low + maximum can round to above the logit that it stands for
    return shifted < low[:, None]


def filter_logits(logits: Tensor, top_k: int, top_p: float, shard: VocabShard) -> Tensor:
    """Send logits outside the k largest, then outside the smallest set of mass `top_p`, to -inf.

    Equal logits at the edge are kept together.

    Shape: logits [n, columns] fp32 or fp64, already divided by the temperature -> the same.
    Collectives: top-k one all-gather of [n, k]; top-p forty-two all-reduces of [n]: an option for runs that are
    served with filters, not a default.
    """
    if top_k:
        logits = logits.masked_fill(outside_top_k(logits, top_k, shard), -torch.inf)
    if top_p < 1:
        logits = logits.masked_fill(_outside_nucleus(logits, top_p, shard), -torch.inf)
    return logits
