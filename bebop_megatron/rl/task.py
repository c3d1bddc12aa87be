"""What a task is to the reinforcement-learning loop: problems without end, and a verifiable reward of a text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Problem:
    """One question: `prompt` is what the policy continues, `answer` what `Task.reward` compares with."""

    prompt: str
    answer: str


class Codec(Protocol):
    """Text to tokens and back; a Hugging Face tokenizer behind `TokenizerCodec`, or a task's own characters."""

    vocab_size: int
    stop_tokens: tuple[int, ...]

    def encode(self, text: str) -> list[int]:
        """Tokens of a text."""
        ...

    def decode(self, tokens: list[int]) -> str:
        """Text of tokens."""
        ...


class Task(Protocol):
    """Problems and their reward.

    Both have to be pure: a resumed run asks for the same problems again, and rewards are computed in another process,
    where a call that takes too long is given up. So a task must be picklable.
    """

    def problems(self, seed: int) -> Iterator[Problem]:
        """Problems in a fixed order given the seed; it need not end, and starts over where it does."""
        ...

    def reward(self, problem: Problem, completion: str) -> float:
        """The value of a completion, usually in 0..1; stop tokens are not part of the text."""
        ...

    def codec(self, tokenizer: str | None) -> Codec:
        """How its text becomes tokens: with the tokenizer at this path, or, without one, the task's own.

        Raises:
            ValueError: a task that has no tokens of its own, without a tokenizer.
        """
        ...
