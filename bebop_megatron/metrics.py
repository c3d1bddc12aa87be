"""Acceptance as sums and counts, so that every logged number is a ratio of sums over steps and ranks.

A mean of per-batch means drifts with packing and with how much of a batch is masked. The meter therefore
holds sums only, in one flat tensor: one all-reduce adds up ranks, and the division comes last. A quantity
that nothing was counted for is left out rather than logged as 0 or NaN.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from bebop_megatron.entropy import EntropyCurve
from bebop_megatron.losses.statistics import RowStats

# acceptance of one depth under each rule, and the row statistic that says it
RULES = {
    "greedy-label": "greedy_label",
    "greedy-target": "greedy_target",
    "target-only": "p_argmax_q",
    "rejection": "alpha",
}
QUANTITIES = {"target entropy": "target_entropy", "draft entropy": "draft_entropy", "kl": "kl"}
# rules whose acceptance is laid over the target's entropy: those that sampling engines use
CURVES = ("rejection", "target-only")


class AcceptanceMeter:
    """Acceptance of the MTP head on a training or validation interval, under four rules.

    The prefix product up to depth i runs over anchors that are valid at depths 1..i; the acceptance of depth
    i alone, the entropies, KL and the curves over entropy run over all anchors valid at depth i. These numbers are
    teacher-forced: they estimate what a decoder accepts, and beyond the first step they are not equal to it.
    """

    def __init__(self, num_depths: int) -> None:
        self.num_depths = num_depths
        self._sums: Tensor | None = None
        self._curves = [EntropyCurve() for _ in CURVES]

    def reset(self) -> None:
        """Start a new interval."""
        self._sums = None
        for curve in self._curves:
            curve.reset()

    def update(self, stats: RowStats, valid: Tensor) -> None:
        """Add one batch; nothing waits for the device.

        Shape: statistics [k, n], valid [k, n] bool. What is not valid may hold anything, even NaN.

        Raises:
            ValueError: another number of depths than the meter has.
        """
        if valid.shape[0] != self.num_depths:
            raise ValueError(f"this meter counts {self.num_depths} depths, but valid is {list(valid.shape)}")
        chain = valid.long().cumprod(0).bool()
        pairs = []
        for name in RULES.values():
            accepted = getattr(stats, name)
            pairs += [_sum_and_count(accepted, valid), _sum_and_count(accepted.double().cumprod(0), chain)]
        pairs += [_sum_and_count(getattr(stats, name), valid) for name in QUANTITIES.values()]
        new = torch.stack(pairs).flatten()
        self._sums = new if self._sums is None else self._sums + new
        for rule, curve in zip(CURVES, self._curves, strict=True):
            curve.update(stats.target_entropy, getattr(stats, RULES[rule]), valid)

    def state(self) -> Tensor:
        """Everything counted so far, to add up over ranks: [(2 * rules + quantities) * k * 2 + curves] float64."""
        sums = self._sums
        if sums is None:
            sums = torch.zeros(self._table_size(), dtype=torch.float64)
        return torch.cat([sums, *(curve.state().to(sums.device) for curve in self._curves)])

    def curves(self, state: Tensor | None = None) -> dict[str, EntropyCurve]:
        """Acceptance against target entropy for each rule of `CURVES`, of a state or of this meter's own.

        Shape: state as `state` gives it.
        """
        whole = self.state() if state is None else state
        parts = whole[self._table_size() :].chunk(len(CURVES))
        return {rule: EntropyCurve.from_state(part) for rule, part in zip(CURVES, parts, strict=True)}

    def compute(self, state: Tensor | None = None, per_depth: bool = False) -> dict[str, float]:
        """Ratios of a state, by default this meter's own; what nothing was counted for is left out.

        `mtp accept-length/<rule>`  1 + sum of the mean prefix products over all depths
        `mtp alpha/<depth>`         sum min(p, q): acceptance of one depth under the rejection rule
        `mtp target entropy`, `mtp draft entropy`, `mtp kl`    mean over anchors and depths, in nats
        `mtp entropy slope/<rule>`, `mtp entropy r/<rule>`     of the line of acceptance over the target's entropy
        `mtp_<depth>_acceptance_rate`    greedy draft against label, in percent: Megatron's own metric and name

        With `per_depth`, `mtp accept/<rule>/<depth>`, `mtp accept-prefix/<rule>/<depth>` and the binned curves
        `mtp entropy bin/<rule>/<low>-<high>` as well.

        Shape: state as `state` gives it.
        """
        whole = (self.state() if state is None else state).cpu()
        table = whole[: self._table_size()].reshape(-1, self.num_depths, 2).tolist()
        out: dict[str, float] = {}
        for index, rule in enumerate(RULES):
            single, prefix = _ratios(table[2 * index]), _ratios(table[2 * index + 1])
            if len(prefix) == self.num_depths:
                out[f"mtp accept-length/{rule}"] = 1 + sum(prefix.values())
            if rule == "rejection":
                out |= {f"mtp alpha/{depth}": value for depth, value in single.items()}
            if rule == "greedy-label":
                out |= {f"mtp_{depth}_acceptance_rate": 100 * value for depth, value in single.items()}
            if per_depth:
                out |= {f"mtp accept/{rule}/{depth}": value for depth, value in single.items()}
                out |= {f"mtp accept-prefix/{rule}/{depth}": value for depth, value in prefix.items()}
        for index, name in enumerate(QUANTITIES, start=2 * len(RULES)):
            total, count = (sum(column) for column in zip(*table[index], strict=True))
            if count > 0:
                out[f"mtp {name}"] = total / count
        for rule, curve in self.curves(whole).items():
            out |= _curve_values(rule, curve, per_depth)
        return out

    def _table_size(self) -> int:
        return (2 * len(RULES) + len(QUANTITIES)) * self.num_depths * 2


def _curve_values(rule: str, curve: EntropyCurve, bins: bool) -> dict[str, float]:
    out: dict[str, float] = {}
    fit = curve.fit()
    if fit is not None:
        out[f"mtp entropy slope/{rule}"] = fit.slope
        if not math.isnan(fit.r):
            out[f"mtp entropy r/{rule}"] = fit.r
    if bins:
        out |= {f"mtp entropy bin/{rule}/{entry.low:g}-{entry.high:g}": entry.mean for entry in curve.bins()}
    return out


def _sum_and_count(values: Tensor, counted: Tensor) -> Tensor:
    """[k, n] -> [k, 2] float64."""
    return torch.stack([torch.where(counted, values.double(), 0.0).sum(1), counted.sum(1).double()], dim=1)


def _ratios(pairs: list[list[float]]) -> dict[int, float]:
    return {depth: total / count for depth, (total, count) in enumerate(pairs, start=1) if count > 0}
