"""`python -m benchmarks.rl_study`: trains, runs every arm, tabulates and draws; again: goes on where it stopped.

python -m benchmarks.rl_study                # everything, into runs/rl_study
python -m benchmarks.rl_study --quick        # small, into runs/rl_study-quick
python -m benchmarks.rl_study --stress       # two arms whose entropy is pushed up, into runs/rl_study-stress
python -m benchmarks.rl_study --publish      # also copy results and figures to benchmarks/, tables to docs/rl.md
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from benchmarks.rl_study.jobs import RLStudy, adopt
from benchmarks.rl_study.plan import FULL, QUICK, STRESS
from benchmarks.study.jobs import Job
from benchmarks.study.session import ROOT, Steps, make_parser, parse, say, work


def _folder(args: argparse.Namespace) -> str:
    return "rl_study-quick" if args.quick else "rl_study-stress" if args.stress else "rl_study"


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = make_parser("benchmarks.rl_study", __doc__, published_to="docs/rl.md")
    parser.add_argument("--stress", action="store_true", help="entropy pushed up, into runs/rl_study-stress")
    args = parse(parser, argv, _folder)
    if args.quick and args.stress:
        parser.error("--quick and --stress are two studies: choose one")
    return args


def report(study: RLStudy) -> None:
    """Write results, tables and figures of what is there, and show the tables."""
    from benchmarks.rl_study.figures import draw
    from benchmarks.rl_study.publish import traces
    from benchmarks.rl_study.results import write_results
    from benchmarks.rl_study.tables import readings, tables
    from benchmarks.study.publish import markdown_of, show_tables

    rows = write_results(study)
    if not rows:
        say("nothing is measured yet")
        return
    events = traces(study)
    found, said = tables(rows), readings(rows, events)
    (study.output / "rl_study.md").write_text(markdown_of(found, said) + "\n")
    draw(rows, events, study.output / "figures")
    show_tables(found, said)
    say(f"results: {study.output / 'results.json'}, tables: rl_study.md, figures: figures/ beside it")


def _outcome(study: RLStudy, job: Job) -> str:
    from benchmarks.rl_study.results import write_results

    rows = [row for row in write_results(study) if job.name == f"{row['arm']}-seed{row['seed']}"]
    seconds = sorted(row["step_seconds"] for row in rows)[len(rows) // 2]
    return f"reward {rows[0]['reward']:.2f} to {rows[-1]['reward']:.2f}, {seconds:.1f} s a step"


def _run(study: RLStudy) -> dict[str, str]:
    """Do what is not done; returns what failed, with the reason."""
    from benchmarks.study.runner import Runner

    failed = Runner(study, min(2, os.cpu_count() or 1), say).run()
    if failed:
        return failed
    cells = replace(study, running=True)
    return Runner(cells, 1, say, lambda job: _outcome(cells, job)).run()


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then report."""
    args = _parse(argv)
    from bebop_megatron.outputs import check_writable
    from benchmarks.rl_study.publish import publish

    try:
        check_writable(args.output, "--output", is_folder=True)
        study = RLStudy(args.output, QUICK if args.quick else STRESS if args.stress else FULL)
    except ValueError as error:
        sys.exit(f"error: {error}")
    if args.stress and not args.report_only:
        # backbone and heads are those of the full study
        adopt(study, ROOT / "runs/rl_study")
    steps = Steps(
        run=lambda: _run(study),
        report=lambda: report(study),
        publish=lambda: publish(study, ROOT, "stress" if args.stress else ""),
    )
    work(args, f"{len(study.cells)} runs of {study.size.steps} steps, one at a time, into {study.output}", steps)
