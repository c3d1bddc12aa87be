"""`python -m benchmarks.study`: trains, decodes, tabulates; again: goes on where it stopped.

python -m benchmarks.study                       # everything, into runs/study
python -m benchmarks.study --quick               # small, into runs/study-quick
python -m benchmarks.study --publish             # also copy results and figures to benchmarks/, tables to docs/study.md
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from benchmarks.study.corpora import CODE, MATH, gsm8k_file
from benchmarks.study.jobs import Job, Study
from benchmarks.study.plan import FULL, QUICK
from benchmarks.study.session import ROOT, Steps, make_parser, parse, say, work


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.study", __doc__, published_to="docs/study.md")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        help='GSM8K as JSON lines with "question" and "answer" (default: $GSM8K, else data/gsm8k/train.jsonl here)',
    )
    parser.add_argument("--domain", action="append", choices=(CODE, MATH), help="only this domain; several allowed")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes side by side (2)")
    args = parse(parser, argv, lambda args: "study-quick" if args.quick else "study")
    if args.jobs < 1:
        parser.error(f"--jobs must be positive, got {args.jobs}")
    return args


def _domains(args: argparse.Namespace, gsm8k: Path | None) -> tuple[str, ...]:
    wanted = tuple(args.domain or (CODE, MATH))
    if MATH in wanted and gsm8k is None and not (args.output / "data" / MATH / "done.json").is_file():
        say("mathematics is skipped: no GSM8K text; give --gsm8k FILE (JSON lines with question and answer)")
        wanted = tuple(domain for domain in wanted if domain != MATH)
    return wanted


def _outcome(study: Study, job: Job) -> str:
    from benchmarks.study.results import write_results

    if job.kind != "decode":
        return "done"
    write_results(study)
    parts = []
    for cell in job.cells:
        measured: Any = study.measured(cell)
        setting = f"{cell.rule} g{cell.gamma} T{cell.temperature:g}"
        parts.append(f"{setting} {100 * measured['accept_rate']:.1f} ± {100 * (measured['stderr'] or 0):.1f}")
    return "; ".join(parts)


def report(study: Study) -> None:
    """Write results, tables and figures of what is there, and show the tables."""
    from benchmarks.study.figures import draw
    from benchmarks.study.publish import markdown, show
    from benchmarks.study.results import write_results

    rows = write_results(study)
    if not rows:
        say("nothing is measured yet")
        return
    (study.output / "study.md").write_text(markdown(rows) + "\n")
    draw(rows, study.output / "figures")
    show(rows)
    say(f"results: {study.output / 'results.json'}, tables: study.md, figures: figures/ beside it")


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then report."""
    args = _parse(argv)
    from bebop_megatron.outputs import check_writable
    from benchmarks.study.publish import publish
    from benchmarks.study.runner import Runner

    try:
        check_writable(args.output, "--output", is_folder=True)
        gsm8k = gsm8k_file(args.gsm8k)
        domains = _domains(args, gsm8k)
        study = Study(args.output, QUICK if args.quick else FULL, domains, gsm8k)
    except ValueError as error:
        sys.exit(f"error: {error}")
    steps = Steps(
        run=lambda: Runner(study, args.jobs, say, lambda job: _outcome(study, job)).run(),
        report=lambda: report(study),
        publish=lambda: publish(study, ROOT),
    )
    cells = f"{len(study.cells)} cells on {' and '.join(domains)}"
    work(args, f"{cells}, {args.jobs} at a time, into {study.output}", steps, jobs=args.jobs)
