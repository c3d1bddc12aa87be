"""Acceptance against the target's entropy: a line, a binned curve, and what of a change the entropy explains.

A head trained on cross entropy or KL loses acceptance where its target is uncertain, one trained on total variation
hardly does: the slope of this line tells them apart. Everything here is kept as sums in one flat tensor, so that
states of ranks, batches and intervals are added up and the line is fitted last.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

# lower bounds of the bins, in nats; fine where most tokens of a trained model are
EDGES = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
_MOMENTS = 6
# a variance below this part of the mean square is what rounding leaves of none
_NO_SPREAD = 1e-12


@dataclass(frozen=True)
class Fit:
    """Least squares: acceptance = intercept + slope * entropy.

    `r` correlation (NaN where acceptance is the same everywhere), `num` points, `stderr` standard error of the slope
    for independent points (NaN below three); tokens of one document are not independent, so it is a lower bound.
    """

    slope: float
    intercept: float
    r: float
    num: int
    stderr: float


@dataclass(frozen=True)
class Bin:
    """Mean acceptance `mean` of `count` points with low <= entropy < high, in nats."""

    low: float
    high: float
    count: int
    mean: float


@dataclass(frozen=True)
class Split:
    """A change of acceptance: `entropy_part` + `mismatch_part` is all of it."""

    entropy_part: float
    mismatch_part: float


class EntropyCurve:
    """Sums of (entropy, acceptance) points: the line through them, and the mean acceptance in bins of entropy.

    States of curves with the same edges add up: `EntropyCurve.from_state(a.state() + b.state())`.

    Raises:
        ValueError: edges that do not ascend.
    """

    def __init__(self, edges: Sequence[float] = EDGES) -> None:
        if not edges or any(b <= a for a, b in pairwise(edges)):
            raise ValueError(f"the edges of the bins must ascend, got {list(edges)}")
        self.edges = tuple(float(edge) for edge in edges)
        self._sums: Tensor | None = None
        self._bounds: Tensor | None = None

    @classmethod
    def from_state(cls, state: Tensor, edges: Sequence[float] = EDGES) -> EntropyCurve:
        """The curve of a state, or of a sum of states.

        Shape: state as `state` gives it.
        Raises:
            ValueError: a state of other edges.
        """
        curve = cls(edges)
        if state.shape != (curve.size,):
            raise ValueError(f"the state of {len(curve.edges)} bins is [{curve.size}], got {list(state.shape)}")
        curve._sums = state.double()
        return curve

    @property
    def size(self) -> int:
        """Length of the state."""
        return _MOMENTS + 2 * len(self.edges)

    def reset(self) -> None:
        """Forget everything."""
        self._sums = None

    def update(self, entropy: Tensor, acceptance: Tensor, valid: Tensor | None = None) -> None:
        """Add points; nothing waits for the device.

        Shape: entropy (nats), acceptance [n] or any other one shape, valid bool of that shape. What is not valid may
        hold anything, even NaN.
        """
        counted = (torch.ones_like(entropy, dtype=torch.bool) if valid is None else valid).flatten()
        one = counted.double()
        # an entropy of 0 may come out as a tiny negative number
        h = torch.where(counted, entropy.detach().flatten().double(), 0.0).clamp(min=0.0)
        a = torch.where(counted, acceptance.detach().flatten().double(), 0.0)
        moments = torch.stack([one.sum(), h.sum(), a.sum(), h @ h, a @ a, h @ a])
        if self._bounds is None or self._bounds.device != h.device:
            self._bounds = torch.tensor(self.edges[1:], dtype=torch.float64, device=h.device)
        index = torch.bucketize(h, self._bounds, right=True)
        bins = torch.zeros(len(self.edges), 2, dtype=torch.float64, device=h.device)
        bins.index_add_(0, index, torch.stack([one, a], dim=1))
        new = torch.cat([moments, bins.flatten()])
        self._sums = new if self._sums is None else self._sums + new

    def state(self) -> Tensor:
        """Everything counted so far: [6 + 2 * bins] float64, to add up over ranks."""
        return torch.zeros(self.size, dtype=torch.float64) if self._sums is None else self._sums

    def mean(self) -> tuple[float, float] | None:
        """Mean entropy and mean acceptance; None without points."""
        num, h, a, *_ = self.state()[:3].tolist()
        return (h / num, a / num) if num > 0 else None

    def fit(self) -> Fit | None:
        """The line through all points; None where they do not say one: fewer than two, or all of one entropy."""
        return _line(*self.state()[:_MOMENTS].tolist())

    def bins(self) -> list[Bin]:
        """Bins that hold points, in ascending order; the last is open."""
        table = self.state()[_MOMENTS:].reshape(-1, 2).tolist()
        highs = (*self.edges[1:], math.inf)
        return [
            Bin(low, high, round(count), total / count)
            for low, high, (count, total) in zip(self.edges, highs, table, strict=True)
            if count > 0
        ]


def _line(num: float, h: float, a: float, hh: float, aa: float, ha: float) -> Fit | None:
    if num < 2:
        return None
    # sums of squares around the means
    spread_h, spread_a, both = hh - h * h / num, aa - a * a / num, ha - h * a / num
    if spread_h <= _NO_SPREAD * hh:
        return None
    slope = both / spread_h
    flat = spread_a <= _NO_SPREAD * aa
    r = math.nan if flat else max(-1.0, min(1.0, both / math.sqrt(spread_h * spread_a)))
    residual = max(0.0, spread_a - slope * both)
    stderr = math.sqrt(residual / (num - 2) / spread_h) if num > 2 else math.nan
    return Fit(slope, (a - slope * h) / num, r, round(num), stderr)


def fit_line(points: Sequence[tuple[float, float]]) -> Fit | None:
    """The line through (entropy, acceptance) points, one for each interval or checkpoint; see `EntropyCurve.fit`."""
    curve = EntropyCurve()
    if points:
        entropy, acceptance = torch.tensor(points, dtype=torch.float64).unbind(1)
        curve.update(entropy, acceptance)
    return curve.fit()


def split(
    history: Sequence[tuple[float, float]], fitted_on: int, reference: tuple[float, float] | None = None
) -> list[Split]:
    """Split the change of acceptance at each point of a history into b (H_t - H_0) and the remainder.

    `history` holds (mean entropy, acceptance) of successive intervals; the slope b is that of the first `fitted_on`
    of them. (H_0, A_0) is `reference`, by default the first point.

    Raises:
        ValueError: the first `fitted_on` points do not say a line.
    """
    line = fit_line(history[:fitted_on])
    if line is None:
        raise ValueError(
            f"no line through the first {fitted_on} of {len(history)} points: at least two with different entropies "
            "are needed"
        )
    start = history[0] if reference is None else reference
    return [split_change(line.slope, start, now) for now in history]


def split_change(slope: float, before: tuple[float, float], now: tuple[float, float]) -> Split:
    """Split the change between two (mean entropy, acceptance) points, given the slope of acceptance over entropy."""
    entropy_part = slope * (now[0] - before[0])
    return Split(entropy_part, now[1] - before[1] - entropy_part)
