"""What is evaluated: checkpoints one after the other in one process, and the text that they continue."""

from __future__ import annotations

import argparse
import hashlib
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.settings import DecodeConfig


@dataclass(frozen=True)
class Text:
    """Prompts as token ids, and how they are named in reports."""

    prompts: list[list[int]]
    name: str
    digest: str
    tokenizer: Any | None
    stop_tokens: tuple[int, ...]

    @property
    def described(self) -> str:
        """Name, number and fingerprint, so that two reports on other data can be told apart."""
        return f"{self.name} ({len(self.prompts)} prompts, {self.digest})"


def read_text(options: argparse.Namespace, path: str) -> Text:
    """The prompts in a file, and the tokenizer of a command line.

    Raises:
        ValueError: no prompts, a bad line, no such tokenizer.
    """
    from bebop_megatron.data.tokenizer import load_tokenizer
    from bebop_megatron.evaluation.prompts import read_prompts

    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    prompts = read_prompts(path, tokenizer, options.prompt_tokens)
    eos = None if tokenizer is None or options.ignore_eos else tokenizer.eos_token_id
    digest = hashlib.sha256(repr(prompts).encode()).hexdigest()[:12]
    return Text(prompts, Path(path).stem, digest, tokenizer, () if eos is None else (eos,))


@dataclass(frozen=True)
class Subject:
    """A loaded checkpoint with the true size of its vocabulary; `checkpoint` is its folder's name and iteration."""

    model: Any
    vocab_size: int
    checkpoint: str


def checkpoint_name(path: str) -> str:
    """Folder and iteration of a checkpoint: enough to tell two apart, without the machine's other folders.

    Raises:
        ValueError: no tracker file.
    """
    folder, iteration = split_iteration(path)
    if iteration is None:
        with warnings.catch_warnings():
            # Megatron's import tells at length which optional packages are missing
            warnings.simplefilter("ignore")
            from bebop_megatron.mcore.checkpoints import latest_iteration_dir
        name = latest_iteration_dir(folder).name
        iteration = name if name == "release" else int(name.removeprefix("iter_"))
    return f"{Path(folder).resolve().name} at iteration {iteration}"


def split_iteration(path: str) -> tuple[str, int | None]:
    """`DIR@40` is iteration 40 below DIR; without a number the newest."""
    folder, at, number = path.rpartition("@")
    return (folder, int(number)) if at and folder and number.isdigit() else (path, None)


def vocabulary(loaded: Any, tokenizer: Any | None, name: str | None) -> int:
    """True size of the vocabulary: the tokenizer's, else what the checkpoint remembers, else every column.

    Raises:
        ValueError: a tokenizer with more tokens than the model has columns.
    """
    columns = loaded.padded_vocab_size
    if tokenizer is None:
        return getattr(loaded.args, "vocab_size", None) or columns
    sizes = f"has {len(tokenizer):,} tokens, but the checkpoint's vocabulary has {columns:,} columns"
    if len(tokenizer) > columns:
        raise ValueError(f"--tokenizer {name} {sizes}: it is not the tokenizer that the model was trained with")
    if columns - len(tokenizer) >= loaded.vocab_padding:
        # not an error: converters pad as they like
        warnings.warn(f"--tokenizer {name} {sizes}: is it the right one?", stacklevel=2)
    return len(tokenizer)


@contextmanager
def opened(path: str, text: Text, tokenizer_name: str | None) -> Iterator[Subject]:
    """A checkpoint for as long as the block runs; afterwards another one can be loaded.

    Raises:
        ValueError: whatever is wrong with the checkpoint or the tokenizer.
    """
    from bebop_megatron.evaluation.loading import load_model, unload_model

    folder, iteration = split_iteration(path)
    loaded = load_model(folder, iteration=iteration)
    try:
        yield Subject(loaded.model, vocabulary(loaded, text.tokenizer, tokenizer_name), checkpoint_name(path))
    finally:
        unload_model()


def check_prompts(subject: Subject, text: Text, configs: list[DecodeConfig]) -> None:
    """See that every config can continue every prompt.

    Raises:
        ValueError: ids outside the vocabulary, more positions than the model has, a model that cannot draft.
    """
    from bebop_megatron.evaluation.decode import SpeculativeDecoder

    for config in configs:
        SpeculativeDecoder(subject.model, config, vocab_size=subject.vocab_size).check(text.prompts)


def warm_up(subject: Subject, prompts: list[list[int]], config: DecodeConfig) -> None:
    """The first calls pay for allocations and lazy initialisation: let nothing measured be one of them."""
    from bebop_megatron.evaluation.decode import SpeculativeDecoder

    short = replace(config, max_new_tokens=min(8, config.max_new_tokens))
    SpeculativeDecoder(subject.model, short, vocab_size=subject.vocab_size).generate(prompts[: config.batch_size])
