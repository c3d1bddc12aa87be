"""`python -m bebop_megatron.evaluation entropy ...`: acceptance against the target's entropy, and its change over time.

Three sources: checkpoints (`--load`, with text that each samples itself or text that is given), reports already written
(`--results`), and Megatron's training logs (`--log`). With `--in-time` the checkpoints or reports are successive points
of one run; a log always is. A change of acceptance is then split into b (H_t - H_0), which the target's entropy
explains, and the remainder, a mismatch of head and target.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.entropy_points import Point, from_log, from_results, over_time, point_of
from bebop_megatron.evaluation.environment import environment, versions
from bebop_megatron.evaluation.options import (
    add_amount,
    add_decoding,
    add_source,
    check_least,
    config_of,
    labels_of,
    rules_of,
)
from bebop_megatron.evaluation.progress import progress_bar
from bebop_megatron.evaluation.results import describe
from bebop_megatron.evaluation.subject import Text, opened, read_text
from bebop_megatron.evaluation.verify import RULES
from bebop_megatron.launcher import is_first
from bebop_megatron.outputs import check_writable, reason, write_json


def parser() -> argparse.ArgumentParser:
    """Flags of the command."""
    made = argparse.ArgumentParser(
        prog="python -m bebop_megatron.evaluation entropy",
        description="Acceptance of an MTP head against the entropy of its target, per token and over time.",
    )
    add_source(made, required=False)
    add = made.add_argument
    add("--text", metavar="FILE", help="score this text instead of text sampled from --prompts; same formats")
    add("--results", nargs="+", metavar="JSON", help="results.json of reports, or entropy.json, in place of --load")
    add("--log", metavar="FILE", help="Megatron's training log, in place of --load")
    add("--in-time", action="store_true", help="the checkpoints or results are points in time, in this order")
    add(
        "--fit-on",
        type=int,
        metavar="N",
        help="slope of the split: the line through the first N points (the tokens of the first checkpoint; in a log "
        "a quarter of the intervals)",
    )
    add_decoding(made)
    add_amount(made)
    add("--report", metavar="DIR", help="write entropy.json and figures (PNG, SVG)")
    return made


def _check(options: argparse.Namespace) -> None:
    check_least(options, gamma=1, num_tokens=1, prompt_tokens=0, fit_on=2)
    sources = [name for name in ("load", "results", "log") if getattr(options, name)]
    if len(sources) != 1:
        raise ValueError("entropy needs one source: --load with --prompts or --text, --results, or --log")
    if options.load and bool(options.prompts) == bool(options.text):
        raise ValueError("--load needs either --prompts (to sample from) or --text (to score)")


def _of_checkpoint(path: str, text: Text, options: argparse.Namespace, name: str) -> list[Point]:
    from bebop_megatron.evaluation.decode import SpeculativeDecoder
    from bebop_megatron.evaluation.expected import expected_acceptance
    from bebop_megatron.evaluation.summaries import entropy_summary

    # both rules sample the same distribution, so that one text serves both
    config = config_of(options, "rejection", stop_tokens=text.stop_tokens)
    with opened(path, text, options.tokenizer) as subject:
        if options.text:
            texts, lengths = text.prompts, [1] * len(text.prompts)
        else:
            decoder = SpeculativeDecoder(subject.model, config, vocab_size=subject.vocab_size)
            total = options.num_tokens or len(text.prompts) * config.max_new_tokens
            with progress_bar(f"{name}: sampling", total, options.quiet) as progress:
                made = decoder.generate(text.prompts, num_tokens=options.num_tokens, progress=progress)
            texts, lengths = made.texts(text.prompts)
        with progress_bar(f"{name}: forward pass", sum(map(len, texts)), options.quiet) as progress:
            full = expected_acceptance(
                subject.model,
                texts,
                config,
                vocab_size=subject.vocab_size,
                prompt_lengths=lengths,
                progress=progress,
            )
    if len(full.anchor) == 0:
        raise ValueError("no text has two tokens: there is nothing to draft for")
    return [point_of(name, rule, entropy_summary(full, rule)) for rule in rules_of(options, default=RULES)]


def _print(points: Sequence[Point], changes: Sequence[dict[str, Any]]) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from bebop_megatron.evaluation.sweep_page import shown, span

    console = Console()
    curves = [point for point in points if point.found is not None]
    if curves:
        view = Table(title="Acceptance of a draft step against entropy of its target", box=SIMPLE_HEAD)
        for name in ("head", "rule", "slope per nat", "95%", "r", "mean entropy", "mean acceptance"):
            view.add_column(name, no_wrap=True)
        for point in curves:
            found: dict[str, Any] = point.found or {}
            slope = found["slope"]
            cells = [
                shown(slope["value"], "+.3f"),
                span(slope["low"], slope["high"], digits=3),
                shown(found["r"], ".3f"),
            ]
            cells += [shown(point.entropy, ".3f"), shown(point.acceptance, ".3f")]
            view.add_row(point.name, point.rule, *cells)
        console.print(view)
    for change in changes:
        last = change["points"][-1]
        console.print(
            f"{change['rule']}: from {change['points'][0]['name']} to {last['name']} acceptance changed by "
            f"{last['change']:+.3f}: {last['entropy_part']:+.3f} by entropy (slope {change['slope']:+.3f}, from "
            f"{change['slope_from']}), {last['mismatch_part']:+.3f} by mismatch",
            highlight=False,
        )


def _collect(options: argparse.Namespace, rules: list[str]) -> tuple[list[Point], str]:
    """The points, and the conditions they hold under, in words."""
    if options.results:
        return from_results(options.results, rules), f"from {', '.join(Path(path).name for path in options.results)}"
    if options.log:
        return from_log(options.log, rules), f"training log {Path(options.log).name}; teacher-forced accept length"
    labels = labels_of(options)
    text = read_text(options, options.text or options.prompts)
    points = []
    for path, label in zip(options.load, labels, strict=True):
        points += _of_checkpoint(path, text, options, label)
    names = ("gamma", "temperature", "top_k", "top_p", "filter_draft", "attention")
    setting = {name: getattr(options, name) for name in names}
    source = "given text" if options.text else "text sampled by each head's own model"
    return points, f"{describe(setting)}, {source}, data {text.described}"


def main(argv: Sequence[str] | None = None) -> None:
    """Measure, fit, split and draw."""
    options = parser().parse_args(argv)
    rules = rules_of(options, default=RULES)
    measured_in = environment()
    try:
        _check(options)
        # at the end of the measurement it would be too late
        if options.report and is_first():
            check_writable(options.report, "--report", is_folder=True)
        points, setting = _collect(options, rules)
        groups = [[point for point in points if point.rule == rule] for rule in rules]
        timed = [group for group in groups if len(group) > 1] if options.in_time or options.log else []
        changes = [over_time(group, options.fit_on) for group in timed]
        if options.report and is_first():
            folder = Path(options.report)
            payload = {"setting": setting, "points": [asdict(point) for point in points], "over_time": changes}
            write_json(folder / "entropy.json", payload | {"environment": measured_in})
            _draw(points, changes, folder, f"{setting}. {versions(measured_in)}")
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {reason(error)}")
    if is_first() and not options.quiet:
        _print(points, changes)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def _draw(points: Sequence[Point], changes: Sequence[dict[str, Any]], folder: Path, caption: str) -> None:
    from bebop_megatron.evaluation import sweep_figures as draw

    curves = {(point.name, point.rule): point.found for point in points if point.found is not None}
    if curves:
        draw.plot_entropy_curves(curves, folder / "entropy.png", caption)
    if changes:
        draw.plot_changes(changes, folder / "entropy_over_time.png", caption)
