"""Every objective: its loss per entry, and how its gradient combines the row directions.

    name         loss of depth i (mean over k depths)     gradient w.r.t. draft logit z_j
    ce           -log q(label)                            q_j - [j = label]
    kl           KL(p||q)                                 q_j - p_j
    reverse-kl   KL(q||p)                                 q_j (log(q_j/p_j) - KL(q||p))
    tv-step      1 - alpha_i                              -q_j ([q_j <= p_j] - S)
    tv           1 - prod_{l<=i} alpha_l (end to end)     -k w_i q_j ([q_j <= p_j] - S)
    lk           -log max(alpha_i, 1e-4)                  tv-step's / max(alpha_i, 1e-4)
    lk-hybrid    lambda KL + (1 - lambda)(1 - alpha_i)    lambda kl's + (1 - lambda) tv-step's

with lambda = exp(-3 alpha_i), not differentiated. The target p is never differentiated.

A gradient is a blend of directions, which a row can say of itself, times the row's weight, for which `tv` needs the
other depths of its anchor. So rows can be differentiated in any order, and weighted when all are done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.losses.prefix import end_to_end_weights, prefix_products
from bebop_megatron.losses.statistics import RowStats

ALPHA_FLOOR = 1e-4
HYBRID_DECAY = 3.0

Blend = dict[str, Tensor]
Terms = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Objective:
    """One objective: its loss per entry, and the blend of directions that is its gradient.

    Shape: `terms(stats, entries, scale)` maps row statistics [k, n], counted entries [k, n] bool and a factor on each
    depth's loss [k, 1] to the loss of each entry [k, n] (0 where it does not count) and the weight of its gradient
    [k, n]. `direction` names one of those of `rows.direction`, or maps the acceptance [n] of any rows to the
    coefficient [n] of each.
    """

    description: str
    gradient: str
    terms: Callable[[RowStats, Tensor, Tensor], Terms]
    direction: str | Callable[[Tensor], Blend]
    needs_target: bool = True
    needs_labels: bool = False
    needs_reverse_kl: bool = False

    def blend(self, alpha: Tensor) -> Blend:
        """The coefficient of each direction.

        Shape: alpha [n], the acceptance of any rows -> [n] for each direction.
        """
        return {self.direction: torch.ones_like(alpha)} if isinstance(self.direction, str) else self.direction(alpha)


def _simple(loss: Callable[[RowStats], Tensor]) -> Callable[[RowStats, Tensor, Tensor], Terms]:
    def terms(stats: RowStats, entries: Tensor, scale: Tensor) -> Terms:
        return torch.where(entries, loss(stats), 0) * scale, entries * scale

    return terms


def _end_to_end(stats: RowStats, entries: Tensor, scale: Tensor) -> Terms:
    # alpha 0 ends the chain before the first entry that does not count
    alpha = torch.where(entries, stats.alpha, 0)
    value = torch.where(entries, 1 - prefix_products(alpha), 0) * scale
    return value, torch.where(entries, end_to_end_weights(alpha, scale), 0)


def _log(stats: RowStats, entries: Tensor, scale: Tensor) -> Terms:
    alpha = stats.alpha.clamp(min=ALPHA_FLOOR)
    return torch.where(entries, -alpha.log(), 0) * scale, torch.where(entries, scale / alpha, 0)


def _share(alpha: Tensor) -> Tensor:
    return torch.exp(-HYBRID_DECAY * alpha)


def _hybrid(stats: RowStats) -> Tensor:
    share = _share(stats.alpha)
    return share * stats.kl + (1 - share) * (1 - stats.alpha)


OBJECTIVES: dict[str, Objective] = {
    "ce": Objective(
        "cross entropy with the next tokens (hard labels)",
        "q_j - [j = label]",
        _simple(lambda s: -s.log_q_label),
        "ce",
        needs_target=False,
        needs_labels=True,
    ),
    "kl": Objective("KL(p||q): soft cross entropy", "q_j - p_j", _simple(lambda s: s.kl), "kl"),
    "reverse-kl": Objective(
        "KL(q||p)",
        "q_j (log(q_j/p_j) - KL(q||p))",
        _simple(lambda s: s.reverse_kl),
        "reverse-kl",
        needs_reverse_kl=True,
    ),
    "tv-step": Objective(
        "total variation of each depth: 1 - alpha_i",
        "-q_j ([q_j <= p_j] - S)",
        _simple(lambda s: 1 - s.alpha),
        "tv",
    ),
    "tv": Objective(
        "end-to-end total variation: 1 - mean accepted prefix",
        "-w_i q_j ([q_j <= p_j] - S)",
        _end_to_end,
        "tv",
    ),
    "lk": Objective("-log alpha_i: does not vanish for a cold head", "tv-step's / alpha_i", _log, "tv"),
    "lk-hybrid": Objective(
        "KL while alpha is small, total variation after",
        "lambda kl's + (1 - lambda) tv-step's",
        _simple(_hybrid),
        lambda alpha: {"kl": _share(alpha), "tv": 1 - _share(alpha)},
    ),
}


def shares(kind: str, mix: tuple[str, float] | None) -> dict[str, float]:
    """The objectives in play and the share of each: one, or two while a warm-up hands over."""
    if mix is None or mix[0] == kind:
        return {kind: 1.0}
    other, fraction = mix
    return {name: share for name, share in ((kind, 1 - fraction), (other, fraction)) if share}


def weighted_terms(
    of: dict[str, float], stats: RowStats, entries: Tensor, scale: Tensor
) -> tuple[Tensor, list[Tensor]]:
    """Loss [] of a mix of objectives, and for each of them its share of the weights [k, n] of the gradient.

    Shape: statistics and entries [k, n], scale [k]: factor on each depth's sum, of which the mean over depths is taken.
    """
    total, weights = stats.alpha.new_zeros(()), []
    for kind, share in of.items():
        by_depth = (scale * (share / len(scale))).to(stats.alpha.dtype)[:, None]
        value, weight = OBJECTIVES[kind].terms(stats, entries, by_depth)
        total = total + value.sum()
        weights.append(weight)
    return total, weights


def loss_by_depth(kind: str, stats: RowStats, entries: Tensor) -> Tensor:
    """An objective summed over the counted entries of each depth: [k, n] -> [k] float64, divided by nothing."""
    value, _ = OBJECTIVES[kind].terms(stats, entries, stats.alpha.new_ones(len(entries), 1))
    return value.double().sum(1)
