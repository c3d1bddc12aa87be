"""`python -m bebop_megatron.rl.corpus --task arithmetic --output DIR`: a task's texts to train a backbone on.

DIR/documents.jsonl     prompts and completions
DIR/tokenizer           a small byte-level tokenizer of the completions' words; digits stay single
DIR/corpus.bin/.idx     what `python -m bebop_megatron.data build` makes of them, a holdout beside
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from bebop_megatron.rl.tasks import make_task

_DIGITS = re.compile(r"\d+")


def write_corpus(
    task: Any,
    folder: Path,
    *,
    documents: int,
    seed: int = 0,
    slips: float = 0.0,
    vocab_size: int = 320,
    pad_to: int | None = None,
) -> None:
    """Write all of it; what is there is made again. `pad_to` is the sequence length to train at (see `data.build`).

    Raises:
        ValueError: a task without texts, a vocabulary that its texts cannot fill, and what the task itself refuses.
    """
    from bebop_megatron.data.build import build
    from bebop_megatron.data.documents import read_documents
    from bebop_megatron.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

    if not hasattr(task, "documents"):
        raise ValueError(f"the task {type(task).__name__.lower()} has no texts to train a backbone on")
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "documents.jsonl"
    with file.open("w", encoding="utf-8") as lines:
        for prompt, completion in islice(task.documents(seed, slips), documents):
            lines.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
    save_tokenizer(train_tokenizer(_words(file), vocab_size=vocab_size), str(folder / "tokenizer"))
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    build(read_documents([str(file)]), tokenizer, str(folder / "corpus"), holdout=0.02, overwrite=True, pad_to=pad_to)


def _words(file: Path) -> Iterator[Any]:
    """The completions without digits: a tokenizer that never sees two side by side gives each a token of its own."""
    from bebop_megatron.data.documents import Text

    with file.open(encoding="utf-8") as lines:
        for line in lines:
            yield Text(_DIGITS.sub("\n", json.loads(line)["completion"]), str(file))


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status 0, or 2 for what the user can put right."""
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.rl.corpus", description="A task's texts, a tokenizer and .bin/.idx files."
    )
    parser.add_argument("--task", default="arithmetic", help="name, or name:option=value,... (arithmetic)")
    parser.add_argument("--output", required=True, type=Path, metavar="DIR")
    parser.add_argument("--documents", type=int, default=40_000, help="at most so many (40000)")
    parser.add_argument("--slips", type=float, default=0.0, help="share of wrong steps: room for RL (0)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--vocab-size", type=int, default=320)
    parser.add_argument(
        "--pad-to",
        type=int,
        metavar="N",
        help="pad every document to N tokens: at --seq-length N each sample then begins with its prompt, as in RL",
    )
    options = parser.parse_args(arguments)
    try:
        with warnings.catch_warnings():
            # Megatron names every optional package that is not there, on import
            warnings.simplefilter("ignore")
            write_corpus(
                make_task(options.task),
                options.output,
                documents=options.documents,
                seed=options.seed,
                slips=options.slips,
                vocab_size=options.vocab_size,
                pad_to=options.pad_to,
            )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
