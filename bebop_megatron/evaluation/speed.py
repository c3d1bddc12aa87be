"""When speculation pays: speed by number of drafts, the accept length that would break even, and a plain verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import torch

from bebop_megatron.evaluation.estimate import Estimate
from bebop_megatron.evaluation.sweep import Outcome


@dataclass(frozen=True)
class Speed:
    """A checkpoint under one rule with gamma drafts, against the same engine, cache and batch without drafts.

    `ratios` holds tokens per second over those without drafts, round by round; `break_even_length` is the accept
    length at which both would be equally fast: time of a verification over time of a token without drafts.
    """

    label: str
    rule: str
    gamma: int
    batch_size: int
    accept_length: Estimate
    tokens_per_second: float
    baseline_tokens_per_second: float
    ratios: list[float]

    @property
    def speedup(self) -> float:
        """Median over the rounds."""
        return median(self.ratios)

    @property
    def break_even_length(self) -> float:
        """Accept length that would make up for the drafts."""
        return self.accept_length.value / self.speedup

    @property
    def told_apart(self) -> bool:
        """Every round says the same."""
        return len(self.ratios) > 1 and (min(self.ratios) > 1 or max(self.ratios) < 1)

    def to_json(self) -> dict[str, Any]:
        """With what follows from the measurements."""
        return asdict(self) | {
            "accept_length": self.accept_length.to_json(),
            "speedup": self.speedup,
            "break_even_length": self.break_even_length,
        }


def speeds(outcomes: Sequence[Outcome]) -> list[Speed]:
    """Put the rounds of the `gamma` cells together; each is compared with the run without drafts of its own round."""
    timed = [outcome for outcome in outcomes if outcome.cell["kind"] == "gamma"]
    alone = {(o.cell["label"], o.config["seed"]): o.tokens_per_second for o in timed if o.gamma == 0}
    groups: dict[tuple[str, str, int], list[Outcome]] = {}
    for outcome in timed:
        if outcome.gamma:
            groups.setdefault((outcome.cell["label"], outcome.config["rule"], outcome.gamma), []).append(outcome)
    found = []
    for (label, rule, gamma), rounds in groups.items():
        baselines = [alone[label, outcome.config["seed"]] for outcome in rounds]
        found.append(
            Speed(
                label=label,
                rule=rule,
                gamma=gamma,
                batch_size=rounds[0].config["batch_size"],
                accept_length=merged(rounds).accept_length,
                tokens_per_second=median(outcome.tokens_per_second for outcome in rounds),
                baseline_tokens_per_second=median(baselines),
                ratios=[o.tokens_per_second / b for o, b in zip(rounds, baselines, strict=True)],
            )
        )
    return found


def merged(rounds: Sequence[Outcome]) -> Outcome:
    """Rounds of one setting as one run."""
    first = rounds[0]
    return Outcome(
        cell=first.cell,
        counts=torch.cat([outcome.counts for outcome in rounds]),
        num_tokens=sum(outcome.num_tokens for outcome in rounds),
        num_sequences=sum(outcome.num_sequences for outcome in rounds),
        seconds=sum(outcome.seconds for outcome in rounds),
        environment=first.environment,
    )


def break_even_gamma(of_head: Sequence[Speed]) -> int:
    """The largest measured number of drafts with which decoding is not slower than without; 0 if there is none."""
    return max((speed.gamma for speed in of_head if speed.speedup >= 1), default=0)


def verdicts(found: Sequence[Speed]) -> list[str]:
    """One sentence or two for each head and rule: whether drafts pay, and with how many."""
    out = []
    for label, rule in dict.fromkeys((speed.label, speed.rule) for speed in found):
        mine = [speed for speed in found if (speed.label, speed.rule) == (label, rule)]
        best = max(mine, key=lambda speed: speed.speedup)
        where = f"{label}, {rule}, batch size {best.batch_size}"
        numbers = (
            f"gamma {best.gamma}, gives {best.tokens_per_second:.0f} tokens/s against "
            f"{best.baseline_tokens_per_second:.0f} without drafts ({best.speedup:.2f}x, {len(best.ratios)} rounds "
            f"from {min(best.ratios):.2f} to {max(best.ratios):.2f}), with an accept length of "
            f"{best.accept_length.value:.2f} where {best.break_even_length:.2f} breaks even"
        )
        if not best.told_apart:
            out.append(
                f"{where}: these runs do not tell whether speculation pays. The best, {numbers}: more rounds or more "
                "tokens are needed."
            )
            continue
        if best.speedup < 1:
            out.append(
                f"{where}: speculation does not pay. At this batch size decoding without drafts is faster than with "
                f"any number of drafts that was measured; the least bad, {numbers}."
            )
            continue
        limit, largest = break_even_gamma(mine), max(speed.gamma for speed in mine)
        beyond = f"is above {largest}, the largest measured" if limit == largest else f"is {limit}"
        out.append(f"{where}: speculation pays. The fastest, {numbers}. The break-even gamma {beyond}.")
    return out
