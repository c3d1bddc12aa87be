"""Means of dependent observations with confidence intervals: sequences are the independent units, tokens are not."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor


def student_t(confidence: float, degrees: int) -> float:
    """Two-sided quantile of Student's distribution, expanded around the normal one (to 1% from 3 degrees on)."""
    if degrees < 1:
        return math.nan
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    if degrees == 1:
        return math.tan(math.pi * confidence / 2)
    if degrees == 2:
        return math.sqrt(2 / (1 - confidence**2)) * confidence
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    third = (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384
    return z + first / degrees + second / degrees**2 + third / degrees**3


@dataclass(frozen=True)
class Estimate:
    """A mean, its standard error and the number of independent units behind it; NaN where there are too few."""

    value: float
    stderr: float
    clusters: int

    def interval(self, confidence: float = 0.95) -> tuple[float, float]:
        """Lower and upper end of the two-sided interval."""
        half = student_t(confidence, self.clusters - 1) * self.stderr
        return self.value - half, self.value + half

    def scaled(self, factor: float, offset: float = 0.0) -> Estimate:
        """The estimate of `offset + factor * value`."""
        return Estimate(offset + factor * self.value, abs(factor) * self.stderr, self.clusters)

    def to_json(self) -> dict[str, Any]:
        """With the ends of its 95% interval."""
        low, high = self.interval()
        return asdict(self) | {"low": low, "high": high}


def ratio(totals: Tensor, weights: Tensor) -> Estimate:
    """sum(totals) / sum(weights) over independent clusters, with the linearised standard error of a ratio.

    Shape: [clusters] twice; clusters of weight 0 do not count.
    """
    totals, weights = totals.double(), weights.double()
    clusters, weight = int((weights > 0).sum()), float(weights.sum())
    if weight == 0:
        return Estimate(math.nan, math.nan, 0)
    value = float(totals.sum()) / weight
    if clusters < 2:
        return Estimate(value, math.nan, clusters)
    residual = totals - value * weights
    stderr = math.sqrt(clusters / (clusters - 1) * float(residual.square().sum())) / weight
    return Estimate(value, stderr, clusters)


def clustered_mean(values: Tensor, cluster: Tensor) -> Estimate:
    """Mean of observations that are dependent within a cluster.

    Shape: values [n], cluster [n] int64, any ids -> one estimate.
    """
    if len(values) == 0:
        return Estimate(math.nan, math.nan, 0)
    _, index = cluster.unique(return_inverse=True)
    size = int(index.max()) + 1
    totals = torch.zeros(size, dtype=torch.float64).index_add_(0, index, values.double())
    return ratio(totals, torch.bincount(index, minlength=size))
