"""What was measured, as a list of objects, and the questions that are put to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.rl_study.jobs import STEPS, RLStudy, read_lines
from benchmarks.rl_study.plan import ARMS, BASELINE
from benchmarks.study.results import Row, select, values, write_rows
from benchmarks.study.statistics import Estimate, Line, line, mean

FIELDS = """reward entropy accept_length accept_rate rollout_seconds learner_seconds step_seconds tokens_per_second
staleness entropy_part mismatch_part""".split()
# the pipeline fills, and what is compiled or cached on first use is
WARM_UP = 2
# consecutive steps share a policy, more or less: they count as one unit
_BLOCK = 5


def rows_of(study: RLStudy) -> list[Row]:
    """One object for every arm, seed and step that has been measured."""
    rows = []
    for cell in study.cells:
        for found in read_lines(study.cell(cell) / STEPS):
            row: Row = {"arm": cell.arm.name, "seed": cell.seed, "step": found["step"]}
            row |= {name: found.get(name) for name in FIELDS}
            rows.append(row | {name: value for name, value in found.items() if name not in row})
    return rows


def write_results(study: RLStudy) -> list[Row]:
    """Write what has been measured; returns the rows."""
    return write_rows(study.output, rows_of(study))


def arms_of(rows: Sequence[Row]) -> list[str]:
    """Arms that were measured, in the order of the plan."""
    found = {row["arm"] for row in rows}
    return [arm.name for arm in ARMS if arm.name in found]


def seeds_of(rows: Sequence[Row], arm: str) -> list[int]:
    """Seeds that an arm was measured with."""
    return sorted(values(rows, field="seed", arm=arm))


def series(rows: Sequence[Row], arm: str, name: str) -> tuple[list[int], list[float]]:
    """Steps, and the mean over seeds of a field; steps without a number are left out."""
    by_step: dict[int, list[float]] = {}
    for row in select(rows, arm=arm):
        if row[name] is not None:
            by_step.setdefault(row["step"], []).append(row[name])
    steps = sorted(by_step)
    return steps, [sum(by_step[step]) / len(by_step[step]) for step in steps]


def smooth(numbers: Sequence[float], width: int = 5) -> list[float]:
    """Means over a window around each number, shorter at the ends."""
    half = width // 2
    windows = [numbers[max(0, at - half) : at + half + 1] for at in range(len(numbers))]
    return [sum(window) / len(window) for window in windows]


def over_seeds(rows: Sequence[Row], arm: str, name: str, part: slice = slice(None)) -> Estimate | None:
    """The mean over steps in `part` of a run, then over seeds with its interval; None without numbers."""
    found = []
    for seed in seeds_of(rows, arm):
        mine = sorted(select(rows, arm=arm, seed=seed), key=lambda row: row["step"])
        numbers = [row[name] for row in mine if row[name] is not None][part]
        if numbers:
            found.append(sum(numbers) / len(numbers))
    return mean(found) if found else None


def slope(rows: Sequence[Row], arm: str) -> Line | None:
    """Accept length over entropy, both of whole steps; blocks of steps are the units of its error."""
    found = [row for row in select(rows, arm=arm) if row["accept_length"] is not None and row["entropy"] is not None]
    return line([row["entropy"] for row in found], [row["accept_length"] for row in found], [*map(_unit, found)])


def _unit(row: Row) -> int:
    """The block of steps that a row belongs to; no run has 1,000 blocks."""
    return row["seed"] * 1_000 + row["step"] // _BLOCK


@dataclass(frozen=True)
class Speed:
    """Medians over the steps of an arm, and ratios to the arm without drafts of the same seed (None: that is missing).

    `end_to_end` compares the time of whole steps, `rollout` that of decoding for each token; `learner_bound` is the
    ratio that a step could reach if decoding cost nothing: the learner would still have to run.
    """

    step_seconds: float
    rollout_seconds: float
    learner_seconds: float
    end_to_end: Estimate | None
    rollout: Estimate | None
    learner_bound: Estimate | None


def _median(rows: Sequence[Row], name: str) -> float:
    mine = [row[name] for row in rows if row["step"] >= min(row["step"] for row in rows) + WARM_UP]
    found = [value for value in mine if value is not None]
    return median(found) if found else math.nan


def _per_token(rows: Sequence[Row]) -> float:
    """Seconds of decoding for a token: completions change in length, but not by what decodes them."""
    found = [row for row in rows if row.get("tokens")]
    if not found:
        return _median(rows, "rollout_seconds")
    return sum(row["rollout_seconds"] for row in found) / sum(row["tokens"] for row in found)


def speed(rows: Sequence[Row], arm: str) -> Speed:
    """How fast an arm is."""
    mine = select(rows, arm=arm)
    ratios: dict[str, list[float]] = {"end_to_end": [], "rollout": [], "learner_bound": []}
    for seed in seeds_of(rows, arm):
        own, base = select(mine, seed=seed), select(rows, arm=BASELINE, seed=seed)
        if not base:
            continue
        whole = _median(base, "step_seconds")
        ratios["end_to_end"].append(whole / _median(own, "step_seconds"))
        ratios["rollout"].append(_per_token(base) / _per_token(own))
        ratios["learner_bound"].append(whole / _median(own, "learner_seconds"))
    known = {name: mean(found) if found else None for name, found in ratios.items()}
    return Speed(
        step_seconds=_median(mine, "step_seconds"),
        rollout_seconds=_median(mine, "rollout_seconds"),
        learner_seconds=_median(mine, "learner_seconds"),
        end_to_end=known["end_to_end"],
        rollout=known["rollout"],
        learner_bound=known["learner_bound"],
    )


def last_third(rows: Sequence[Row]) -> slice:
    """Steps on which an arm is judged when it has learned."""
    steps = len(values(rows, field="step"))
    return slice(-max(1, steps // 3), None)


def reward_difference(rows: Sequence[Row], arm: str) -> Estimate | None:
    """Mean reward over all steps, less that of the arm without drafts, block by block of steps and seed by seed."""

    def blocks(name: str) -> dict[int, float]:
        sums: dict[int, list[float]] = {}
        for row in select(rows, arm=name):
            sums.setdefault(_unit(row), []).append(row["reward"])
        return {unit: sum(found) / len(found) for unit, found in sums.items()}

    own, base = blocks(arm), blocks(BASELINE)
    shared = sorted(own.keys() & base.keys())
    return mean([own[unit] - base[unit] for unit in shared]) if shared else None


def trace_of(events: Sequence[dict[str, Any]], seconds: float) -> tuple[float, list[dict[str, Any]]]:
    """A stretch of so many seconds from the middle of a run: its start, and the events that fall into it."""
    if not events:
        return 0.0, []
    first, last = min(event["begin"] for event in events), max(event["end"] for event in events)
    start = max(first, (first + last - seconds) / 2)
    return start, [event for event in events if event["end"] > start and event["begin"] < start + seconds]


def overlap(events: Sequence[dict[str, Any]], one: str, other: str) -> float | None:
    """Share of the time in which actors whose names begin with `one` work while `other` works, too.

    None where `one` never works.
    """
    ours, theirs = (_union([event for event in events if event["actor"].startswith(name)]) for name in (one, other))
    total = sum(end - begin for begin, end in ours)
    both = sum(max(0.0, min(a[1], b[1]) - max(a[0], b[0])) for a in ours for b in theirs)
    return both / total if total else None


def _union(events: Sequence[dict[str, Any]]) -> list[tuple[float, float]]:
    merged: list[tuple[float, float]] = []
    for begin, end in sorted((event["begin"], event["end"]) for event in events):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
