"""Shows the tables, and copies a finished study to where the repository keeps it: data, figures, document."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.loss.run import machine_name
from benchmarks.study.figures import draw
from benchmarks.study.jobs import Study
from benchmarks.study.results import Row, lines_of, load_results, rows_of
from benchmarks.study.tables import Table, readings, tables


def _block_of(marker: str) -> re.Pattern[str]:
    return re.compile(rf"<!-- {marker}:begin (\S*) ?-->\n(.*?)\n<!-- {marker}:end -->", re.DOTALL)


def _markdown(table: Table, level: int) -> list[str]:
    lines = [f"{'#' * level} {table.title[0].upper()}{table.title[1:]}", "", table.note, ""]
    lines += [f"| {' | '.join(row)} |" for row in (table.header, ["---"] * len(table.header), *table.rows)]
    return [*lines, ""]


def markdown_of(
    found: Sequence[Table], said: Sequence[str], level: int = 2, title: str = "Paired differences, with 95% intervals"
) -> str:
    """Every table, then the sentences."""
    lines = [line for table in found for line in _markdown(table, level)]
    if said:
        lines += [f"{'#' * level} {title}", "", *(f"- {sentence}" for sentence in said)]
    return "\n".join(lines).strip()


def markdown(rows: Sequence[Row], level: int = 2) -> str:
    """Every table of the study, then its sentences."""
    return markdown_of(tables(rows), readings(rows), level)


def show(rows: Sequence[Row]) -> None:
    """Tables and sentences of the study on the terminal."""
    show_tables(tables(rows), readings(rows))


def show_tables(found: Sequence[Table], said: Sequence[str]) -> None:
    """Tables and sentences on the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table as View

    console = Console()
    for table in found:
        view = View(
            title=table.title,
            caption=table.note,
            box=SIMPLE_HEAD,
            padding=(0, 1, 0, 0),
            pad_edge=False,
            title_justify="left",
            caption_justify="left",
        )
        for name in table.header:
            view.add_column(name, justify="right" if name not in ("loss", "rule", "arm") else "left", no_wrap=True)
        for row in table.rows:
            view.add_row(*row)
        unbounded = console.options.update(width=10_000)
        console.width = max(console.width, console.measure(view, options=unbounded).maximum)
        console.print(view)
    for sentence in said:
        console.print(f"- {sentence}", highlight=False, soft_wrap=True)


def block(data: dict[str, Any], name: str) -> str:
    """What stands between the markers of docs/study.md for a data file of this name."""
    where, size = data["environment"], data["size"]
    hours = data["cpu_seconds"] / 3600
    lines = [
        f"Measured on {where['date']}: {where['cpu']}, {where['cores']} cores, {where['jobs']} processes of one "
        f"thread, torch {where['torch']}, megatron-core {where['megatron-core']}; {hours:.1f} core hours.",
        f"Backbone: {size['layers']} layers, hidden size {size['hidden']}, vocabulary {size['vocab_size']:,}, "
        f"{size['backbone_steps']} steps of {size['batch']} x {size['sequence']} tokens; warm head "
        f"{size['warm_steps']} steps; then {size['head_steps']} steps for each head, backbone frozen. Every cell "
        f"decodes {size['prompts']} held-out prompts, up to {size['new_tokens']} tokens each.",
        f"Data: [benchmarks/data/{name}.json](../benchmarks/data/{name}.json).",
        "",
        *(f"![{each}](../benchmarks/figures/{name}-{each}.png)" for each in data["figures"]),
        "",
    ]
    return "\n".join(lines) + "\n" + markdown(data["results"], level=3)


def update_document(
    document: Path, file: Path, written: Callable[[dict[str, Any], str], str] = block, marker: str = "study"
) -> None:
    """Replace the measured block between the comments of `marker` by what `written` makes of a data file and its name.

    Raises:
        ValueError: the document has no such block.
    """
    from bebop_megatron.outputs import write_text

    data = json.loads(file.read_text())
    new = f"<!-- {marker}:begin {file.stem} -->\n{written(data, file.stem)}\n<!-- {marker}:end -->"
    text, count = _block_of(marker).subn(lambda _: new, document.read_text())
    if count != 1:
        raise ValueError(f"{document} must have one block between '{marker}:begin' and '{marker}:end'")
    write_text(document, text)


def measured_block(text: str, marker: str = "study") -> tuple[str, str]:
    """Name of the data file (empty: not measured) and what stands in the block.

    Raises:
        ValueError: there is no block.
    """
    match = _block_of(marker).search(text)
    if match is None:
        raise ValueError(f"no block between '{marker}:begin' and '{marker}:end'")
    return match[1], match[2]


def write_data(file: Path, head: dict[str, Any], rows: Sequence[Row]) -> None:
    """A published data file: what `head` says of the study, then its rows, one on each line."""
    from bebop_megatron.outputs import write_text

    write_text(file, json.dumps(head)[:-1] + ', "results": ' + lines_of(rows) + "}\n")
    assert load_results(file) == json.loads(lines_of(rows))


def _cpu_seconds(study: Study) -> float:
    files = [*study.output.glob("cells/**/*.json"), *study.output.glob("trained/*/*/done.json")]
    files += study.output.glob("data/**/done.json")
    return round(sum(json.loads(file.read_text())["cpu_seconds"] for file in files), 1)


def publish(study: Study, root: Path) -> list[Path]:
    """Copy results and figures into `benchmarks/`, tables into docs/study.md; returns the files."""
    where = json.loads((study.output / "environment.json").read_text())
    name = f"study-{machine_name(where)}-{where['date']}"
    rows = rows_of(study)
    figures = draw(rows, root / "benchmarks/figures", prefix=f"{name}-")
    names = [file.stem.removeprefix(f"{name}-") for file in figures if file.suffix == ".png"]
    head = {"environment": where, "size": asdict(study.size), "cpu_seconds": _cpu_seconds(study), "figures": names}
    file = root / "benchmarks/data" / f"{name}.json"
    write_data(file, head, rows)
    update_document(root / "docs/study.md", file)
    return [file, *figures, root / "docs/study.md"]
