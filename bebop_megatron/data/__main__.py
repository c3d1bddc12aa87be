"""`python -m bebop_megatron.data tokenizer|build|inspect`: from files to what Megatron trains on."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import Any

from bebop_megatron.data.description import read_description
from bebop_megatron.data.documents import FORMATS, first_bytes, input_files, parse_keys, read_documents
from bebop_megatron.outputs import reason


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.data",
        description="From files to what Megatron trains on: a tokenizer, .bin/.idx files, a loss mask.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    tokenizer = commands.add_parser("tokenizer", help="train a byte-level BPE tokenizer")
    _add_input(tokenizer)
    tokenizer.add_argument("--vocab-size", type=int, default=2048, help="entries, special tokens included (2048)")
    tokenizer.add_argument("--output", required=True, metavar="DIR")
    tokenizer.set_defaults(run=_tokenizer)

    build = commands.add_parser("build", help="tokenise documents into PREFIX.bin and PREFIX.idx")
    _add_input(build)
    build.add_argument("--tokenizer", required=True, metavar="DIR", help="Hugging Face tokenizer")
    build.add_argument("--output", required=True, metavar="PREFIX")
    build.add_argument(
        "--holdout",
        type=float,
        nargs="?",
        const=0.02,
        default=0.0,
        metavar="SHARE",
        help="keep this share of the documents apart, as PREFIX-holdout (0; 0.02 without a value)",
    )
    build.set_defaults(run=_build)

    inspect = commands.add_parser("inspect", help="count, and show one document with its loss mask")
    inspect.add_argument("prefix", metavar="PREFIX")
    inspect.add_argument("--tokenizer", metavar="DIR", help="default: the one that PREFIX.json names")
    inspect.add_argument("--document", type=int, default=0, metavar="N", help="which one to show (0)")
    inspect.add_argument("--max-tokens", type=int, default=400, metavar="N", help="show no more of it (400)")
    inspect.set_defaults(run=_inspect)
    return parser


def _add_input(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--input",
        required=True,
        nargs="+",
        metavar="PATH",
        help="files and folders; stdlib is the Python sources of this interpreter's standard library",
    )
    add("--format", choices=FORMATS, default="auto", help="auto goes by the suffix (auto)")
    add(
        "--keys",
        metavar="NAME=KEY,...",
        help="names in JSON lines, such as prompt=question,completion=answer",
    )
    add(
        "--separator",
        default="",
        metavar="TEXT",
        help=r"put behind every prompt, as a part of it; \n is a line feed (nothing)",
    )
    add("--max-bytes", type=int, metavar="N", help="no more documents than N bytes of text hold, from the front (all)")
    add("--overwrite", action="store_true", help="replace what is at --output")
    add("--quiet", action="store_true", help="no progress bar, no summary")


def _documents(options: argparse.Namespace, description: str) -> Any:
    """The documents of the input, behind a progress bar that is to be closed."""
    from tqdm import tqdm

    documents = read_documents(
        options.input,
        format=options.format,
        keys=parse_keys(options.keys),
        separator=options.separator.replace(r"\n", "\n"),
    )
    if options.max_bytes is not None:
        documents = first_bytes(documents, options.max_bytes)
    # None: only on a terminal, a log needs no bar
    disable = options.quiet or None
    return tqdm(documents, desc=description, unit=" documents", file=sys.stderr, disable=disable, leave=False)


def _say(text: str, options: argparse.Namespace) -> None:
    if not options.quiet:
        print(text, file=sys.stderr)


def _tokenizer(options: argparse.Namespace) -> None:
    from bebop_megatron.data.tokenizer import check_output, save_tokenizer, train_tokenizer

    check_output(options.output, overwrite=options.overwrite)
    with _documents(options, "reading") as documents:
        tokenizer = train_tokenizer(documents, vocab_size=options.vocab_size)
    save_tokenizer(tokenizer, options.output)
    _say(f"{options.output}: {len(tokenizer):,} tokens", options)


def _build(options: argparse.Namespace) -> None:
    from bebop_megatron.data.build import build, check_output, output_files
    from bebop_megatron.data.tokenizer import load_tokenizer

    # before the tokenizer: loading one takes seconds
    check_output(options.output, overwrite=options.overwrite)
    outputs = {file.resolve() for file in output_files(options.output)}
    for file in input_files(options.input, options.format):
        if file.resolve() in outputs:
            raise ValueError(f"--input {file} is a file that --output {options.output} writes; choose another prefix")
    tokenizer = load_tokenizer(options.tokenizer)
    with _documents(options, "tokenising") as documents:
        summaries = build(
            documents,
            tokenizer,
            options.output,
            format=options.format,
            holdout=options.holdout,
            overwrite=options.overwrite,
        )
    for prefix, summary in summaries.items():
        share = summary.target_tokens / summary.tokens
        _say(
            f"{prefix}: {summary.documents:,} documents, {summary.tokens:,} tokens, {share:.1%} targets",
            options,
        )


def _inspect(options: argparse.Namespace) -> None:
    from bebop_megatron.data.inspection import inspect
    from bebop_megatron.data.tokenizer import load_tokenizer, tokenizer_hash

    description = read_description(options.prefix)
    name = options.tokenizer or (description and description.tokenizer)
    if not name:
        raise ValueError(f"{options.prefix}.json, which names the tokenizer, is not there; pass --tokenizer")
    tokenizer = load_tokenizer(name)
    if description and tokenizer_hash(tokenizer) != description.tokenizer_hash:
        print(f"warning: {name} is not the tokenizer that {options.prefix} was built with", file=sys.stderr)
    print(inspect(options.prefix, tokenizer, document=options.document, max_tokens=options.max_tokens))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 for what the user can put right."""
    options = _parser().parse_args(arguments)
    try:
        with warnings.catch_warnings():
            # Megatron names every optional package that is not there, on import
            warnings.simplefilter("ignore")
            options.run(options)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        # a full disk does not say where it is
        where = "" if error.filename else f"{getattr(options, 'output', options.command)}: "
        print(f"error: {where}{reason(error)}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
