"""Row statistics of whole distributions: each rank's share, added up over the vocabulary in three all-reduces."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bebop_megatron.losses.rows import LocalRows
from bebop_megatron.losses.shard import VocabShard


@dataclass(frozen=True)
class RowStats:
    """Statistics of each row.

    `alpha` = sum min(p, q), `covered` = sum q [q <= p] (S), `rejected` = sum q [q > p] (1 - S). `reverse_kl` is 0
    unless the objective needs it.

    Shape: each [n], or [k, n] for all depths; float32 (float64 for float64 hidden states), `greedy_*` bool.
    Units: divergences and entropies in nats.
    """

    alpha: Tensor
    covered: Tensor
    rejected: Tensor
    kl: Tensor
    reverse_kl: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor
    p_argmax_q: Tensor
    greedy_target: Tensor
    greedy_label: Tensor
    log_q_label: Tensor

    def view(self, *shape: int) -> RowStats:
        """The same numbers in another shape."""
        return RowStats(**{f.name: getattr(self, f.name).reshape(*shape) for f in fields(self)})


@dataclass(frozen=True)
class Distribution:
    """n distributions over the whole vocabulary, of which `local` is this rank's part.

    Shape: share [n], the probability that lies on this rank (None: all of it), shift [n] = local top - global top,
    log_sum [n] = log sum e^(logit - global top), entropy [n] in nats, first [n]: this rank is the first that holds a
    largest logit.
    """

    local: LocalRows
    share: Tensor | None
    shift: Tensor
    log_sum: Tensor
    entropy: Tensor
    first: Tensor


def distributions(sides: list[LocalRows], shard: VocabShard) -> list[Distribution]:
    """Put the ranks' shares together.

    Collectives: two all-reduces over the group, for all sides together.
    """
    sizes = [len(side.top) for side in sides]
    tops = shard.maximum(torch.cat([side.top for side in sides])).split(sizes)
    own = [_sums(side, top, shard) for side, top in zip(sides, tops, strict=True)]
    totals = shard.sum(torch.cat(own, dim=1)).split(sizes, dim=1)
    done = []
    for side, top, (here, _, mark), (norm, moment, marks) in zip(sides, tops, own, totals, strict=True):
        log_sum = norm.log()
        share = None if shard.group is None else here / norm
        first = shard.first(mark > 0, marks)
        done.append(Distribution(side, share, side.top - top, log_sum, log_sum - moment / norm, first))
    return done


def _sums(side: LocalRows, top: Tensor, shard: VocabShard) -> Tensor:
    """Sum of e^(z - top), of (z - top) e^(z - top), and who holds a largest logit: [3, n]."""
    shift = side.top - top
    norm = torch.exp(side.log_sum + shift)
    # a rank without a finite logit has no mass, and a shift of -inf
    moment = torch.where(norm > 0, norm * (side.mean + shift), 0)
    holds = (shift == 0) & bool(shard.columns)
    return torch.stack([norm, moment, shard.bit(holds).to(norm.dtype)])
