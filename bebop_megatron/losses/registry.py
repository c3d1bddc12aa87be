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
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.losses.prefix import end_to_end_weights, prefix_products
from bebop_megatron.losses.rows import RowStats

ALPHA_FLOOR = 1e-4
HYBRID_DECAY = 3.0

Terms = tuple[Tensor, dict[str, Tensor]]


@dataclass(frozen=True)
class Objective:
    """One objective.

    `terms(stats, entries)` maps row statistics [k, n] and counted entries [k, n] bool to the loss of each entry [k, n]
    (divided by k, 0 where it does not count) and the coefficient [k, n] of each row direction of
    `rows.gradient_direction`.
    """

    description: str
    gradient: str
    terms: Callable[[RowStats, Tensor], Terms]
    needs_target: bool = True
    needs_labels: bool = False
    needs_reverse_kl: bool = False


def _simple(direction: str, loss: Callable[[RowStats], Tensor]) -> Callable[[RowStats, Tensor], Terms]:
    def terms(stats: RowStats, entries: Tensor) -> Terms:
        k = entries.shape[0]
        value = torch.where(entries, loss(stats), 0) / k
        return value, {direction: entries.to(value.dtype) / k}

    return terms


def _end_to_end(stats: RowStats, entries: Tensor) -> Terms:
    # alpha 0 ends the chain before the first entry that does not count
    alpha = torch.where(entries, stats.alpha, 0)
    value = torch.where(entries, 1 - prefix_products(alpha), 0) / entries.shape[0]
    return value, {"tv": torch.where(entries, end_to_end_weights(alpha), 0)}


def _log(stats: RowStats, entries: Tensor) -> Terms:
    alpha = stats.alpha.clamp(min=ALPHA_FLOOR)
    k = entries.shape[0]
    return torch.where(entries, -alpha.log(), 0) / k, {"tv": torch.where(entries, 1 / alpha, 0) / k}


def _hybrid(stats: RowStats, entries: Tensor) -> Terms:
    k = entries.shape[0]
    share = torch.where(entries, torch.exp(-HYBRID_DECAY * stats.alpha), 0)
    rest = torch.where(entries, 1 - share, 0)
    value = torch.where(entries, share * stats.kl + rest * (1 - stats.alpha), 0) / k
    return value, {"kl": share / k, "tv": rest / k}


OBJECTIVES: dict[str, Objective] = {
    "ce": Objective(
        "cross entropy with the next tokens (hard labels)",
        "q_j - [j = label]",
        _simple("ce", lambda s: -s.log_q_label),
        needs_target=False,
        needs_labels=True,
    ),
    "kl": Objective("KL(p||q): soft cross entropy", "q_j - p_j", _simple("kl", lambda s: s.kl)),
    "reverse-kl": Objective(
        "KL(q||p)",
        "q_j (log(q_j/p_j) - KL(q||p))",
        _simple("reverse-kl", lambda s: s.reverse_kl),
        needs_reverse_kl=True,
    ),
    "tv-step": Objective(
        "total variation of each depth: 1 - alpha_i",
        "-q_j ([q_j <= p_j] - S)",
        _simple("tv", lambda s: 1 - s.alpha),
    ),
    "tv": Objective("end-to-end total variation: 1 - mean accepted prefix", "-w_i q_j ([q_j <= p_j] - S)", _end_to_end),
    "lk": Objective("-log alpha_i: does not vanish for a cold head", "tv-step's / alpha_i", _log),
    "lk-hybrid": Objective(
        "KL while alpha is small, total variation after", "lambda kl's + (1 - lambda) tv-step's", _hybrid
    ),
}


def combined_terms(kind: str, mix: tuple[str, float] | None, stats: RowStats, entries: Tensor) -> Terms:
    """Terms of one objective, or of (1 - f) of it and f of another: the hand-over of a warm-up."""
    value, coefficients = OBJECTIVES[kind].terms(stats, entries)
    if mix is None:
        return value, coefficients
    other, fraction = mix
    other_value, other_coefficients = OBJECTIVES[other].terms(stats, entries)
    merged = {name: weight * (1 - fraction) for name, weight in coefficients.items()}
    for name, weight in other_coefficients.items():
        merged[name] = merged[name] + fraction * weight if name in merged else fraction * weight
    return value * (1 - fraction) + other_value * fraction, merged
