"""Keeps the measured block of docs/loss.md equal to a data file."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from bebop_megatron.outputs import write_text
from benchmarks.loss.results import judged, memory_table, time_table


def _markdown(header: list[str], rows: list[list[str]]) -> list[str]:
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *rows)]


def block(data: dict[str, Any], name: str) -> str:
    """What stands between the markers for a data file of this name."""
    environment = data["environment"]
    hardware = environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"
    case = data["timed"][0]["case"]
    missing = [f"{contender} was not run ({reason})" for contender, reason in data["not_run"].items()]
    lines = [
        f"Measured on {environment['date']}: {hardware}, torch {environment['torch']}, {case['dtype']}, h={case['h']:,}"
        + f"; {'; '.join(missing)}." * bool(missing),
        f"Data: [benchmarks/data/{name}.json](../benchmarks/data/{name}.json).",
        "",
        f"![Time over the bare products and peak memory, by number of depths](../benchmarks/figures/{name}.png)",
        "",
        f"Judged at K={case['k']}, n={case['n']:,}, V={case['v']:,}, tp={case['tp']}; median (p20 to p80):",
        "",
        *_markdown(
            ["", "ratio", "limit", "verdict"],
            [[one.name, one.shown, one.shown_limit, one.verdict] for one in judged(data)],
        ),
        "",
        "Time as a multiple of the bare products', median (p20 to p80):",
        "",
        *_markdown(*time_table(data)),
        "",
        "Peak memory beyond the inputs, MiB:",
        "",
        *_markdown(*memory_table(data)),
    ]
    return "\n".join(lines)


def _pattern(device: str) -> re.Pattern[str]:
    return re.compile(rf"(<!-- bench {device}:begin (\S*) ?-->\n)(.*?)(\n<!-- bench {device}:end -->)", re.DOTALL)


def update_document(document: Path, file: Path) -> None:
    """Replace the block of the data's device.

    Raises:
        ValueError: the document has no such block.
    """
    data = json.loads(file.read_text())
    device, text = data["timed"][0]["case"]["device"], document.read_text()
    begin, end = f"<!-- bench {device}:begin {file.stem} -->\n", f"\n<!-- bench {device}:end -->"
    new, count = _pattern(device).subn(lambda _: begin + block(data, file.stem) + end, text)
    if count != 1:
        raise ValueError(f"{document} must have one block between 'bench {device}:begin' and 'bench {device}:end'")
    write_text(document, new)


def blocks(text: str) -> dict[str, tuple[str, str]]:
    """For each device the name of the data file (empty: not measured) and what stands in the block."""
    found = {device: _pattern(device).search(text) for device in ("cpu", "cuda")}
    return {device: (match[2], match[3]) for device, match in found.items() if match}
