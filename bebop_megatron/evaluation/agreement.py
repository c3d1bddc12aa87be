"""Does a decoder accept what a full forward pass over the text that it produced says it should?

Two comparisons, one for each statement in `expected.py`. Both hold for every lossless decoder, whatever its head,
gamma, temperature and filters; a decoder that counts, drafts, rolls back or verifies wrongly fails one of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.evaluation.estimate import Estimate, clustered_mean
from bebop_megatron.evaluation.expected import ExpectedAcceptance
from bebop_megatron.evaluation.outcome import DraftRecords


@dataclass(frozen=True)
class StepAgreement:
    """Statement (a) for one draft step: how often it was reached and accepted, and how often it should have been.

    `stderr` is that of `accepted - expected` if the statement holds: each draft is a coin of known probability.
    `calibration` is the same sum in standard errors, each step weighted with how far its probability lies above the
    mean: it notices probabilities that are right on average but belong to other steps.
    """

    step: int
    reached: int
    accepted: float
    expected: float
    stderr: float
    calibration: float

    @property
    def z(self) -> float:
        """Standard errors between accepted and expected."""
        return _standardised(self.accepted - self.expected, self.stderr)

    @property
    def worst(self) -> float:
        """The larger of both, without its sign."""
        return max(abs(self.z), abs(self.calibration))


def _standardised(gap: float, stderr: float) -> float:
    """0 where nothing was left to chance and nothing differs."""
    if stderr == 0:
        return 0.0 if abs(gap) < 1e-3 else math.copysign(math.inf, gap)
    return gap / stderr


def rows_of(expected: ExpectedAcceptance, sequence: Tensor, anchor: Tensor) -> Tensor:
    """Where (text, anchor) pairs are in `expected`, -1 for those that are not.

    Shape: sequence, anchor [m] int64 -> [m] int64.
    """
    if len(expected.anchor) == 0:
        return torch.full_like(sequence, -1)
    # anchors of a text are consecutive and texts are in order, so that keys are sorted
    width = int(torch.cat([expected.anchor, anchor]).max()) + 1
    keys, wanted = expected.sequence * width + expected.anchor, sequence * width + anchor
    place = torch.searchsorted(keys, wanted).clamp(max=len(keys) - 1)
    return place.where(keys[place] == wanted, -1)


def step_agreement(records: DraftRecords, expected: ExpectedAcceptance, rule: str) -> list[StepAgreement]:
    """Statement (a), step by step, over the steps that were reached and whose text was kept.

    `records.sequence` counts the texts that `expected` was computed from. A step behind the end of a text (it was cut
    there) has no row to be judged by and is left out; whether it is kept is decided before the step is, so that nothing
    is selected by outcome.
    """
    rows = rows_of(expected, records.sequence, records.anchor)
    probability = expected.step(rule).double()
    found = []
    for step in range(1, expected.gamma + 1):
        kept = (records.step == step) & (rows >= 0)
        kept &= expected.known[rows.clamp(min=0), step - 1]
        p, accepted = probability[rows[kept], step - 1], records.accepted[kept].double()
        weight, spread = p - p.mean(), (p * (1 - p)).clamp(min=0)
        found.append(
            StepAgreement(
                step=step,
                reached=int(kept.sum()),
                accepted=float(accepted.sum()),
                expected=float(p.sum()),
                stderr=math.sqrt(float(spread.sum())),
                calibration=_standardised(
                    float((weight * (accepted - p)).sum()), math.sqrt(float((weight.square() * spread).sum()))
                ),
            )
        )
    return found


@dataclass(frozen=True)
class LengthAgreement:
    """Statement (b) at the anchors where a decoder started a verification: tokens per verification, 1 + E[L].

    `difference` is decoded - expected, verification by verification, texts as the independent units.
    """

    decoded: Estimate
    expected: Estimate
    difference: Estimate

    @property
    def z(self) -> float:
        """Standard errors between the two."""
        return _standardised(self.difference.value, self.difference.stderr)


def verifications(records: DraftRecords) -> tuple[Tensor, Tensor, Tensor]:
    """(text, anchor, accepted drafts) of every verification: [m] int64 each."""
    first = records.step == 1
    sequence, anchor = records.sequence[first], records.anchor[first]
    # the steps of a verification follow each other
    index = first.long().cumsum(0) - 1
    accepted = torch.zeros(len(sequence), dtype=torch.int64).index_add_(0, index, records.accepted.long())
    return sequence, anchor, accepted


def length_agreement(records: DraftRecords, expected: ExpectedAcceptance, rule: str) -> LengthAgreement:
    """Statement (b), over the steps of every verification whose row lies in the text that was kept.

    A step counts on both sides or on neither, by the tokens before it alone: the identity holds with any weight of that
    kind, so that ends of texts, at a limit or a stop token, bias nothing. They make both lengths smaller.
    """
    sequence, anchor, accepted = verifications(records)
    rows = rows_of(expected, sequence, anchor)
    kept = rows >= 0
    rows, cluster = rows[kept], sequence[kept]
    prefix = expected.prefix(rule)[rows].sum(1)
    passed = accepted[kept, None] > torch.arange(expected.gamma)
    decoded = (passed & expected.known[rows]).sum(1).double()
    return LengthAgreement(
        decoded=clustered_mean(1 + decoded, cluster),
        expected=clustered_mean(1 + prefix, cluster),
        difference=clustered_mean(decoded - prefix, cluster),
    )
