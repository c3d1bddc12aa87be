"""Means with intervals, paired differences, and the line of acceptance over entropy.

Decoding gives, for each prompt, verifications v and accepted drafts a; the acceptance rate is the ratio of their sums,
sum a / (gamma sum v). Prompts are the independent units within a run, training seeds between runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

# two-sided 95% points of Student's t by degrees of freedom
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_NORMAL = 1.960


@dataclass(frozen=True)
class Estimate:
    """A value, its standard error (None: unknown) and half the width of its 95% interval."""

    value: float
    stderr: float | None
    half_width: float | None

    @property
    def interval(self) -> tuple[float, float] | None:
        """Ends of the 95% interval."""
        return None if self.half_width is None else (self.value - self.half_width, self.value + self.half_width)


def _student(degrees: int) -> float:
    return _T[degrees - 1] if degrees <= len(_T) else _NORMAL + 2.5 / degrees


def mean(values: Sequence[float]) -> Estimate:
    """Mean of independent values, one for each seed; a single one has no interval."""
    count = len(values)
    middle = sum(values) / count
    if count < 2:
        return Estimate(middle, None, None)
    stderr = math.sqrt(sum((value - middle) ** 2 for value in values) / (count - 1) / count)
    return Estimate(middle, stderr, _student(count - 1) * stderr)


def paired_mean(first: dict[int, float], other: dict[int, float]) -> Estimate:
    """first - other, seed by seed, over the seeds that both have.

    Raises:
        ValueError: they share none.
    """
    shared = sorted(first.keys() & other.keys())
    if not shared:
        raise ValueError(f"no seed in common: {sorted(first)} and {sorted(other)}")
    return mean([first[seed] - other[seed] for seed in shared])


@dataclass(frozen=True)
class PromptCounts:
    """For each prompt, in a fixed order: verifications, and drafts accepted in them. Runs over the same prompts add."""

    verifications: tuple[float, ...]
    accepted: tuple[float, ...]

    def __add__(self, other: PromptCounts) -> PromptCounts:
        pairs = zip(self.verifications, other.verifications, strict=True)
        accepted = zip(self.accepted, other.accepted, strict=True)
        return PromptCounts(tuple(a + b for a, b in pairs), tuple(a + b for a, b in accepted))

    @property
    def length(self) -> float:
        """E[L]: accepted drafts for each verification."""
        return sum(self.accepted) / sum(self.verifications)

    def influence(self) -> list[float]:
        """What each prompt adds to the error of `length`, to first order; they sum to zero."""
        total, length = sum(self.verifications), self.length
        pairs = zip(self.accepted, self.verifications, strict=True)
        return [(accepted - length * verified) / total for accepted, verified in pairs]


def _clustered(influence: Sequence[float]) -> float:
    count = len(influence)
    return math.sqrt(count / (count - 1) * sum(value * value for value in influence)) if count > 1 else math.nan


def rate(counts: PromptCounts, gamma: int) -> Estimate:
    """Acceptance rate of a run; prompts are the units."""
    stderr = _clustered(counts.influence()) / gamma
    return Estimate(counts.length / gamma, stderr, _NORMAL * stderr)


def paired_rate(first: PromptCounts, other: PromptCounts, gamma: int) -> Estimate:
    """Difference of two acceptance rates over the same prompts, prompt by prompt.

    Raises:
        ValueError: different numbers of prompts.
    """
    if len(first.accepted) != len(other.accepted):
        raise ValueError(f"{len(first.accepted)} and {len(other.accepted)} prompts cannot be paired")
    pairs = zip(first.influence(), other.influence(), strict=True)
    stderr = _clustered([a - b for a, b in pairs]) / gamma
    return Estimate((first.length - other.length) / gamma, stderr, _NORMAL * stderr)


@dataclass(frozen=True)
class Line:
    """Least squares through (entropy, acceptance); the slope's error takes whole sequences as the units."""

    slope: Estimate
    intercept: float
    r: float
    num: int


def line(entropy: Sequence[float], acceptance: Sequence[float], cluster: Sequence[int]) -> Line | None:
    """The line through points of several sequences; None where all entropies are equal."""
    import torch

    x = torch.as_tensor(entropy, dtype=torch.float64)
    y = torch.as_tensor(acceptance, dtype=torch.float64)
    groups = torch.as_tensor(cluster, dtype=torch.int64)
    if len(x) < 3:
        return None
    x0, y0 = x - x.mean(), y - y.mean()
    spread = float(x0 @ x0)
    if spread <= 1e-12 * float(x @ x):
        return None
    slope = float(x0 @ y0) / spread
    scores = torch.zeros(int(groups.max()) + 1, dtype=torch.float64).index_add_(0, groups, x0 * (y0 - slope * x0))
    stderr = _clustered((scores[groups.unique()] / spread).tolist())
    r = float(x0 @ y0) / math.sqrt(max(spread * float(y0 @ y0), 1e-300))
    return Line(Estimate(slope, stderr, _NORMAL * stderr), float(y.mean() - slope * x.mean()), r, len(x))
