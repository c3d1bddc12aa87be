"""The smallest task there is, for trying the loop: write the letter that was asked for, as often as you can."""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from dataclasses import dataclass

from bebop_megatron.rl.task import Problem


@dataclass(frozen=True)
class Characters:
    """One token for each character of `alphabet`; one more ends a text."""

    alphabet: str

    @property
    def vocab_size(self) -> int:
        """Characters and the end."""
        return len(self.alphabet) + 1

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """The last id."""
        return (len(self.alphabet),)

    def encode(self, text: str) -> list[int]:
        """Ids of the characters; raises ValueError for one outside the alphabet."""
        return [self.alphabet.index(character) for character in text]

    def decode(self, tokens: list[int]) -> str:
        """The characters; ids without one are left out."""
        return "".join(self.alphabet[token] for token in tokens if token < len(self.alphabet))


@dataclass(frozen=True)
class Letters:
    """The reward is the share of the completion that is the letter asked for."""

    num_letters: int = 8

    def problems(self, seed: int) -> Iterator[Problem]:
        """Letters at random."""
        generator = random.Random(seed)
        letters = string.ascii_lowercase[: self.num_letters]
        while True:
            letter = generator.choice(letters)
            yield Problem(f"{letter}:", letter)

    def reward(self, problem: Problem, completion: str) -> float:
        """Share of the letter."""
        return completion.count(problem.answer) / max(1, len(completion))

    def codec(self, tokenizer: str | None) -> Characters:
        """Characters, whatever the tokenizer."""
        return Characters(string.ascii_lowercase[: self.num_letters] + ":")
