"""What workers and learner exchange and what stays on disk: plain data that a killed process does not take along."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bebop_megatron.outputs import write_text
from bebop_megatron.rl.task import Problem


@dataclass(frozen=True)
class Group:
    """Completions of one problem with their rewards; `log_probs` are those of the distribution sampled from."""

    problem: Problem
    prompt: list[int]
    completions: list[list[int]]
    log_probs: list[list[float]]
    rewards: list[float]


@dataclass(frozen=True)
class Event:
    """Something an actor did, on the machine's clock."""

    actor: str
    event: str
    begin: float
    end: float
    step: int


@dataclass(frozen=True)
class Probe:
    """Expected acceptance on finished completions, as sums over their anchors, for both rules."""

    anchors: int
    accepted: dict[str, float]
    entropy: float


@dataclass(frozen=True)
class Rollout:
    """One call of the decoder: the groups that it gave, and what it cost.

    `reached` and `accepted` [gamma] count drafts, over all verifications. `version` is the number of steps that
    the policy had been trained for.
    """

    number: int
    version: int
    groups: list[Group]
    seconds: float
    reached: list[float]
    accepted: list[float]
    failed_rewards: int = 0
    reward_error: str = ""
    probe: Probe | None = None
    events: list[Event] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """Tokens in all completions."""
        return sum(len(tokens) for group in self.groups for tokens in group.completions)

    def to_json(self) -> str:
        """One line; floats survive exactly."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rollout:
        """The inverse of `to_json`."""
        data = json.loads(text)
        groups = [Group(**{**group, "problem": Problem(**group["problem"])}) for group in data.pop("groups")]
        events = [Event(**event) for event in data.pop("events")]
        probe = data.pop("probe")
        return cls(**data, groups=groups, events=events, probe=None if probe is None else Probe(**probe))


class LineFile:
    """A file of JSON lines that is appended to, and cut back when a run resumes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, *rows: dict[str, Any]) -> None:
        """Write rows, at once."""
        with self.path.open("a") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)

    def read(self) -> list[dict[str, Any]]:
        """All rows; a line that a killed process left unfinished is none."""
        if not self.path.is_file():
            return []
        rows = []
        for line in self.path.read_text().splitlines():
            try:
                rows.append(json.loads(line))
            except json.JSONDecodeError:
                continue
        return rows

    def cut(self, steps: int) -> list[dict[str, Any]]:
        """Forget rows of step `steps` and later; returns the others."""
        kept = [row for row in self.read() if row["step"] < steps]
        write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))
        return kept
