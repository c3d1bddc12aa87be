"""Evaluation results as a table, a JSON file, a figure and a short text that claims what the numbers carry.

    python -m bebop_megatron.evaluation merge --input ce.json tv.json --output report

puts several evaluations together: summary.json, acceptance.png and report.md.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from bebop_megatron.evaluation.figure import plot_acceptance
from bebop_megatron.evaluation.results import (
    EvaluationRow,
    by_setting,
    describe,
    load_rows,
    shared_setting,
    summary_payload,
    varying,
)
from bebop_megatron.outputs import check_writable, write_json, write_text


def percent(rate: float, stderr: float | None = None) -> str:
    """A rate in percent, with its standard error where there is one."""
    return f"{100 * rate:.1f}" + ("" if stderr is None else f" ± {100 * stderr:.1f}")


def grid(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    """Lines of a markdown table."""
    return [f"| {' | '.join(line)} |" for line in (header, ["---"] * len(header), *cells)] + [""]


def table(rows: Sequence[EvaluationRow]) -> tuple[list[str], list[list[str]]]:
    """Header and cells; of the setting only what differs between rows."""
    differing = varying(rows)
    header = ["loss", "rule", *(name.replace("_", "-") for name in differing)]
    header += ["accept rate %", "accept length", "per step %", "tokens/s", "speed-up"]
    cells = [
        [
            row.loss,
            row.rule,
            *(f"{value:g}" if isinstance(value, float) else str(value) for value in map(row.setting.get, differing)),
            percent(row.accept_rate, row.accept_rate_stderr),
            f"{row.accept_length:.2f}",
            " ".join(percent(rate) for rate in row.accept_rate_per_step),
            f"{row.tokens_per_second:.1f}",
            "-" if row.speedup is None else f"{row.speedup:.2f}x",
        ]
        for row in rows
    ]
    return header, cells


def print_table(rows: Sequence[EvaluationRow]) -> None:
    """Show the table on the terminal."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not rows:
        console.print("no results")
        return
    header, cells = table(rows)
    view = Table(
        title="Acceptance of drafts",
        caption=shared_setting(rows),
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
    )
    for name in header:
        justify = "left" if name in ("loss", "rule", "attention", "data") else "right"
        view.add_column(name.replace("accept ", "accept\n"), justify=justify, no_wrap=True)
    for row in cells:
        view.add_row(*row)
    # a terminal too narrow breaks lines; rich alone would cut off the last columns
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, console.measure(view, options=unbounded).maximum)
    console.print(view)


def difference(better: EvaluationRow, other: EvaluationRow) -> tuple[float, float | None]:
    """Difference of two acceptance rates and its standard error, the runs taken as independent."""
    errors = better.accept_rate_stderr, other.accept_rate_stderr
    stderr = None if errors[0] is None or errors[1] is None else math.hypot(errors[0], errors[1])
    return better.accept_rate - other.accept_rate, stderr


def _verdict(gap: float, stderr: float | None) -> str:
    if stderr is None:
        return "without a standard error this cannot be judged"
    if abs(gap) > 2 * stderr:
        return "more than two standard errors"
    return "within two standard errors, so this data does not tell them apart"


def readings(rows: Sequence[EvaluationRow]) -> list[str]:
    """Sentences on which loss is accepted most under each rule and setting, and on tv against ce.

    Raises:
        ValueError: a loss measured twice under one rule and setting.
    """
    out = []
    for group in by_setting(rows):
        where = f" at {describe(group[0].setting)}" if varying(rows) else ""
        for rule in dict.fromkeys(row.rule for row in group):
            of_rule = [row for row in group if row.rule == rule]
            if len(of_rule) < 2:
                out.append(f"{rule}{where}: only {of_rule[0].loss} was measured; nothing to compare.")
                continue
            first, second, *_ = sorted(of_rule, key=lambda row: -row.accept_rate)
            gap, stderr = difference(first, second)
            rate = percent(first.accept_rate, first.accept_rate_stderr)
            out.append(
                f"{rule}{where}: {first.loss} is accepted most, {rate} %, {percent(gap, stderr)} points "
                f"before {second.loss}: {_verdict(gap, stderr)}."
            )
            pair = {row.loss: row for row in of_rule}
            # said already where these two are the best
            if {"tv", "ce"} <= pair.keys() and {"tv", "ce"} != {first.loss, second.loss}:
                gap, stderr = difference(pair["tv"], pair["ce"])
                out.append(f"{rule}{where}: tv - ce = {percent(gap, stderr)} points: {_verdict(gap, stderr)}.")
    return out


def write_markdown(
    rows: Sequence[EvaluationRow],
    path: str | Path,
    *,
    environment: dict[str, Any] | None = None,
    figure: str | None = None,
    title: str = "Acceptance of drafts",
) -> None:
    """Write table, reading and conditions; `figure` is the image's path as seen from the report.

    Raises:
        ValueError: no rows.
    """
    if not rows:
        raise ValueError("there are no rows to report")
    header, cells = table(rows)
    lines = [f"# {title}", "", f"Measured by decoding: {shared_setting(rows)}.", ""]
    lines += grid(header, cells)
    lines += [f"![acceptance by loss and rule]({figure})", ""] if figure else []
    lines += ["## Reading", "", *(f"- {sentence}" for sentence in readings(rows)), ""]
    lines += [
        "Differences take the runs as independent; with shared prompts their errors are, if anything, too "
        "large. The best of several losses looks better than it is. The errors cover the sampled text, not "
        "another training seed.",
        "",
        "## Terms",
        "",
        "- accept rate: accepted drafts per draft, E[L] / gamma; ± one standard error, sequences as units",
        "- accept length: tokens per verification, 1 + E[L]",
        "- per step: share of verifications that accepted the step and all before it",
        "- speed-up: tokens/s over the same decoder without drafts; it says nothing of other engines",
        "",
    ]
    if environment:
        lines += ["## Environment", "", *(f"- {name}: {value}" for name, value in environment.items()), ""]
    write_text(path, "\n".join(lines))


def _baseline(rows: Sequence[EvaluationRow]) -> float | None:
    """Speed without drafts: no head takes part in it, so files of one setting measured the same thing; their median."""
    measured = {row.baseline_tokens_per_second for row in rows if row.baseline_tokens_per_second is not None}
    return median(measured) if measured and len(by_setting(rows)) == 1 else None


def main(argv: Sequence[str] | None = None) -> None:
    """Merge evaluation files into one report."""
    parser = argparse.ArgumentParser(prog="python -m bebop_megatron.evaluation merge", description=main.__doc__)
    parser.add_argument("--input", nargs="+", required=True, metavar="JSON", help="files written by an evaluation")
    parser.add_argument("--output", required=True, metavar="DIR", help="where the report goes")
    options = parser.parse_args(argv)
    try:
        rows = [row for path in options.input for row in load_rows(path)]
        if not rows:
            raise ValueError("the input files hold no results")
        by_setting(rows)
        check_writable(options.output, "--output", is_folder=True)
    except (OSError, ValueError) as problem:
        parser.error(str(problem))
    output = Path(options.output)
    payload = summary_payload(rows, _baseline(rows))
    write_json(output / "summary.json", payload)
    plot_acceptance(rows, output / "acceptance.png")
    write_markdown(rows, output / "report.md", environment=payload["environment"], figure="acceptance.png")
    print_table(rows)


if __name__ == "__main__":
    main()
