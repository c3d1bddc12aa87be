"""`python -m benchmarks.study`: trains, decodes, tabulates; again: goes on where it stopped.

python -m benchmarks.study                       # everything, into runs/study
python -m benchmarks.study --quick               # small, into runs/study-quick
python -m benchmarks.study --publish             # also copy results and figures to benchmarks/, tables to docs/study.md
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

from benchmarks.study.corpora import CODE, MATH
from benchmarks.study.jobs import Job, Study
from benchmarks.study.plan import FULL, QUICK

ROOT = Path(__file__).resolve().parents[2]
_GSM8K_NAMES = ("data/gsm8k/train.jsonl", "gsm8k/train.jsonl")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.study", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small model, few steps and cells, into runs/study-quick")
    parser.add_argument("--output", type=Path, help="folder of the study (runs/study); what is there is not repeated")
    parser.add_argument(
        "--gsm8k",
        type=Path,
        help='GSM8K as JSON lines with "question" and "answer" (default: $GSM8K, else data/gsm8k/train.jsonl here)',
    )
    parser.add_argument("--domain", action="append", choices=(CODE, MATH), help="only this domain; several allowed")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="processes side by side (2)")
    parser.add_argument("--publish", action="store_true", help="copy the results into benchmarks/ and docs/study.md")
    parser.add_argument(
        "--report-only", action="store_true", help="measure nothing: tables and figures of what is there"
    )
    args = parser.parse_args(argv)
    if args.jobs < 1:
        parser.error(f"--jobs must be positive, got {args.jobs}")
    if args.publish and args.quick:
        parser.error("--publish is for the full study: a quick one says too little")
    return args


def gsm8k_file(named: Path | None) -> Path | None:
    """The file of GSM8K, or None where there is none.

    Raises:
        ValueError: a file that was named is not there.
    """
    for source, name in (("--gsm8k", named), ("the environment's GSM8K", os.environ.get("GSM8K"))):
        if name:
            if not Path(name).is_file():
                raise ValueError(f"{source}, {name}, is no file")
            return Path(name)
    return next((ROOT / name for name in _GSM8K_NAMES if (ROOT / name).is_file()), None)


def _domains(args: argparse.Namespace, gsm8k: Path | None) -> tuple[str, ...]:
    wanted = tuple(args.domain or (CODE, MATH))
    if MATH in wanted and gsm8k is None and not (args.output / "data" / MATH / "done.json").is_file():
        _say("mathematics is skipped: no GSM8K text; give --gsm8k FILE (JSON lines with question and answer)")
        wanted = tuple(domain for domain in wanted if domain != MATH)
    return wanted


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _outcome(study: Study, job: Job) -> str:
    if job.kind != "decode":
        return "done"
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
        _say("nothing is measured yet")
        return
    (study.output / "study.md").write_text(markdown(rows) + "\n")
    draw(rows, study.output / "figures")
    show(rows)
    _say(f"results: {study.output / 'results.json'}, tables: study.md, figures: figures/ beside it")


def main(argv: list[str] | None = None) -> None:
    """Run what is missing, then report."""
    args = _parse(argv)
    args.output = args.output or ROOT / "runs" / ("study-quick" if args.quick else "study")
    from bebop_megatron.evaluation.results import environment, write_json
    from bebop_megatron.outputs import check_writable
    from benchmarks.study.results import write_results
    from benchmarks.study.runner import Runner

    # the CPU platform answers for a GPU once it is entered
    measured_in = environment()
    try:
        check_writable(args.output, "--output", is_folder=True)
        gsm8k = gsm8k_file(args.gsm8k)
        domains = _domains(args, gsm8k)
        study = Study(args.output.resolve(), QUICK if args.quick else FULL, domains, gsm8k and gsm8k.resolve())
    except ValueError as error:
        sys.exit(f"error: {error}")
    failed: dict[str, str] = {}
    if not args.report_only:
        file = study.output / "environment.json"
        if not file.is_file():
            write_json(
                file, measured_in | {"threads": 1, "jobs": args.jobs, "load_before": round(os.getloadavg()[0], 2)}
            )
        _say(f"{len(study.cells)} cells on {' and '.join(domains)}, {args.jobs} at a time, into {study.output}")
        began = time.monotonic()
        # whoever ends us wants the jobs ended, too
        signal.signal(signal.SIGTERM, signal.default_int_handler)

        def outcome(job: Job) -> str:
            if job.kind == "decode":
                write_results(study)
            return _outcome(study, job)

        try:
            failed = Runner(study, args.jobs, _say, outcome).run()
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
        from benchmarks.study.publish import publish

        for file in publish(study, ROOT):
            _say(f"published: {file}")
