"""Measures a suite, then writes data file, figure and document, and prints the tables with the judged ratios last.

python -m benchmarks.loss            # everything: minutes
python -m benchmarks.loss --quick    # an eighth of the tokens, few rounds
python -m benchmarks.loss --data FILE    # nothing is measured: tables, figure and document from a data file
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from benchmarks.loss.cases import Suite, cpu_suite, gpu_suite, quick_suite
from benchmarks.loss.contenders import CONTENDERS, absent
from benchmarks.loss.document import update_document
from benchmarks.loss.measure import errors, in_fresh_processes, peak_memory, timing
from benchmarks.loss.plot import plot
from benchmarks.loss.results import judged, memory_table, time_table

ROOT = Path(__file__).resolve().parents[2]


def check(suite: Suite) -> dict[str, str]:
    """What is wrong, by contender and kind of case; empty if all agree with the float64 reference."""
    wrong = {}
    for tp in sorted({case.tp for case in suite.cases}):
        case = replace(suite.default, tp=tp)
        names = [name for name in CONTENDERS if name not in absent(case)]
        wrong |= {f"{name}, tp={tp}": what for name, what in in_fresh_processes(errors, case, names).items()}
    return wrong


def measure(suite: Suite, say: Callable[[str], None]) -> dict[str, Any]:
    """All measurements of a suite, as they go into the data file."""
    listed = [("default", suite.default), *((name, case) for name, cases in suite.timed.items() for case in cases)]
    timed, floor_rows = [], {}
    for number, (sweep, case) in enumerate(listed):
        say(f"time {number + 1}/{len(listed)}: K={case.k}, n={case.n:,}, V={case.v:,}, tp={case.tp}")
        names = [name for name in CONTENDERS if name not in absent(case)]
        rounds = suite.sweep_rounds if number else suite.rounds
        # what suits the floor is a matter of the weight's shape
        shape = case.v // case.tp, case.h
        result = in_fresh_processes(timing, case, names, rounds, floor_rows.get(shape))
        floor_rows[shape] = result["floor_rows"]
        timed.append({"sweep": sweep, "case": asdict(case)} | result)
    weighed = []
    for number, case in enumerate(suite.weighed):
        say(f"memory {number + 1}/{len(suite.weighed)}: K={case.k}, n={case.n:,}, V={case.v:,}")
        names = [name for name in CONTENDERS if name not in absent(case)] if case.k in suite.compared else ["ours"]
        peaks = {name: in_fresh_processes(peak_memory, case, name) for name in names}
        weighed.append({"case": asdict(case), "peak_bytes": peaks})
    return {"not_run": absent(suite.default), "timed": timed, "weighed": weighed}


def conditions(suite: Suite) -> dict[str, Any]:
    """Hardware, versions, date, and how busy the machine was before we began."""
    from bebop_megatron.evaluation.environment import environment

    out = environment() | {"threads": suite.default.threads, "load_before": round(os.getloadavg()[0], 2)}
    for package in ("triton", "liger_kernel"):
        if suite.default.device == "cuda" and any(metadata.distributions(name=package)):
            out[package] = metadata.version(package)
    return out


def machine_name(environment: dict[str, Any]) -> str:
    """A name for files: the GPU, or the CPU and its cores."""
    name = environment.get("gpu") or f"{environment['cpu']} {environment['cores']} cores"
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def show(data: dict[str, Any]) -> None:
    """Tables on the terminal, the judged ratios last."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console()
    environment = data["environment"]
    hardware = environment.get("gpu") or f"{environment['cpu']}, {environment['cores']} cores"
    views = []
    for title, (header, rows) in (
        ("Time as a multiple of the bare products: median (p20 to p80)", time_table(data)),
        ("Peak memory beyond the inputs, MiB", memory_table(data)),
    ):
        view = Table(title=title, box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
        for column in header:
            view.add_column(column, justify="left" if column == "sweep" else "right")
        for row in rows:
            view.add_row(*row)
        views.append(view)
    final = Table(title="Judged ratios", box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title_justify="left")
    for column in ("", "ratio", "limit", ""):
        final.add_column(column, no_wrap=True)
    for one in judged(data):
        final.add_row(one.name, one.shown, one.shown_limit, one.verdict)
    unbounded = console.options.update(width=10_000)
    console.width = max(console.width, *(console.measure(v, options=unbounded).maximum for v in (*views, final)))
    versions = f"torch {environment['torch']}, {environment['threads']} threads, {environment['date']}"
    console.print(f"{hardware}; {versions}; load before: {environment['load_before']}", highlight=False)
    for name, reason in data["not_run"].items():
        console.print(f"not run: {name} ({reason})", highlight=False)
    if any(one["case"]["tp"] > 1 for one in data["timed"]):
        console.print("tp: gloo ranks share the threads of this machine; their ratios only inform", highlight=False)
    for view in (*views, final):
        console.print(view)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.loss", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--quick", action="store_true", help="an eighth of the tokens and few rounds, into runs/bench")
    parser.add_argument("--data", type=Path, help="measure nothing: tables, figure and document from this data file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads, shared by the ranks of a tp group (2)")
    parser.add_argument("--output", type=Path, help="folder for data/ and figures/ (benchmarks, or runs/bench)")
    args = parser.parse_args()
    if args.threads < 1:
        parser.error(f"--threads must be positive, got {args.threads}")
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: torch finds no GPU")
    return args


def _measured(args: argparse.Namespace) -> dict[str, Any]:
    from bebop_megatron.outputs import write_json

    suite = gpu_suite() if args.device == "cuda" else cpu_suite(args.threads)
    suite = quick_suite(suite) if args.quick else suite
    data: dict[str, Any] = {"suite": "quick" if args.quick else "full", "environment": conditions(suite)}
    load = data["environment"]["load_before"]
    if load > 0.5:
        _note(f"this machine is busy (load {load}): keep no numbers of this run")
    _note("checking every contender against the float64 reference")
    wrong = check(suite)
    if wrong:
        lines = "\n".join(f"  {name}: {what}" for name, what in wrong.items())
        raise SystemExit(f"nothing is measured, because results are wrong:\n{lines}")
    data |= measure(suite, _note)
    folder = args.output or ROOT / ("runs/bench" if args.quick else "benchmarks")
    name = f"loss-{machine_name(data['environment'])}-{data['environment']['date']}"
    args.data = folder / "data" / f"{name}.json"
    write_json(args.data, data)
    return data


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def main() -> None:
    args = _parse()
    data = json.loads(args.data.read_text()) if args.data else _measured(args)
    figure = args.data.parent.parent / "figures" / f"{args.data.stem}.png"
    plot(data, figure)
    _note(f"data: {args.data}, figure: {figure}")
    if args.data.resolve().is_relative_to(ROOT / "benchmarks"):
        update_document(ROOT / "docs/loss.md", args.data)
        _note("table: docs/loss.md")
    show(data)
