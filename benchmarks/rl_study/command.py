"""`python -m benchmarks.rl_study`: trains, runs every arm, tabulates and draws; again: goes on where it stopped.

python -m benchmarks.rl_study                # everything, into runs/rl_study
python -m benchmarks.rl_study --quick        # small, into runs/rl_study-quick
python -m benchmarks.rl_study --stress       # three arms with a larger entropy bonus, into runs/rl_study-stress
python -m benchmarks.rl_study --publish      # also copy results and figures to benchmarks/, tables to docs/rl.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

from benchmarks.rl_study.jobs import RLStudy, adopt
from benchmarks.rl_study.plan import FULL, QUICK, STRESS
from benchmarks.study.jobs import Job

ROOT = Path(__file__).resolve().parents[2]


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rl_study", description=(__doc__ or "").partition("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="small model, few steps, into runs/rl_study-quick")
    parser.add_argument("--stress", action="store_true", help="entropy pushed up, into runs/rl_study-stress")
    parser.add_argument("--output", type=Path, help="folder of the study (runs/rl_study); what is there stays")
    parser.add_argument("--publish", action="store_true", help="copy the results into benchmarks/ and docs/rl.md")
    parser.add_argument("--report-only", action="store_true", help="run nothing: tables and figures of what is there")
    args = parser.parse_args(argv)
    if args.publish and args.quick:
        parser.error("--publish is for the full study: a quick one says too little")
    if args.quick and args.stress:
        parser.error("--quick and --stress are two studies: choose one")
    name = "rl_study-quick" if args.quick else "rl_study-stress" if args.stress else "rl_study"
    args.output = args.output or ROOT / "runs" / name
    return args


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def report(study: RLStudy) -> None:
    """Write results, tables and figures of what is there, and show the tables."""
    from benchmarks.rl_study.figures import draw
    from benchmarks.rl_study.publish import traces
    from benchmarks.rl_study.results import write_results
    from benchmarks.rl_study.tables import readings, tables
    from benchmarks.study.publish import markdown_of, show_tables

    rows = write_results(study)
    if not rows:
        _say("nothing is measured yet")
        return
    events = traces(study)
    found, said = tables(rows), readings(rows, events)
    (study.output / "rl_study.md").write_text(markdown_of(found, said) + "\n")
    draw(rows, events, study.output / "figures")
    show_tables(found, said)
    _say(f"results: {study.output / 'results.json'}, tables: rl_study.md, figures: figures/ beside it")


def _run(study: RLStudy) -> dict[str, str]:
    """Do what is not done; returns what failed, with the reason."""
    from benchmarks.rl_study.results import write_results
    from benchmarks.study.runner import Runner

    failed = Runner(study, min(2, os.cpu_count() or 1), _say).run()
    if failed:
        return failed
    study = replace(study, running=True)

    def outcome(job: Job) -> str:
        rows = [row for row in write_results(study) if job.name == f"{row['arm']}-seed{row['seed']}"]
        seconds = sorted(row["step_seconds"] for row in rows)[len(rows) // 2]
        return f"reward {rows[0]['reward']:.2f} to {rows[-1]['reward']:.2f}, {seconds:.1f} s a step"

    return Runner(study, 1, _say, outcome).run()


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then report."""
    args = _parse(argv)
    from bebop_megatron.evaluation.results import environment, write_json
    from bebop_megatron.outputs import check_writable

    # the CPU platform answers for a GPU once it is entered
    measured_in = environment()
    try:
        check_writable(args.output, "--output", is_folder=True)
        study = RLStudy(args.output.resolve(), QUICK if args.quick else STRESS if args.stress else FULL)
    except ValueError as error:
        sys.exit(f"error: {error}")
    failed: dict[str, str] = {}
    if not args.report_only:
        if args.stress:
            # backbone and heads are those of the full study
            adopt(study, ROOT / "runs/rl_study")
        file = study.output / "environment.json"
        if not file.is_file():
            write_json(file, measured_in | {"threads": 1, "load_before": round(os.getloadavg()[0], 2)})
        _say(f"{len(study.cells)} runs of {study.size.steps} steps, one at a time, into {study.output}")
        began = time.monotonic()
        # whoever ends us wants the runs ended, too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            failed = _run(study)
        except KeyboardInterrupt:
            _say("interrupted: the same command goes on from here")
            report(study)
            sys.exit(130)
        _say(f"took {(time.monotonic() - began) / 60:.1f} min")
    report(study)
    if failed:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        sys.exit(f"error: not everything was measured:\n{lines}")
    if args.publish:
        from benchmarks.rl_study.publish import publish

        for file in publish(study, ROOT, "stress" if args.stress else ""):
            _say(f"published: {file}")
