"""Verifications of one continuation, the same for every side of the comparison, and acceptance counted over them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.statistics import PromptCounts


@dataclass(frozen=True)
class Verified:
    """A continuation, and how many drafts each of its verifications accepted, in order.

    Raises:
        ValueError: the numbers do not make a continuation of that length with `gamma` drafts each.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    gamma: int

    def __post_init__(self) -> None:
        if self.accepted and not 0 <= min(self.accepted) <= max(self.accepted) <= self.gamma:
            raise ValueError(f"accepted {min(self.accepted)} to {max(self.accepted)} of {self.gamma} drafts")
        # the first token comes from the prompt; each verification adds what it accepted and one more, and the last
        # may reach behind the end
        produced = 1 + sum(self.accepted) + len(self.accepted)
        if not len(self.tokens) <= produced <= len(self.tokens) + self.gamma:
            raise ValueError(
                f"{len(self.accepted)} verifications that accepted {sum(self.accepted)} drafts make {produced} tokens, "
                f"but there are {len(self.tokens)}: some step went without drafts, or with fewer than {self.gamma}"
            )

    @property
    def starts(self) -> list[int]:
        """New tokens that were confirmed when each verification began."""
        found, start = [], 1
        for accepted in self.accepted:
            found.append(start)
            start += accepted + 1
        return found

    def compared(self) -> list[tuple[int, int]]:
        """(start, accepted) of the verifications that are compared.

        Not those at the end: behind it there is no text of which anything could be expected. Which these are hangs on
        their start alone, not on what they accepted, so that leaving them out favours nobody.
        """
        last = len(self.tokens) - self.gamma + 1
        return [pair for pair in zip(self.starts, self.accepted, strict=True) if pair[0] <= last]


def read_sequences(rows: Sequence[dict[str, Any]], gamma: int) -> list[Verified]:
    """Sequences of a result file, in the order of the prompts.

    Raises:
        ValueError: a verification with fewer drafts than `gamma`, or numbers that do not add up.
    """
    found = []
    for index, row in enumerate(rows):
        short = [count for count in row.get("drafted", ()) if count != gamma]
        if short:
            raise ValueError(f"prompt {index}: {len(short)} verifications had {short[0]} drafts, not {gamma}")
        try:
            found.append(Verified(tuple(row["tokens"]), tuple(row["accepted"]), gamma))
        except ValueError as error:
            raise ValueError(f"prompt {index}: {error}") from None
    return found


def prefix_counts(sequences: Sequence[Verified], position: int) -> PromptCounts:
    """Verifications that accepted at least `position` drafts, prompt by prompt."""
    compared = [sequence.compared() for sequence in sequences]
    accepted = (sum(taken >= position for _, taken in each) for each in compared)
    return PromptCounts(tuple(float(len(each)) for each in compared), tuple(map(float, accepted)))


def check_counters(sequences: Sequence[Verified], counters: dict[str, Any]) -> None:
    """See that the engine's own metrics are the sums of what it says of single requests.

    Raises:
        ValueError: they are not.
    """
    gamma = sequences[0].gamma
    steps = [accepted for sequence in sequences for accepted in sequence.accepted]
    expected = {
        "num_drafts": len(steps),
        "num_draft_tokens": gamma * len(steps),
        "num_accepted_tokens": sum(steps),
        "num_accepted_tokens_per_pos": [sum(step >= i for step in steps) for i in range(1, gamma + 1)],
    }
    wrong = [name for name, value in expected.items() if counters.get(name) != value]
    if wrong:
        pairs = "; ".join(f"{name}: {counters.get(name)} in the metrics, {expected[name]} by request" for name in wrong)
        raise ValueError(f"the engine's metrics and its requests disagree: {pairs}")
