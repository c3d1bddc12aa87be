"""What a full forward pass says of decoded text, as the JSON of a report: acceptance, agreement, entropy, attention."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.entropy import EntropyCurve
from bebop_megatron.evaluation.agreement import length_agreement, rows_of, step_agreement, verifications
from bebop_megatron.evaluation.estimate import Estimate, clustered_mean, ratio
from bebop_megatron.evaluation.expected import ExpectedAcceptance
from bebop_megatron.evaluation.outcome import DraftRecords
from bebop_megatron.evaluation.verify import RULES


def _slope(curve_states: Tensor) -> Estimate:
    """Slope of acceptance over entropy; its error by leaving out one text at a time.

    Shape: states of the texts' curves [texts, size].
    """
    total = curve_states.sum(0)
    fit = EntropyCurve.from_state(total).fit()
    if fit is None:
        return Estimate(float("nan"), float("nan"), 0)
    without = [EntropyCurve.from_state(total - state).fit() for state in curve_states]
    slopes = torch.tensor([each.slope for each in without if each is not None], dtype=torch.float64)
    n = len(slopes)
    stderr = float(((n - 1) / n * (slopes - slopes.mean()).square().sum()).sqrt()) if n > 1 else float("nan")
    return Estimate(fit.slope, stderr, n)


def entropy_summary(full: ExpectedAcceptance, rule: str) -> dict[str, Any]:
    """Acceptance against the target's entropy over every known (anchor, step): sums, line with interval, means."""
    states = []
    for sequence in full.sequence.unique():
        mine = full.sequence == sequence
        curve = EntropyCurve()
        curve.update(full.target_entropy[mine], full.step(rule)[mine], full.known[mine])
        states.append(curve.state())
    stacked = torch.stack(states)
    fit = EntropyCurve.from_state(stacked.sum(0)).fit()
    # the first moments of a state: points, their entropies, their acceptances
    points, entropy, acceptance = stacked[:, 0], stacked[:, 1], stacked[:, 2]
    return {
        "state": stacked.sum(0).tolist(),
        "slope": _slope(stacked).to_json(),
        "r": None if fit is None else fit.r,
        "intercept": None if fit is None else fit.intercept,
        "mean_entropy": ratio(entropy, points).to_json(),
        "mean_acceptance": ratio(acceptance, points).to_json(),
    }


def expected_summary(full: ExpectedAcceptance, records: DraftRecords, rule: str) -> dict[str, Any]:
    """What the full forward pass says beside the decoder: at its own anchors, and at every anchor of the text."""
    rows = rows_of(full, *verifications(records)[:2])
    visited = full.select(rows[rows >= 0])
    length = length_agreement(records, full, rule)
    return {
        "rate_per_step": [estimate.to_json() for estimate in visited.rate_per_step(rule)],
        "accept_length": visited.accept_length(rule).to_json(),
        "accept_rate": visited.accept_rate(rule).to_json(),
        "difference": length.difference.to_json(),
        "steps": [asdict(step) | {"z": step.z, "worst": step.worst} for step in step_agreement(records, full, rule)],
        "every_anchor": {other: full.accept_length(other).to_json() for other in RULES},
        "teacher_forced": {other: full.accept_length(other, teacher_forced=True).to_json() for other in RULES},
        "entropy": {other: entropy_summary(full, other) for other in RULES},
    }


def attention_summary(modes: dict[str, ExpectedAcceptance], rule: str) -> dict[str, Any]:
    """Accept length in every attention mode on one text, and the difference to the first mode, anchor by anchor."""
    first, *_ = modes.values()
    kept = first.complete
    own = first.prefix(rule)[kept].sum(1)
    return {
        mode: {
            "accept_length": full.accept_length(rule).to_json(),
            "difference": clustered_mean(full.prefix(rule)[kept].sum(1) - own, first.sequence[kept]).to_json(),
        }
        for mode, full in modes.items()
    }
