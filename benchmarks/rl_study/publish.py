"""Copies a finished study to where the repository keeps it: data, figures, the measured block of docs/rl.md."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.loss.run import machine_name
from benchmarks.rl_study.figures import draw
from benchmarks.rl_study.jobs import TRACE, RLStudy, read_lines
from benchmarks.rl_study.plan import BASELINE
from benchmarks.rl_study.results import rows_of, trace_of
from benchmarks.rl_study.tables import readings, tables
from benchmarks.study.publish import markdown_of, update_document, write_data

TRACED = (BASELINE, "rs-tv-frozen")
_KEPT_SECONDS = 60.0


def traces(study: RLStudy) -> dict[str, list[dict[str, Any]]]:
    """Who worked when, with drafts and without; of the first seed. Nothing where there is no such pair."""
    if not set(TRACED) <= set(study.size.arms):
        return {}
    chosen = [cell for cell in study.cells if cell.arm.name in TRACED and cell.seed == study.size.seeds[0]]
    found = {cell.arm.name: read_lines(study.cell(cell) / TRACE) for cell in chosen}
    return {arm: events for arm, events in found.items() if events}


def block(data: dict[str, Any], name: str) -> str:
    """What stands between the markers of docs/rl.md for a data file of this name."""
    where, size = data["environment"], data["size"]
    model = size["model"]
    lines = [
        f"Measured on {where['date']}: {where['cpu']}, {where['cores']} cores, one rollout worker and one learner of "
        f"one thread each, torch {where['torch']}, megatron-core {where['megatron-core']}.",
        f"Backbone: {model['layers']} layers, hidden size {model['hidden']}, vocabulary {model['vocab_size']:,}; "
        f"arithmetic of difficulty {size['difficulty']}, {100 * size['slips']:.0f}% of the steps in its training text "
        f"wrong. Heads: {model['warm_steps']} steps of cross entropy, then {model['head_steps']} steps of `ce` or "
        f"`tv`, backbone frozen. RL: {size['steps']} steps of {size['groups']} x {size['group_size']} completions, "
        f"gamma {size['gamma']}, temperature {size['temperature']:g}, entropy bonus {size['entropy_bonus']:g}, "
        f"learning rate {size['lr']:g}, staleness {size['staleness']}.",
        f"Data: [benchmarks/data/{name}.json](../benchmarks/data/{name}.json).",
        "",
        *(f"![{each}](../benchmarks/figures/{name}-{each}.png)" for each in data["figures"]),
        "",
    ]
    rows, events = data["results"], data["traces"]
    return "\n".join(lines) + "\n" + markdown_of(tables(rows), readings(rows, events), level=3, title="Readings")


def publish(study: RLStudy, root: Path, kind: str = "") -> list[Path]:
    """Copy results and figures into `benchmarks/`, tables into docs/rl.md; returns the files.

    The full study and one of another `kind` have blocks of their own in the document.
    """
    where = json.loads((study.output / "environment.json").read_text())
    name = "-".join(["rl-study", *([kind] if kind else []), machine_name(where), where["date"]])
    rows = rows_of(study)
    # the middle of a run says what the whole does
    events = {arm: trace_of(found, _KEPT_SECONDS)[1] for arm, found in traces(study).items()}
    figures = draw(rows, events, root / "benchmarks/figures", prefix=f"{name}-")
    names = [file.stem.removeprefix(f"{name}-") for file in figures if file.suffix == ".png"]
    head = {"environment": where, "size": asdict(study.size), "figures": names, "traces": events}
    file, document = root / "benchmarks/data" / f"{name}.json", root / "docs/rl.md"
    write_data(file, head, rows)
    update_document(document, file, block, kind or "study")
    return [file, *figures, document]
