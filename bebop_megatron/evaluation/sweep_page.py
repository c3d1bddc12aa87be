"""The page of a report: verdict first, then each figure with its numbers, then what they were measured on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.report import grid, percent, readings
from bebop_megatron.evaluation.results import EvaluationRow, shared_setting
from bebop_megatron.evaluation.speed import Speed, break_even_gamma, verdicts
from bebop_megatron.evaluation.sweep import Outcome
from bebop_megatron.outputs import write_text


def shown(value: float | None, form: str, scale: float = 1.0) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None or value != value else format(scale * value, form)


def span(low: float | None, high: float | None, digits: int = 2) -> str:
    """An interval, or a dash where it could not be told."""
    return "-" if low is None or high is None or low != low else f"{low:.{digits}f} to {high:.{digits}f}"


def _acceptance(rows: Sequence[EvaluationRow], outcomes: Sequence[Outcome]) -> list[str]:
    header = ["head", "rule", "accept rate %", "accept length", "95%", "full forward", "95%", "z (a)", "z (b)"]
    checked = {(o.cell["label"], o.config["rule"]): o.expected for o in outcomes if o.cell["kind"] == "main"}
    cells = []
    for row in rows:
        expected = checked[row.loss, row.rule] or {}
        worst = max((step["worst"] for step in expected["steps"]), default=0.0)
        gap = expected["difference"]
        z = gap["value"] / gap["stderr"] if gap["stderr"] else None
        cells.append(
            [
                row.loss,
                row.rule,
                percent(row.accept_rate, row.accept_rate_stderr),
                f"{row.accept_length:.2f}",
                span(row.accept_length_low, row.accept_length_high),
                shown(row.expected_accept_length, ".2f"),
                span(row.expected_accept_length_low, row.expected_accept_length_high),
                f"{worst:.1f}",
                shown(z, "+.1f"),
            ]
        )
    return [
        *grid(header, cells),
        "`full forward`: accept length expected at the same verifications by one forward pass over the produced text, "
        "without drafts or caches. `z`: standard errors between the two; (a) accepted drafts against their "
        "probabilities, the worst step, in sum or in calibration; (b) accept lengths. Beyond 4, decoder or forward "
        "pass is wrong.",
        "",
    ]


def _attention(outcomes: Sequence[Outcome]) -> list[str]:
    header = ["head", "rule", "decoded with", "accept length", "other mode", "accept length", "difference, 95%"]
    cells = []
    for outcome in outcomes:
        modes = (outcome.expected or {}).get("attention", {})
        own = outcome.config["attention"]
        for mode in modes:
            if mode != own:
                gap = modes[mode]["difference"]
                lengths = [shown(modes[each]["accept_length"]["value"], ".3f") for each in (own, mode)]
                ends = span(gap["low"], gap["high"], digits=3)
                label, rule = outcome.cell["label"], outcome.config["rule"]
                cells.append([label, rule, own, lengths[0], mode, lengths[1], ends])
    if not cells:
        return []
    return [
        "## What draft steps attend to",
        "",
        *grid(header, cells),
        "Both modes by a full forward pass over the same text, started at every anchor: what it costs, or gains, to "
        "serve this head in the other mode.",
        "",
    ]


def _entropy(outcomes: Sequence[Outcome]) -> list[str]:
    header = ["head", "rule", "slope, points per nat", "95%", "r", "mean entropy, nats", "mean acceptance %"]
    cells = []
    for outcome in outcomes:
        if outcome.cell["kind"] != "main" or not outcome.expected:
            continue
        found = outcome.expected["entropy"][outcome.config["rule"]]
        slope = found["slope"]
        ends = [None if slope[end] is None else 100 * slope[end] for end in ("low", "high")]
        cells.append(
            [
                outcome.cell["label"],
                outcome.config["rule"],
                shown(slope["value"], ".1f", 100),
                span(*ends, digits=1),
                shown(found["r"], ".2f"),
                shown(found["mean_entropy"]["value"], ".2f"),
                shown(found["mean_acceptance"]["value"], ".1f", 100),
            ]
        )
    return grid(header, cells)


def _temperatures(rows: Sequence[EvaluationRow]) -> list[str]:
    header = ["head", "rule", "temperature", "accept rate %", "accept length", "full forward", "tokens"]
    cells = [
        [
            row.loss,
            row.rule,
            f"{row.temperature:g}",
            percent(row.accept_rate, row.accept_rate_stderr),
            f"{row.accept_length:.2f}",
            shown(row.expected_accept_length, ".2f"),
            f"{row.num_tokens:,}",
        ]
        for row in sorted(rows, key=lambda row: (row.loss, row.rule, row.temperature))
    ]
    return grid(header, cells)


def _speed(found: Sequence[Speed]) -> list[str]:
    header = ["head", "rule", "gamma", "accept length", "breaks even at", "tokens/s", "without drafts", "speed-up"]
    cells = [
        [
            each.label,
            each.rule,
            str(each.gamma),
            f"{each.accept_length.value:.2f}",
            f"{each.break_even_length:.2f}",
            f"{each.tokens_per_second:.0f}",
            f"{each.baseline_tokens_per_second:.0f}",
            f"{each.speedup:.2f}x ({min(each.ratios):.2f} to {max(each.ratios):.2f})",
        ]
        for each in found
    ]
    limits = []
    for label, rule in dict.fromkeys((each.label, each.rule) for each in found):
        mine = [each for each in found if (each.label, each.rule) == (label, rule)]
        limits.append([label, rule, str(break_even_gamma(mine)), str(max(each.gamma for each in mine))])
    return [
        *grid(header, cells),
        *grid(["head", "rule", "break-even gamma", "largest measured"], limits),
        "Speed-up: median over the rounds, and their range; each round compares with the run without drafts beside it, "
        "same engine, cache and batch. `breaks even at`: accept length that makes both equally fast. Break-even gamma: "
        "the largest number of drafts that is not slower than none (0: every number is slower).",
        "",
    ]


def write_page(
    path: Path,
    rows: Sequence[EvaluationRow],
    outcomes: Sequence[Outcome],
    found: Sequence[Speed],
    figures: dict[str, str],
    environment: dict[str, Any],
) -> None:
    """Write report.md; `figures` maps titles to files beside it."""
    main = [row for row in rows if row.arm == "main"]
    picture = lambda title: [f"![{title}]({figures[title]})", ""] if title in figures else []  # noqa: E731
    heads = dict.fromkeys((row.loss, row.checkpoint) for row in rows)
    lines = ["# Acceptance of drafts", "", f"{shared_setting(main)}, batch size {main[0].batch_size}.", ""]
    lines += [f"- {label}: {checkpoint}" for label, checkpoint in heads]
    lines += ["", "## Does speculation pay?", ""]
    lines += [f"- {sentence}" for sentence in verdicts(found)] or ["- Speed was not measured (no `--sweep-gammas`)."]
    lines += ["", "## Acceptance by step", "", *picture("Acceptance by step"), *_acceptance(main, outcomes)]
    lines += [f"- {sentence}" for sentence in readings(main)]
    warm = [row for row in rows if row.arm in ("main", "temperature")]
    if "Acceptance by temperature" in figures:
        lines += ["", "## Acceptance by temperature", "", *picture("Acceptance by temperature"), *_temperatures(warm)]
    lines += ["", "## Acceptance against entropy", "", *picture("Acceptance against entropy"), *_entropy(outcomes)]
    lines += [
        "Points are draft steps at every anchor of the produced text, from the full forward pass; acceptance is that "
        "of one step, given the steps before it. The interval leaves out one text at a time.",
        "",
    ]
    lines += _attention(outcomes)
    if found:
        title = "Accept length and speed by number of drafts"
        lines += [f"## {title}", "", *picture(title), *_speed(found)]
    lines += [
        "## Terms",
        "",
        "- accept length: tokens per verification, 1 + E[L]; accept rate: E[L] / gamma, ± one standard error",
        "- intervals: 95%, whole texts as independent units; they cover the sampled text, not another training seed",
        "- `chain` and `first-depth`: what draft steps 2, 3, ... attend to when decoding; training may differ",
        "",
        "## Environment",
        "",
        *(f"- {name}: {value}" for name, value in environment.items()),
        "",
    ]
    write_text(path, "\n".join(lines))
