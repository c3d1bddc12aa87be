"""Acceptance as sums and counts, so that every logged number is a ratio of sums over steps and ranks.

A mean of per-batch means drifts with packing and with how much of a batch is masked. The meter therefore
holds sums only, in one flat tensor: one all-reduce adds up ranks, and the division comes last. A quantity
that nothing was counted for is left out rather than logged as 0 or NaN.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

# acceptance of one depth under each rule, and the row statistic that says it
RULES = {
    "greedy-label": "greedy_label",
    "greedy-target": "greedy_target",
    "target-only": "p_argmax_q",
    "rejection": "alpha",
}
QUANTITIES = {"target entropy": "target_entropy", "draft entropy": "draft_entropy", "kl": "kl"}


class RowStatistics(Protocol):
    """What one batch says of each (depth, anchor): [k, n], float32 or bool; None where it is not known.

    `alpha` = sum min(p, q), `p_argmax_q` = p(argmax q), `greedy_target`: argmax q = argmax p, `greedy_label`:
    argmax q = label; entropies and KL(p|q) in nats.
    """

    @property
    def alpha(self) -> Tensor | None: ...
    @property
    def p_argmax_q(self) -> Tensor | None: ...
    @property
    def greedy_target(self) -> Tensor | None: ...
    @property
    def greedy_label(self) -> Tensor | None: ...
    @property
    def target_entropy(self) -> Tensor | None: ...
    @property
    def draft_entropy(self) -> Tensor | None: ...
    @property
    def kl(self) -> Tensor | None: ...


class AcceptanceMeter:
    """Acceptance of the MTP head on training batches, under four rules.

    The prefix product up to depth i runs over anchors that are valid at depths 1..i; the acceptance of depth
    i alone, the entropies and KL run over all anchors valid at depth i. These numbers are teacher-forced:
    they estimate what a decoder accepts, and beyond the first step they are not equal to it.
    """

    def __init__(self, num_depths: int) -> None:
        self.num_depths = num_depths
        self._sums: Tensor | None = None

    def reset(self) -> None:
        """Start a new interval."""
        self._sums = None

    def update(self, stats: RowStatistics, valid: Tensor) -> None:
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
            prefix = None if accepted is None else accepted.double().cumprod(0)
            pairs += [_sum_and_count(accepted, valid), _sum_and_count(prefix, chain)]
        pairs += [_sum_and_count(getattr(stats, name), valid) for name in QUANTITIES.values()]
        new = torch.stack(pairs).flatten()
        self._sums = new if self._sums is None else self._sums + new

    def state(self) -> Tensor:
        """Everything counted so far, to add up over ranks: [(2 * rules + quantities) * k * 2] float64."""
        if self._sums is not None:
            return self._sums
        return torch.zeros((2 * len(RULES) + len(QUANTITIES)) * self.num_depths * 2, dtype=torch.float64)

    def compute(self, state: Tensor | None = None, per_depth: bool = False) -> dict[str, float]:
        """Ratios of a state, by default this meter's own; what nothing was counted for is left out.

        `mtp accept-length/<rule>`  1 + sum of the mean prefix products over all depths
        `mtp alpha/<depth>`         sum min(p, q): acceptance of one depth under the rejection rule
        `mtp target entropy`, `mtp draft entropy`, `mtp kl`    mean over anchors and depths, in nats

        With `per_depth`, `mtp accept/<rule>/<depth>` and `mtp accept-prefix/<rule>/<depth>` as well.
        """
        table = (self.state() if state is None else state).reshape(-1, self.num_depths, 2).tolist()
        out: dict[str, float] = {}
        for index, rule in enumerate(RULES):
            single, prefix = _ratios(table[2 * index]), _ratios(table[2 * index + 1])
            if len(prefix) == self.num_depths:
                out[f"mtp accept-length/{rule}"] = 1 + sum(prefix.values())
            if rule == "rejection":
                out |= {f"mtp alpha/{depth}": value for depth, value in single.items()}
            if per_depth:
                out |= {f"mtp accept/{rule}/{depth}": value for depth, value in single.items()}
                out |= {f"mtp accept-prefix/{rule}/{depth}": value for depth, value in prefix.items()}
        for index, name in enumerate(QUANTITIES, start=2 * len(RULES)):
            total, count = (sum(column) for column in zip(*table[index], strict=True))
            if count > 0:
                out[f"mtp {name}"] = total / count
        return out


def _sum_and_count(values: Tensor | None, counted: Tensor) -> Tensor:
    """[k, n] -> [k, 2] float64; zeros for a statistic that is not known."""
    if values is None:
        return torch.zeros(counted.shape[0], 2, dtype=torch.float64, device=counted.device)
    return torch.stack([values.double().where(counted, 0.0).sum(1), counted.sum(1).double()], dim=1)


def _ratios(pairs: list[list[float]]) -> dict[int, float]:
    return {depth: total / count for depth, (total, count) in enumerate(pairs, start=1) if count > 0}
