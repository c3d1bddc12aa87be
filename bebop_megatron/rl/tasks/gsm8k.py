"""GSM8K's grade-school questions, from a file that the user has; the number behind `####` is judged."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from bebop_megatron.rl.task import Problem
from bebop_megatron.rl.tasks.answers import NumberTask, final_number


@dataclass(frozen=True)
class GSM8K(NumberTask):
    """Questions of `path`: JSON lines with "question" and "answer", the answer ending with `#### number`.

    `template` holds `{question}`; a backslash n in it is a line feed.

    Raises:
        ValueError: no such file, a line without question and answer, or without a number.
    """

    lacks_tokenizer = "the task gsm8k needs a tokenizer"

    path: str = ""
    template: str = "Question: {question}\\nAnswer:"

    def __post_init__(self) -> None:
        if not self.path:
            raise ValueError("the task gsm8k needs its text: gsm8k:path=FILE, JSON lines with question and answer")
        if "{question}" not in self.template:
            raise ValueError(f"the template must hold {{question}}, got {self.template!r}")
        _read(self.path)

    def _prompt(self, question: str) -> str:
        return self.template.replace("\\n", "\n").replace("{question}", question)

    def problems(self, seed: int) -> Iterator[Problem]:
        """Every question once in an order given by the seed, then all of them in another."""
        draw = random.Random(f"problems {seed}")
        records = _read(self.path)
        while True:
            for index in draw.sample(range(len(records)), len(records)):
                question, _, number = records[index]
                yield Problem(self._prompt(question), number)

    def documents(self, seed: int, slips: float = 0.0) -> Iterator[tuple[str, str]]:
        """Prompts and worked answers to train a backbone on, in the file's order, once.

        Raises:
            ValueError: slips, which these texts have none of.
        """
        if slips:
            raise ValueError("slips are for arithmetic: the texts of gsm8k are as they are")
        for question, answer, _ in _read(self.path):
            yield self._prompt(question), f" {answer}"


@lru_cache(maxsize=4)
def _read(path: str) -> list[tuple[str, str, str]]:
    """Question, worked answer and number of every line."""
    if not Path(path).is_file():
        raise ValueError(f"gsm8k:path={path} is no file; give JSON lines with question and answer")
    records = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
        if not isinstance(record, dict) or not {"question", "answer"} <= record.keys():
            raise ValueError(f'{path}, line {number}: expected "question" and "answer"')
        found = final_number(record["answer"])
        if found is None:
            raise ValueError(f'{path}, line {number}: the answer does not end with "#### number"')
        records.append((record["question"], record["answer"], f"{found.normalize():f}"))
    if not records:
        raise ValueError(f"{path} holds no questions")
    return records
