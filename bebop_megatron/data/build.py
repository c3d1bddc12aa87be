"""Writes `.bin/.idx` files for Megatron, the loss mask beside them, a holdout and a description.

    PREFIX.bin, PREFIX.idx              token ids, one sequence per document
    PREFIX_mask.bin, PREFIX_mask.idx    uint8, the same documents; only if some token is not a target
    PREFIX.json                         what is inside
    PREFIX-holdout.*                    the same for held-out documents, whose texts are in .jsonl

All of it is written in a temporary folder and moved when it is complete, `PREFIX.idx` last: what an
interrupted build leaves behind does not load.
"""

from __future__ import annotations

import hashlib
import json
import os.path
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from bebop_megatron.data.description import Description, read_description, write_description
from bebop_megatron.data.documents import Document
from bebop_megatron.data.encode import Encoded, encode, padded
from bebop_megatron.data.tokenizer import tokenizer_hash
from bebop_megatron.outputs import held

MASK_SUFFIX = "_mask"
HOLDOUT_SUFFIX = "-holdout"

# in the order in which they are moved: nothing loads before the last
_SUFFIXES = (".json", "_mask.bin", "_mask.idx", ".bin", ".idx")


class _Split:
    """Files of one prefix while they are written, in `folder`."""

    def __init__(self, folder: Path, name: str, vocab_size: int) -> None:
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

        self.path = folder / name
        self.tokens = IndexedDatasetBuilder(f"{self.path}.bin", dtype=DType.optimal_dtype(vocab_size))
        self.mask = IndexedDatasetBuilder(f"{self.path}{MASK_SUFFIX}.bin", dtype=np.uint8)
        self.num_documents = self.num_tokens = self.num_targets = 0

    def add(self, encoded: Encoded) -> None:
        self.tokens.add_document(encoded.tokens, [encoded.tokens.size])  # pyright: ignore[reportArgumentType]
        self.mask.add_document(encoded.mask, [encoded.mask.size])  # pyright: ignore[reportArgumentType]
        self.num_documents += 1
        self.num_tokens += encoded.tokens.size
        self.num_targets += int(encoded.mask.sum())

    def finish(self, tokenizer: Any, format: str) -> Description:
        has_mask = self.num_targets < self.num_tokens
        self.tokens.finalize(f"{self.path}.idx")
        self.mask.finalize(f"{self.path}{MASK_SUFFIX}.idx")
        if not has_mask:
            # all ones: the same as no mask
            for suffix in (".bin", ".idx"):
                Path(f"{self.path}{MASK_SUFFIX}{suffix}").unlink()
        description = Description(
            documents=self.num_documents,
            tokens=self.num_tokens,
            target_tokens=self.num_targets,
            vocab_size=len(tokenizer),
            tokenizer=tokenizer.name_or_path,
            tokenizer_hash=tokenizer_hash(tokenizer),
            format=format,
            has_mask=has_mask,
        )
        write_description(description, self.path)
        return description


def output_files(prefix: str) -> list[Path]:
    """Every file that a build with this prefix can write, in the order in which they are moved into place."""
    files = [f"{prefix}{split}{suffix}" for split in (HOLDOUT_SUFFIX, "") for suffix in _SUFFIXES]
    return [Path(file) for file in (f"{prefix}{HOLDOUT_SUFFIX}.jsonl", *files)]


def check_output(prefix: str, *, overwrite: bool) -> None:
    """Raises ValueError if the prefix has no name, or is taken, by raw data even with `overwrite`."""
    if os.path.basename(prefix) in ("", ".", ".."):
        raise ValueError(
            f"--output {prefix} must end with a name, to which .bin and .idx are added; "
            f"for example {os.path.join(prefix, 'data')}"
        )
    if Path(f"{prefix}.json").exists() and not read_description(prefix):
        raise ValueError(
            f"--output {prefix}: {prefix}.json is already there, and no earlier build wrote it; choose another prefix"
        )
    existing = [file for file in output_files(prefix) if file.exists()]
    if existing and not overwrite:
        raise ValueError(
            f"--output {prefix}: {', '.join(map(str, existing))} already there; "
            "choose another prefix, or pass --overwrite to replace all of it"
        )


def build(
    documents: Iterable[Document],
    tokenizer: Any,
    prefix: str,
    *,
    format: str = "auto",
    holdout: float = 0.0,
    overwrite: bool = False,
    pad_to: int | None = None,
) -> dict[str, Description]:
    """Tokenise the documents and write them; returns a summary for every prefix written.

    With `pad_to`, every document has exactly so many tokens: trained on at this sequence length, each sample is one
    document from its beginning, as a prompt is when it is served.

    About the share `holdout` of the documents, chosen by a hash of their `identity`, goes to PREFIX-holdout
    instead: a document keeps its side when others are added, and no prompt is on both sides.

    Raises:
        ValueError: a bad document, no documents, an empty holdout, files that are already there, a document longer
            than `pad_to`, or a tokenizer without a token to pad with.
    """
    if pad_to is not None and tokenizer.pad_token_id is None:
        raise ValueError(f"the tokenizer {tokenizer.name_or_path} has no pad_token to pad documents with")
    if not 0 <= holdout < 1:
        raise ValueError(f"--holdout must be at least 0 and less than 1, got {holdout}")
    check_output(prefix, overwrite=overwrite)
    target = Path(prefix)
    target.parent.mkdir(parents=True, exist_ok=True)
    with (
        held(prefix, "--output"),
        tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name,
    ):
        folder = Path(name)
        summaries = _write(documents, tokenizer, folder, target.name, format, holdout, pad_to)
        _publish(folder, prefix)
    return {str(target.parent / name): summary for name, summary in summaries.items()}


def _write(
    documents: Iterable[Document],
    tokenizer: Any,
    folder: Path,
    name: str,
    format: str,
    holdout: float,
    pad_to: int | None,
) -> dict[str, Description]:
    train = _Split(folder, name, len(tokenizer))
    held = _Split(folder, name + HOLDOUT_SUFFIX, len(tokenizer)) if holdout else None
    with open(folder / f"{name}{HOLDOUT_SUFFIX}.jsonl", "w", encoding="utf-8") as texts:
        for encoded in encode(documents, tokenizer):
            if pad_to is not None:
                encoded = padded(encoded, pad_to, tokenizer.pad_token_id)
            if held and _is_held_out(encoded, holdout):
                held.add(encoded)
                texts.write(json.dumps(_record(encoded)) + "\n")
            else:
                train.add(encoded)
    _check_sizes(train, held, holdout)
    summaries = {name: train.finish(tokenizer, format)}
    if held:
        summaries[name + HOLDOUT_SUFFIX] = held.finish(tokenizer, format)
    else:
        (folder / f"{name}{HOLDOUT_SUFFIX}.jsonl").unlink()
    return summaries


def _check_sizes(train: _Split, held: _Split | None, holdout: float) -> None:
    total = train.num_documents + (held.num_documents if held else 0)
    if not total:
        raise ValueError("--input holds no documents: nothing to write")
    if held and not (held.num_documents and train.num_documents):
        side = "training" if held.num_documents else "the holdout"
        raise ValueError(
            f"--holdout {holdout:g} of {total:,} documents leaves none for {side}; change the share, or leave it out"
        )


def _is_held_out(encoded: Encoded, share: float) -> bool:
    digest = hashlib.sha256(encoded.document.identity().encode()).digest()
    return int.from_bytes(digest[:8]) < share * 2**64


def _record(encoded: Encoded) -> dict[str, str]:
    """Text to evaluate with: where there is a prompt, everything before the last answer is the prompt."""
    parts = encoded.segments
    if all(part.is_target for part in parts):
        return {"text": "".join(part.text for part in parts)}
    last = max(number for number, part in enumerate(parts) if part.is_target)
    return {"prompt": "".join(part.text for part in parts[:last]), "completion": parts[last].text}


def _publish(folder: Path, prefix: str) -> None:
    files = output_files(prefix)
    # indices first: a file of the old build beside one of the new must not load
    for file in reversed(files):
        file.unlink(missing_ok=True)
    for file in files:
        written = folder / file.name
        if written.exists():
            written.replace(file)
