"""The measured cells as a list of objects, and the questions that are put to it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.study.jobs import Study
from benchmarks.study.statistics import Estimate, PromptCounts, mean, paired_mean, paired_rate

Row = dict[str, Any]


def rows_of(study: Study) -> list[Row]:
    """One object for every arm and cell that has been measured."""
    rows = []
    for cell in study.cells:
        measured = study.measured(cell)
        if measured is not None:
            rows.append(cell.fields | {"steps": study.size.head_steps} | measured)
    return rows


def lines_of(rows: Sequence[Row]) -> str:
    """A JSON list with one object on each line."""
    from bebop_megatron.outputs import finite

    return "[\n" + ",\n".join(json.dumps(finite(row), allow_nan=False) for row in rows) + "\n]"


def write_rows(output: Path, rows: list[Row]) -> list[Row]:
    """Write `results.json` into a study's folder, all of it or nothing; returns the rows."""
    from bebop_megatron.outputs import write_text

    write_text(output / "results.json", lines_of(rows) + "\n")
    return rows


def write_results(study: Study) -> list[Row]:
    """Write what has been measured; returns the rows."""
    return write_rows(study.output, rows_of(study))


def select(rows: Iterable[Row], **wanted: Any) -> list[Row]:
    """Rows whose fields have these values."""
    return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


def values(rows: Sequence[Row], **wanted: Any) -> list[Any]:
    """Values of a field in the order of their appearance: `values(rows, field="loss", arm="main")`."""
    field = wanted.pop("field")
    return list(dict.fromkeys(row[field] for row in select(rows, **wanted)))


def over_seeds(rows: Sequence[Row], field: str = "accept_rate") -> Estimate | None:
    """Mean over seeds; with one seed, the interval of its prompts. None without rows."""
    if not rows:
        return None
    if len(rows) > 1 or field != "accept_rate":
        return mean([row[field] for row in rows])
    stderr = rows[0]["stderr"]
    return Estimate(rows[0][field], stderr, None if stderr is None else 1.96 * stderr)


def counts_of(row: Row) -> PromptCounts:
    """Verifications and accepted drafts of each prompt."""
    return PromptCounts(tuple(row["verifications"]), tuple(row["accepted"]))


class Difference:
    """Two conditions of equal seeds and prompts, compared in pairs.

    `by_prompt` adds up the seeds and pairs prompts: the error of the text that was sampled. `by_seed` pairs seeds: it
    holds the error of training, too, but has only as many units as there are seeds; None with one seed.
    """

    def __init__(self, first: Sequence[Row], other: Sequence[Row]) -> None:
        by_seed = [{row["seed"]: row for row in rows} for rows in (first, other)]
        self.seeds = sorted(by_seed[0].keys() & by_seed[1].keys())
        if not self.seeds:
            raise ValueError("nothing to pair: no seed was measured under both conditions")
        pooled = []
        for rows in by_seed:
            counts = [counts_of(rows[seed]) for seed in self.seeds]
            pooled.append(sum(counts[1:], counts[0]))
        gamma = first[0]["gamma"]
        self.by_prompt = paired_rate(pooled[0], pooled[1], gamma)
        self.by_seed = None
        if len(self.seeds) > 1:
            rates = [{seed: rows[seed]["accept_rate"] for seed in self.seeds} for rows in by_seed]
            self.by_seed = paired_mean(rates[0], rates[1])


def difference(first: Sequence[Row], other: Sequence[Row]) -> Difference | None:
    """`Difference`, or None where one of the conditions has no rows or no seed in common."""
    if not {row["seed"] for row in first} & {row["seed"] for row in other}:
        return None
    return Difference(first, other)


def load_results(file: Path) -> list[Row]:
    """Rows of a `results.json`, or of a published data file.

    Raises:
        ValueError: neither.
    """
    content = json.loads(file.read_text())
    rows = content.get("results") if isinstance(content, dict) else content
    if not isinstance(rows, list) or not all(isinstance(row, dict) and "arm" in row for row in rows):
        raise ValueError(f"{file} is no result of the study: it has no list of objects with an arm")
    return rows
