"""One measurement of acceptance, the setting it holds under, and the files it is kept in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.environment import environment
from bebop_megatron.outputs import read_json


@dataclass(frozen=True, kw_only=True)
class EvaluationRow:
    """One measurement: a head trained with `loss`, decoded under one rule and one setting.

    `accept_rate` is E[L] / gamma and `accept_length` is 1 + E[L]; `accept_rate_per_step` holds prefix rates
    (step i and all before it accepted), `accept_rate_per_step_conditional` those given that the steps before
    were accepted; `accept_rate_stderr` takes whole sequences as the independent units. Optional numbers that
    are not finite become None. `expected_accept_length` is what a full forward pass over the produced text says of
    the same verifications; `low` and `high` are ends of 95% intervals.

    Raises:
        ValueError: rates that contradict each other.
    """

    loss: str
    rule: str
    gamma: int
    temperature: float
    accept_rate: float
    accept_length: float
    accept_rate_per_step: list[float]
    tokens_per_second: float
    num_tokens: int
    top_k: int = 0
    top_p: float = 1.0
    attention: str = "chain"
    data: str = ""
    accept_rate_per_step_conditional: list[float] | None = None
    accept_rate_stderr: float | None = None
    tokens_per_verification: float | None = None
    num_verifications: int | None = None
    baseline_tokens_per_second: float | None = None
    environment: dict[str, Any] | None = None
    filter_draft: bool = True
    batch_size: int | None = None
    checkpoint: str = ""
    arm: str = "main"
    accept_length_low: float | None = None
    accept_length_high: float | None = None
    expected_accept_length: float | None = None
    expected_accept_length_low: float | None = None
    expected_accept_length_high: float | None = None

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self) if field.default is None):
            value = getattr(self, name)
            if isinstance(value, float) and not math.isfinite(value):
                object.__setattr__(self, name, None)
        named = f"row {self.loss!r} under {self.rule}"
        if self.gamma < 1 or len(self.accept_rate_per_step) != self.gamma:
            raise ValueError(
                f"{named}: gamma is {self.gamma} with {len(self.accept_rate_per_step)} rates per step; a run "
                "without drafts is no row but the baseline_tokens_per_second of the others"
            )
        length = 1 + self.gamma * self.accept_rate
        steps = 1 + sum(self.accept_rate_per_step)
        if not (abs(self.accept_length - length) < 0.01 and abs(self.accept_length - steps) < 0.01):
            raise ValueError(
                f"{named}: accept_length {self.accept_length:.3f} must equal both 1 + gamma * accept_rate = "
                f"{length:.3f} and 1 + the sum of the rates per step = {steps:.3f}, which are prefix rates"
            )

    @property
    def setting(self) -> dict[str, Any]:
        """Everything but the loss and the rule that must agree before two rows may be compared."""
        names = ("gamma", "temperature", "top_k", "top_p", "filter_draft", "attention", "data")
        return {name: getattr(self, name) for name in names}

    @property
    def speedup(self) -> float | None:
        """Tokens per second over those of the same decoder without drafts."""
        baseline = self.baseline_tokens_per_second
        return self.tokens_per_second / baseline if baseline else None


def summary_payload(rows: Sequence[EvaluationRow], baseline_tokens_per_second: float | None) -> dict[str, Any]:
    """What goes into the JSON file; `environment` holds lists where rows were measured in different ones."""
    shared: dict[str, Any] = {}
    seen = [row.environment for row in rows if row.environment is not None] or [environment()]
    for name in dict.fromkeys(name for each in seen for name in each):
        values = []
        for each in seen:
            if name in each and each[name] not in values:
                values.append(each[name])
        shared[name] = values[0] if len(values) == 1 else values
    return {
        "results": [asdict(row) for row in rows],
        "baseline_tokens_per_second": baseline_tokens_per_second,
        "environment": shared,
    }


def load_rows(path: str | Path) -> list[EvaluationRow]:
    """Rows of a file that `write_json` wrote; what a row lacks is taken from the file.

    Raises:
        ValueError: no evaluation file, or a result without a required field.
    """
    payload = read_json(path)
    if not isinstance(payload.get("results"), list):
        raise ValueError(f'{path} is no evaluation: it has no list "results"')
    known = {field.name for field in fields(EvaluationRow)}
    required = {field.name for field in fields(EvaluationRow) if field.default is MISSING}
    rows = []
    for result in payload["results"]:
        missing = sorted(required - result.keys())
        if missing:
            raise ValueError(f"{path}: a result lacks {', '.join(missing)}")
        row = EvaluationRow(**{name: value for name, value in result.items() if name in known})
        for name in ("environment", "baseline_tokens_per_second"):
            if getattr(row, name) is None:
                row = replace(row, **{name: payload.get(name)})
        rows.append(row)
    return rows


def by_setting(rows: Sequence[EvaluationRow]) -> list[list[EvaluationRow]]:
    """Rows that differ in loss and rule only, group by group.

    Raises:
        ValueError: a loss measured twice under one rule and setting.
    """
    groups: dict[tuple[Any, ...], list[EvaluationRow]] = {}
    for row in rows:
        group = groups.setdefault(tuple(row.setting.values()), [])
        if any((row.loss, row.rule) == (other.loss, other.rule) for other in group):
            raise ValueError(
                f"two rows for {row.loss!r} under {row.rule} at {describe(row.setting)}: to compare them, "
                'name them apart in their field "loss", such as "tv (seed 2)"'
            )
        group.append(row)
    return list(groups.values())


def varying(rows: Sequence[EvaluationRow]) -> list[str]:
    """Which parts of the setting differ between rows."""
    return [name for name in rows[0].setting if len({row.setting[name] for row in rows}) > 1] if rows else []


def describe(setting: dict[str, Any]) -> str:
    """A setting in words, without the filters that are off."""
    off = {"top_k": 0, "top_p": 1.0, "data": "", "filter_draft": True}
    return ", ".join(_in_words(name, value) for name, value in setting.items() if name not in off or value != off[name])


def _in_words(name: str, value: Any) -> str:
    if name == "filter_draft":
        return "drafts filtered" if value else "drafts not filtered"
    return f"{name.replace('_', '-')} {value:g}" if isinstance(value, int | float) else f"{name} {value}"


def shared_setting(rows: Sequence[EvaluationRow]) -> str:
    """What of the setting all rows share, in words."""
    return describe({name: value for name, value in rows[0].setting.items() if name not in varying(rows)})
