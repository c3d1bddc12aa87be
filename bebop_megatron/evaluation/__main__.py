"""`python -m bebop_megatron.evaluation --load CKPT --prompts FILE ...`: acceptance and speed of a head, by decoding.

    --output FILE             one setting, as JSON
    --report DIR              sweeps, figures and a page; several --load are compared
    generate ...              samples completions to JSONL
    entropy ...               acceptance against entropy, also over time
    merge ...                 several --output files as one table, figure and page

One process, or several under torchrun that share the model by tensor parallelism.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from bebop_megatron.evaluation.options import add_amount, add_decoding, add_source
from bebop_megatron.launcher import is_first
from bebop_megatron.outputs import check_writable, reason

COMMANDS = {
    "generate": "bebop_megatron.evaluation.generate",
    "entropy": "bebop_megatron.evaluation.entropy_report",
    "merge": "bebop_megatron.evaluation.report",
}


def parser() -> argparse.ArgumentParser:
    """Flags of the measurement itself."""
    from bebop_megatron.evaluation.sweep_report import add_report

    found = argparse.ArgumentParser(
        prog="python -m bebop_megatron.evaluation",
        description="Acceptance and speed of an MTP head, measured by speculative decoding.",
        epilog=f"Commands of their own: {', '.join(sorted(COMMANDS))}; each has --help.",
    )
    add_source(found)
    add_decoding(found)
    add_amount(found)
    add = found.add_argument
    add("--rounds", type=int, default=3, help="runs without and with drafts alternate so often; speeds are medians (3)")
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time the engine without drafts",
    )
    add("--output", metavar="FILE", help="write the results as JSON")
    add_report(found)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate heads: a table on the terminal, JSON, or a whole report."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in COMMANDS:
        importlib.import_module(COMMANDS[arguments[0]]).main(arguments[1:])
        return
    options = parser().parse_args(arguments)
    from bebop_megatron.evaluation.measure import evaluate
    from bebop_megatron.evaluation.report import print_table
    from bebop_megatron.evaluation.results import summary_payload
    from bebop_megatron.evaluation.sweep_report import run, write_report
    from bebop_megatron.outputs import write_json

    try:
        # at the end of the measurement it would be too late
        if options.output and is_first():
            check_writable(options.output, "--output")
        if options.report and is_first():
            check_writable(options.report, "--report", is_folder=True)
        if options.report:
            outcomes = run(options)
            rows = write_report(options, outcomes) if is_first() else []
        else:
            rows = evaluate(options)
        if options.output and is_first():
            write_json(options.output, summary_payload(rows, rows[0].baseline_tokens_per_second))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {reason(error)}")
    if is_first() and not options.quiet:
        print_table(rows)
    import torch

    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
