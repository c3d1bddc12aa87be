"""Which depths of which anchors count, and the product over a chain of depths with its weights."""

from __future__ import annotations

import torch
from torch import Tensor

HORIZONS = ("full", "partial", "per-depth")


def counted(valid: Tensor, horizon: str) -> Tensor:
    """Entries that have a term in the loss.

    `full`: all of a chain or nothing of it; `partial`: its valid prefix; `per-depth`: whatever is valid.

    Shape: valid [k, n] bool -> [k, n] bool.
    """
    if horizon == "full":
        return valid.all(0).expand_as(valid)
    if horizon == "partial":
        return valid.long().cumprod(0).bool()
    return valid


def anchors(valid: Tensor, horizon: str) -> Tensor:
    """How many anchors each depth's average runs over.

    Shape: valid [k, n] bool -> [k] int64.
    """
    if horizon == "per-depth":
        return valid.sum(1)
    return counted(valid, horizon)[0].sum().expand(valid.shape[0])


def prefix_products(alpha: Tensor) -> Tensor:
    """Probability that a chain survives up to each depth.

    Shape: alpha [k, n] -> [k, n].
    """
    return alpha.cumprod(0)


def end_to_end_weights(alpha: Tensor, scale: Tensor) -> Tensor:
    """Derivative of sum_m scale_m prod_{l<=m} alpha_l in each alpha_i.

    That is w_i = (prod_{l<i} alpha_l) (scale_i + sum_{m>i} scale_m prod_{i<l<=m} alpha_l). Depths before and after i
    are multiplied up separately, because the product over alpha_i is 0/0 for a dead chain.

    Shape: alpha [k, n], scale [k, 1] -> [k, n].
    """
    weights = torch.empty_like(alpha)
    after = torch.zeros_like(alpha[0])
    for i in reversed(range(len(alpha))):
        after = scale[i] + after
        weights[i] = after
        after = alpha[i] * after
    before = torch.ones_like(alpha[0])
    for i in range(len(alpha)):
        weights[i] *= before
        before = before * alpha[i]
    return weights
