"""`python -m bebop_megatron.convert {import,export,attach,inspect}`"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

from bebop_megatron.outputs import reason


def _depth(text: str) -> int:
    depth = int(text)
    if depth < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {depth}")
    return depth


def _size(text: str) -> float:
    size = float(text)
    if not 0 < size < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a size above 0, got {text}")
    return size


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.convert",
        description="Hugging Face folders to Megatron torch_dist checkpoints and back, MTP layers included.",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    methods, make = ("last-layer", "random"), "make an MTP layer: like the last attention layer, or random"

    command = commands.add_parser("import", help="Hugging Face folder -> torch_dist checkpoint")
    command.add_argument("--hf", type=Path, required=True, help="folder with config.json and safetensors")
    command.add_argument("--output", type=Path, required=True, help="new checkpoint folder, for --load")
    command.add_argument("--model", choices=("gpt", "hybrid"), help="default: hybrid with gated delta nets, else gpt")
    command.add_argument("--init-mtp", choices=methods, help=f"{make}; for a folder without one")
    command.add_argument("--mtp-depth", type=_depth, help="draft steps that the checkpoint's arguments ask for")
    command.add_argument("--seed", type=int, default=0, help="of a new MTP layer")

    command = commands.add_parser("export", help="torch_dist checkpoint -> Hugging Face folder")
    command.add_argument(
        "--load", type=Path, required=True, help="checkpoint folder; its newest checkpoint is exported"
    )
    command.add_argument(
        "--hf",
        type=Path,
        required=True,
        help="folder of the same model: config.json, tokenizer; weights with --only-mtp",
    )
    command.add_argument("--output", type=Path, required=True, help="new folder")
    command.add_argument("--only-mtp", action="store_true", help="only what has to be copied over --hf")
    command.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), help="default: as in the checkpoint")
    command.add_argument("--shard-gb", type=_size, default=5.0, help="size of a file at most, in GB")

    command = commands.add_parser("attach", help="give a torch_dist checkpoint without MTP layers one")
    command.add_argument("--load", type=Path, required=True, help="checkpoint folder; its newest checkpoint is read")
    command.add_argument("--output", type=Path, required=True, help="new checkpoint folder")
    command.add_argument("--init-mtp", choices=methods, default="last-layer", help=make)
    command.add_argument(
        "--mtp-depth", type=_depth, default=1, help="draft steps that the checkpoint's arguments ask for"
    )
    command.add_argument("--seed", type=int, default=0, help="of a new MTP layer")

    command = commands.add_parser("inspect", help="what a checkpoint of either kind holds")
    command.add_argument("path", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one command; what is wrong with the input ends it with one message."""
    options = _parser().parse_args(argv)
    # Megatron's import tells at length which optional packages are missing
    warnings.simplefilter("ignore")
    from bebop_megatron import convert

    try:
        if options.command == "import":
            convert.import_checkpoint(
                options.hf,
                options.output,
                kind=options.model,
                init_mtp=options.init_mtp,
                depth=options.mtp_depth,
                seed=options.seed,
            )
        elif options.command == "export":
            convert.export_checkpoint(
                options.load,
                options.hf,
                options.output,
                only_mtp=options.only_mtp,
                dtype=options.dtype,
                shard_bytes=int(options.shard_gb * 1e9),
            )
        elif options.command == "attach":
            convert.attach_head(
                options.load, options.output, init_mtp=options.init_mtp, depth=options.mtp_depth, seed=options.seed
            )
        else:
            print("\n".join(convert.inspect_path(options.path)))
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        # a full disk does not say where it is
        where = "" if error.filename else f"{getattr(options, 'output', options.command)}: "
        sys.exit(f"error: {where}{reason(error)}")


if __name__ == "__main__":
    main()
