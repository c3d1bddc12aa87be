"""`python -m bebop_megatron.evaluation --load A [--load B ...] --prompts FILE --report DIR`: sweeps, figures, one page.

Every finished run is kept in DIR/cells; the same command continues where it was interrupted.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.environment import environment, versions
from bebop_megatron.evaluation.options import check_least, config_of, labels_of, rules_of
from bebop_megatron.evaluation.progress import progress_bar
from bebop_megatron.evaluation.results import EvaluationRow, describe, summary_payload
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.speed import Speed, merged, speeds, verdicts
from bebop_megatron.evaluation.subject import (
    Text,
    check_prompts,
    checkpoint_name,
    opened,
    read_text,
    warm_up,
)
from bebop_megatron.evaluation.sweep import Cell, Outcome, Plan, Store, run_cell
from bebop_megatron.evaluation.verify import RULES
from bebop_megatron.launcher import is_first
from bebop_megatron.outputs import write_json

TEMPERATURES = [0.1, 0.3, 0.5, 0.7, 0.9, 1.1, 1.3]


def add_report(parser: argparse.ArgumentParser) -> None:
    """Which sweeps a report has, and how large they are."""
    add = parser.add_argument_group("report").add_argument
    add("--report", metavar="DIR", help="sweeps, figures and a page; run again, it continues where it stopped")
    add(
        "--sweep-temperatures",
        type=float,
        nargs="*",
        default=TEMPERATURES,
        metavar="T",
        help="none leaves the sweep out (0.1 0.3 ... 1.3)",
    )
    add("--sweep-gammas", type=int, nargs="*", default=[1, 2, 3, 4, 5], metavar="N", help="the same (1 2 3 4 5)")
    add("--sweep-tokens", type=int, default=1500, help="generated for each temperature and rule (1500)")
    add("--speed-tokens", type=int, default=500, help="generated for each gamma, rule and round (500)")


def plan_of(options: argparse.Namespace) -> Plan:
    """The sweeps of a command line.

    Raises:
        ValueError: a setting out of range.
    """
    check_least(options, sweep_tokens=1, speed_tokens=1, sweep_gammas=1, gamma=1, rounds=1, num_tokens=1)
    plan = Plan(
        rules=rules_of(options, default=RULES),
        temperatures=sorted(set(options.sweep_temperatures)),
        gammas=sorted(set(options.sweep_gammas)),
        rounds=options.rounds,
        main_tokens=options.num_tokens or 6000,
        sweep_tokens=options.sweep_tokens,
        speed_tokens=options.speed_tokens,
    )
    # a bad temperature shows now
    plan.cells("", "", "", lambda rule, **changes: config_of(options, rule, **changes))
    return plan


def run(options: argparse.Namespace) -> list[Outcome]:
    """Every cell that has not been run yet; returns all of them.

    Raises:
        ValueError: whatever is wrong with checkpoints, prompts, tokenizer or settings.
    """
    plan, labels = plan_of(options), labels_of(options)
    # the CPU platform answers for a GPU once it is entered
    measured_in = environment()
    text = read_text(options, options.prompts)

    def config(rule: str, **changes: Any) -> DecodeConfig:
        return config_of(options, rule, stop_tokens=text.stop_tokens, **changes)

    store = Store(Path(options.report) / "cells")
    # which are missing is settled before anything is saved, so that all ranks run the same
    names = [checkpoint_name(path) for path in options.load]
    cells = [plan.cells(label, name, text.described, config) for label, name in zip(labels, names, strict=True)]
    found = [[store.load(cell) for cell in of_head] for of_head in cells]
    total = sum(map(len, cells))
    counter = itertools.count(1 + total - sum(outcome is None for of_head in found for outcome in of_head))

    def finished(cell: Cell, outcome: Outcome, number: int) -> None:
        if is_first():
            store.save(cell, outcome)
            if not options.quiet:
                rate = "" if outcome.gamma == 0 else f"{100 * outcome.accept_rate.value:.1f} % accepted, "
                told = f"{number}/{total} {cell.title}: {rate}{outcome.tokens_per_second:.0f} tokens/s"
                print(told, file=sys.stderr, flush=True)

    for path, of_head, outcomes in zip(options.load, cells, found, strict=True):
        missing = [index for index, outcome in enumerate(outcomes) if outcome is None]
        if missing:
            made = _run_head(path, text, [of_head[index] for index in missing], options, measured_in, finished, counter)
            for index, outcome in zip(missing, made, strict=True):
                outcomes[index] = outcome
    return [outcome for outcomes in found for outcome in outcomes if outcome is not None]


def _run_head(
    path: str,
    text: Text,
    cells: Sequence[Cell],
    options: argparse.Namespace,
    measured_in: dict[str, Any],
    finished: Callable[[Cell, Outcome, int], None],
    counter: Iterator[int],
) -> list[Outcome]:
    """The missing cells of one checkpoint, which is in memory no longer than this."""
    made: list[Outcome] = []
    with opened(path, text, options.tokenizer) as subject:
        check_prompts(subject, text, [cell.config for cell in cells])
        warm: set[int] = set()
        for cell, number in zip(cells, counter, strict=False):
            if cell.config.gamma not in warm:
                warm_up(subject, text.prompts, cell.config)
                warm.add(cell.config.gamma)
            with progress_bar(f"{number} {cell.title}", cell.num_tokens, options.quiet) as progress:
                made.append(run_cell(cell, subject, text, measured_in, progress))
            finished(cell, made[-1], number)
    return made


def row_of(outcome: Outcome, speed: Speed | None) -> EvaluationRow:
    """One line of the table; the speed is that of the `gamma` cells, which alternate with runs without drafts."""
    config, length = outcome.config, outcome.accept_length
    low, high = length.interval()
    expected = (outcome.expected or {}).get("accept_length", {})
    verifications = int(outcome.counts[:, 0, 0].sum())
    return EvaluationRow(
        loss=outcome.cell["label"],
        rule=config["rule"],
        gamma=config["gamma"],
        temperature=config["temperature"],
        top_k=config["top_k"],
        top_p=config["top_p"],
        attention=config["attention"],
        filter_draft=config["filter_draft"],
        data=outcome.cell["data"],
        accept_rate=outcome.accept_rate.value,
        accept_rate_stderr=outcome.accept_rate.stderr,
        accept_length=length.value,
        accept_length_low=low,
        accept_length_high=high,
        expected_accept_length=expected.get("value"),
        expected_accept_length_low=expected.get("low"),
        expected_accept_length_high=expected.get("high"),
        accept_rate_per_step=[estimate.value for estimate in outcome.rate_per_step],
        tokens_per_verification=(outcome.num_tokens - outcome.num_sequences) / max(1, verifications),
        num_verifications=verifications,
        tokens_per_second=speed.tokens_per_second if speed else outcome.tokens_per_second,
        baseline_tokens_per_second=speed.baseline_tokens_per_second if speed else None,
        num_tokens=outcome.num_tokens,
        environment=outcome.environment,
        batch_size=config["batch_size"],
        checkpoint=outcome.cell["checkpoint"],
        arm=outcome.cell["kind"],
    )


def rows_of_outcomes(outcomes: Sequence[Outcome], found: Sequence[Speed]) -> list[EvaluationRow]:
    """Every measurement with drafts; the rounds of a gamma are one."""
    speed = {(each.label, each.rule, each.gamma): each for each in found}
    groups: dict[tuple[Any, ...], list[Outcome]] = {}
    for outcome in outcomes:
        config = outcome.config
        if outcome.gamma:
            key = (outcome.cell["kind"], outcome.cell["label"], config["rule"], outcome.gamma, config["temperature"])
            groups.setdefault(key, []).append(outcome)
    rows = []
    for (kind, label, rule, gamma, _), rounds in groups.items():
        whole = rounds[0] if len(rounds) == 1 else merged(rounds)
        timed = None if kind == "temperature" else speed.get((label, rule, gamma))
        rows.append(row_of(whole, timed))
    return rows


def caption_of(outcomes: Sequence[Outcome], *, without: Sequence[str] = ()) -> str:
    """The conditions under a figure."""
    names = ("gamma", "temperature", "top_k", "top_p", "filter_draft", "attention", "batch_size")
    shared = {name: outcomes[0].config[name] for name in names if name not in without}
    shared["data"] = outcomes[0].cell["data"]
    heads = dict.fromkeys(f"{outcome.cell['label']}: {outcome.cell['checkpoint']}" for outcome in outcomes)
    measured_in = versions(outcomes[0].environment)
    return f"{describe(shared)}. {'; '.join(heads)}. {measured_in}. Bars: 95% intervals, texts as units."


def figures(outcomes: Sequence[Outcome], found: Sequence[Speed], folder: Path) -> dict[str, str]:
    """Draw what there is; title -> PNG, each with an SVG beside it."""
    from bebop_megatron.evaluation import sweep_figures as draw

    main = [outcome for outcome in outcomes if outcome.cell["kind"] == "main"]
    warm = main + [outcome for outcome in outcomes if outcome.cell["kind"] == "temperature"]
    out = {
        "Acceptance by step": draw.plot_steps(main, folder / "steps.png", caption_of(main))[0],
        "Acceptance against entropy": draw.plot_entropy(main, folder / "entropy.png", caption_of(main))[0],
    }
    if len(warm) > len(main):
        caption = caption_of(warm, without=["temperature"])
        out["Acceptance by temperature"] = draw.plot_temperatures(warm, folder / "temperature.png", caption)[0]
    if found:
        timed = [outcome for outcome in outcomes if outcome.cell["kind"] == "gamma"]
        caption = caption_of(timed, without=["gamma"])
        out["Accept length and speed by number of drafts"] = draw.plot_gammas(found, folder / "gamma.png", caption)[0]
    return out


def write_report(options: argparse.Namespace, outcomes: Sequence[Outcome]) -> list[EvaluationRow]:
    """results.json, the figures and report.md; returns the rows of the table."""
    from bebop_megatron.evaluation.sweep_page import write_page

    folder = Path(options.report)
    found = speeds(outcomes)
    rows = rows_of_outcomes(outcomes, found)
    said = verdicts(found)
    payload = summary_payload(rows, None) | {
        "speed": [each.to_json() for each in found],
        "verdicts": said,
        "full_forward": [
            {"arm": o.cell["kind"], "label": o.cell["label"], "checkpoint": o.cell["checkpoint"], "config": o.config}
            | o.expected
            for o in outcomes
            if o.expected
        ],
    }
    write_json(folder / "results.json", payload)
    drawn = figures(outcomes, found, folder)
    write_page(folder / "report.md", rows, outcomes, found, drawn, payload["environment"])
    return [row for row in rows if row.arm == "main"]
