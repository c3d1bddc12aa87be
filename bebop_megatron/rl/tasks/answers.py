"""The number that a completion gives as its answer: what stands behind the last mark, as in GSM8K's own texts."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import ClassVar

from bebop_megatron.rl.codec import TokenizerCodec
from bebop_megatron.rl.task import Problem

MARK = "####"
# a number alone on the rest of its line, with thousands separators and a unit sign before it
_NUMBER = re.compile(r"\s*\$?\s*(-?[\d,]*\.?\d+)\.?\s*$")


def final_number(text: str) -> Decimal | None:
    """The number behind the last mark, None where there is none or something else stands there."""
    _, mark, behind = text.rpartition(MARK)
    found = _NUMBER.match(behind.partition("\n")[0]) if mark else None
    if found is None:
        return None
    try:
        return Decimal(found[1].replace(",", ""))
    except InvalidOperation:
        return None


def equals(text: str, answer: str) -> bool:
    """Whether the text's answer is this number: `1,000.0` equals `1000`."""
    number = final_number(text)
    return number is not None and number == Decimal(answer.replace(",", ""))


class NumberTask:
    """What tasks share whose answer is a number: the reward, and a tokenizer that has to be given."""

    lacks_tokenizer: ClassVar[str]

    def reward(self, problem: Problem, completion: str) -> float:
        """1 if the number behind the mark is the answer, else 0."""
        return float(equals(completion, problem.answer))

    def codec(self, tokenizer: str | None) -> TokenizerCodec:
        """The tokenizer's tokens.

        Raises:
            ValueError: no tokenizer.
        """
        if tokenizer is None:
            raise ValueError(self.lacks_tokenizer)
        return TokenizerCodec(tokenizer)
