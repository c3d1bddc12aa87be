"""Arithmetic with written-out steps, made on the fly: only the last number is judged, the wording is free.

    47+85=?
    ones: 7+5=12, carry 1; tens: 4+8+1=13; so we get
    #### 132

The wording of every step is drawn from several that mean the same. A policy trained on such texts so has entropy that
costs no reward: raising it, with an entropy bonus or a temperature, is the stress that drafting must survive. Documents
may also hold slips (a digit off by one, carried on with), which leave a policy that imitates them room for RL.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

from bebop_megatron.rl.task import Problem
from bebop_megatron.rl.tasks.answers import MARK, NumberTask

_OPENINGS = ("", "ok, ", "let us see: ", "step by step: ", "we start. ", "well, ")
_PLACES = (
    ("ones: ", "units: ", "in the ones ", "right column: "),
    ("tens: ", "next: ", "in the tens ", "middle column: "),
    ("hundreds: ", "then: ", "in the hundreds ", "left column: "),
)
_IS = ("=", " is ", " gives ", " makes ")
_CARRY = (", carry 1", ", keep 1", " and 1 over", ", 1 moves on")
_BORROW = (", borrow 1", ", take 1", " and 1 is owed", ", 1 comes from the left")
_ENDS = ("; ", ". ", ", ", "\n", " | ")
_CLOSINGS = ("so we get", "the answer is", "in all", "done", "that makes", "result")
_MAX_DIFFICULTY = 4


@dataclass(frozen=True)
class Arithmetic(NumberTask):
    """Problems of one difficulty, or of a range of them in equal shares (`1-3`).

    1: sums of two numbers of two digits; 2: of three digits; 3: differences of numbers of three digits;
    4: products of two digits by one, in parts.

    Raises:
        ValueError: a difficulty that does not exist.
    """

    lacks_tokenizer = "the task arithmetic needs a tokenizer: python -m bebop_megatron.rl.corpus makes one"

    difficulty: int | str = "1-3"

    def __post_init__(self) -> None:
        _range(self.difficulty)

    def problems(self, seed: int) -> Iterator[Problem]:
        """Without end; the same for the same seed and difficulty."""
        draw = random.Random(f"problems {seed}")
        while True:
            yield _problem(draw, draw.choice(_range(self.difficulty)))

    def documents(self, seed: int, slips: float = 0.0) -> Iterator[tuple[str, str]]:
        """Prompts and completions to train a backbone on, without end; a share `slips` of the steps is wrong.

        Raises:
            ValueError: `slips` outside 0..1.
        """
        if not 0 <= slips <= 1:
            raise ValueError(f"slips is the share of steps with a wrong digit, between 0 and 1, got {slips}")
        draw = random.Random(f"documents {seed}")
        while True:
            problem = _problem(draw, draw.choice(_range(self.difficulty)))
            yield problem.prompt, solution(problem, draw, slips)


def _range(difficulty: int | str) -> range:
    first, _, last = str(difficulty).partition("-")
    if first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first) <= _MAX_DIFFICULTY:
        return range(int(first), int(last or first) + 1)
    raise ValueError(f"difficulty is a number from 1 to {_MAX_DIFFICULTY}, or a range such as 1-3, got {difficulty!r}")


def _problem(draw: random.Random, difficulty: int) -> Problem:
    if difficulty == 4:
        a, b = draw.randint(12, 99), draw.randint(3, 9)
        return Problem(f"{a}*{b}=?\n", str(a * b))
    low, high = (10, 99) if difficulty == 1 else (100, 999)
    a, b = draw.randint(low, high), draw.randint(low, high)
    if difficulty == 3:
        a, b = max(a, b), min(a, b)
        return Problem(f"{a}-{b}=?\n", str(a - b))
    return Problem(f"{a}+{b}=?\n", str(a + b))


def solution(problem: Problem, draw: random.Random, slips: float = 0.0) -> str:
    """A written-out solution; every step goes wrong with probability `slips`, and the rest follows from what it says.

    Raises:
        ValueError: a prompt of another task.
    """
    question = problem.prompt.strip().removesuffix("=?")
    for sign, write in (("+", _sum), ("-", _difference), ("*", _product)):
        left, found, right = question.partition(sign)
        if found and left.isdigit() and right.isdigit():
            steps, result = write(int(left), int(right), draw, slips)
            text = draw.choice(_OPENINGS) + "".join(step + draw.choice(_ENDS) for step in steps)
            return f"{text}{draw.choice(_CLOSINGS)}\n{MARK} {result}"
    raise ValueError(f"no problem of arithmetic: {problem.prompt!r}")


def _slip(value: int, draw: random.Random, slips: float) -> int:
    return value + draw.choice((-1, 1)) if value > 0 and draw.random() < slips else value


def _digits(a: int, b: int) -> list[tuple[int, int]]:
    """Pairs of digits, ones first."""
    width = len(str(max(a, b)))
    return [(int(x), int(y)) for x, y in zip(f"{a:0{width}}"[::-1], f"{b:0{width}}"[::-1], strict=True)]


def _sum(a: int, b: int, draw: random.Random, slips: float) -> tuple[list[str], int]:
    steps, carry, result = [], 0, 0
    pairs = _digits(a, b)
    for place, (x, y) in enumerate(pairs):
        said = _slip(x + y + carry, draw, slips)
        text = f"{draw.choice(_PLACES[place])}{x}+{y}{'+1' if carry else ''}{draw.choice(_IS)}{said}"
        last = place == len(pairs) - 1
        carry = said // 10
        steps.append(text + (draw.choice(_CARRY) if carry and not last else ""))
        result += (said if last else said % 10) * 10**place
    return steps, result


def _difference(a: int, b: int, draw: random.Random, slips: float) -> tuple[list[str], int]:
    steps, owed, result = [], 0, 0
    pairs = _digits(a, b)
    for place, (x, y) in enumerate(pairs):
        borrow = x - owed < y and place < len(pairs) - 1
        # an earlier slip can leave the last column short
        said = _slip(max(0, x - owed - y + 10 * borrow), draw, slips) % 10
        top = f"{x + 10 * borrow}{'-1' if owed else ''}"
        text = f"{draw.choice(_PLACES[place])}{top}-{y}{draw.choice(_IS)}{said}"
        owed = int(borrow)
        steps.append(text + (draw.choice(_BORROW) if borrow else ""))
        result += said * 10**place
    return steps, result


def _product(a: int, b: int, draw: random.Random, slips: float) -> tuple[list[str], int]:
    tens, ones = a // 10 * 10, a % 10
    first = _slip(ones * b, draw, slips)
    second = _slip(tens // 10 * b, draw, slips) * 10
    result = _slip(first + second, draw, slips)
    steps = [
        f"{draw.choice(_PLACES[0])}{ones}*{b}{draw.choice(_IS)}{first}",
        f"{draw.choice(_PLACES[1])}{tens}*{b}{draw.choice(_IS)}{second}",
        f"{second}+{first}{draw.choice(_IS)}{result}",
    ]
    return steps, result
