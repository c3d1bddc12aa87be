"""`python -m bebop_megatron.estimate --world-size 16 -- <Megatron arguments>`, or `--preset NAME --tp 2 --ep 8 ...`."""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import sys
import warnings
from dataclasses import asdict
from typing import Any

from bebop_megatron.optional import has

_COLUMNS = ("parameters", "gradients", "optimizer", "activations", "head", "logits", "objective", "total")


def _parser() -> argparse.ArgumentParser:
    from bebop_megatron.estimate.presets import PRESETS

    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.estimate",
        description="Memory of each rank, by pipeline stage. Behind -- stand a launch's own Megatron arguments.",
    )
    parser.add_argument("--world-size", type=int, required=True, help="GPUs in all")
    parser.add_argument("--preset", choices=sorted(PRESETS), help="a published architecture, in place of its flags")
    sizes = {"tp": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
    for name, what in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=1, help=f"with --preset: {what} parallel size (1)")
    parser.add_argument("--seq-length", type=int, default=8192, help="with --preset (8192)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="with --preset (1)")
    parser.add_argument("--global-batch-size", type=int, help="with --preset: default one micro-batch for every rank")
    parser.add_argument("--all", action="store_true", help="every situation, not only the one that the flags ask for")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="whose byte budget the loss has (cuda)"
    )
    parser.add_argument("--json", action="store_true", help="print bytes as JSON")
    return parser


def launch_arguments(options: argparse.Namespace, rest: list[str]) -> list[str]:
    """The Megatron arguments that the command line asks for; what stands behind -- comes last and wins."""
    if options.preset is None:
        return rest
    from bebop_megatron.estimate.presets import DEFAULTS, arguments

    layout = ["--tensor-model-parallel-size", options.tp, "--pipeline-model-parallel-size", options.pp]
    layout += ["--context-parallel-size", options.cp, "--seq-length", options.seq_length]
    if options.ep > 1:
        layout += ["--expert-model-parallel-size", options.ep, "--expert-tensor-parallel-size", 1]
    layout += ["--micro-batch-size", options.micro_batch_size]
    replicas = options.world_size // (options.tp * options.pp * options.cp)
    layout += [
        "--global-batch-size",
        options.global_batch_size or options.micro_batch_size * max(replicas, 1) * options.pp,
    ]
    if options.tp > 1:
        layout.append("--sequence-parallel")
    return [*arguments(options.preset), *DEFAULTS.split(), *map(str, layout), *rest]


def _show(found: Any, every: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 140)
    head = f", of which MTP {found.mtp_parameters / 1e9:.3f}" if found.mtp_parameters else ""
    console.print(f"{found.parameters / 1e9:.3f} billion parameters{head}; {found.world_size} ranks", highlight=False)
    for situation, stages in found.stages.items():
        if not every and situation != found.asked:
            continue
        table = Table(title=f"{situation}: GiB of a rank", title_justify="left")
        table.add_column("stage", justify="right")
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for stage in stages:
            values = [getattr(stage, column) / 2**30 for column in _COLUMNS]
            table.add_row(str(stage.stage), *(f"{value:.2f}" for value in values))
        console.print(table)
    console.print(
        "activations: of the backbone; head: of the draft steps, both rough. logits: of the language-model loss; "
        "objective: the peak of --mtp-loss. Parameters are counted; gradients and optimizer follow from them. "
        "CUDA's context, NCCL's buffers and fragmentation come on top: keep 8 GiB or more.",
        highlight=False,
    )


def main(arguments: list[str] | None = None) -> int:
    """The command line; exit status 2 where the arguments are refused."""
    words = sys.argv[1:] if arguments is None else arguments
    cut = words.index("--") if "--" in words else len(words)
    options = _parser().parse_args(words[:cut])
    rest = words[cut + 1 :]
    if options.preset is None and not rest:
        sys.exit("error: give --preset NAME, or a launch's Megatron arguments behind --")
    # nothing is computed here, and the CPU platform refuses a machine whose GPU it could see
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    from bebop_megatron.estimate.report import estimate
    from bebop_megatron.platform.rehearsal import Unknown

    # Megatron has much to say of a launch, which is not what was asked
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    try:
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
            found = estimate(launch_arguments(options, rest), options.world_size, options.device)
    except Unknown as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    finally:
        logging.disable(logging.NOTSET)
    if options.json:
        stages = {
            name: [asdict(stage) | {"total": stage.total} for stage in stages] for name, stages in found.stages.items()
        }
        print(json.dumps(asdict(found) | {"stages": stages}, indent=1))
    elif has("rich"):
        _show(found, options.all)
    else:
        sys.exit("error: the tables need rich: pip install rich, or use --json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
