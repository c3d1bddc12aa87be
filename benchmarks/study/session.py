"""What the command of every study does: runs what is missing, reports what is there, publishes what is complete."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


def say(text: str) -> None:
    """A line for whoever watches; standard output has the tables."""
    print(text, file=sys.stderr, flush=True)


def make_parser(name: str, document: str | None, *, published_to: str) -> argparse.ArgumentParser:
    """The flags that every study has; `name` is its module, `document` that module's docstring."""
    parser = argparse.ArgumentParser(prog=f"python -m {name}", description=(document or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="small model, few steps, into a folder of its own")
    parser.add_argument("--output", type=Path, help="folder of the study, in runs/; what is there is not repeated")
    parser.add_argument("--publish", action="store_true", help=f"copy the results into benchmarks/ and {published_to}")
    parser.add_argument(
        "--report-only", action="store_true", help="measure nothing: tables and figures of what is there"
    )
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None, folder: Callable[[Any], str]) -> argparse.Namespace:
    """Arguments, with `output` filled in: below runs/, named by `folder`, unless it was given."""
    args = parser.parse_args(argv)
    if args.publish and args.quick:
        parser.error("--publish is for the full study: a quick one says too little")
    args.output = (args.output or ROOT / "runs" / folder(args)).resolve()
    return args


@dataclass(frozen=True)
class Steps:
    """What a study does: `run` returns what failed, with the reason; `publish` the files that it wrote."""

    run: Callable[[], dict[str, str]]
    report: Callable[[], None]
    publish: Callable[[], list[Path]]


def work(args: argparse.Namespace, begin: str, steps: Steps, **settings: Any) -> None:
    """Run unless only a report is asked for, report, and publish if that is asked for.

    The first run writes environment.json: the machine, with `settings`.

    Raises:
        SystemExit: interrupted (130), or not everything was measured.
    """
    failed: dict[str, str] = {}
    if not args.report_only:
        _note_environment(args.output / "environment.json", settings)
        say(begin)
        began = time.monotonic()
        # whoever ends us wants the jobs ended, too
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            failed = steps.run()
        except KeyboardInterrupt:
            say("interrupted: the same command goes on from here")
            steps.report()
            sys.exit(130)
        say(f"took {(time.monotonic() - began) / 60:.1f} min")
    steps.report()
    if failed:
        lines = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        sys.exit(f"error: not everything was measured:\n{lines}")
    if args.publish:
        for file in steps.publish():
            say(f"published: {file}")


def _note_environment(file: Path, settings: dict[str, Any]) -> None:
    from bebop_megatron.evaluation.environment import environment
    from bebop_megatron.outputs import write_json

    if not file.is_file():
        # before any job: the CPU platform answers for a GPU once it is entered
        where = environment() | {"threads": 1, "load_before": round(os.getloadavg()[0], 2)}
        write_json(file, where | settings)
