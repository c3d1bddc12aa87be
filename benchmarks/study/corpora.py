"""The two domains: training corpora, tokenizers, and prompts out of documents that no training sees."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from benchmarks.study.plan import Size
from benchmarks.study.session import ROOT

CODE, MATH = "code", "math"
_ANSWER = "\nAnswer:"
_GSM8K_NAMES = ("data/gsm8k/train.jsonl", "gsm8k/train.jsonl")


def gsm8k_file(named: Path | None) -> Path | None:
    """The file of GSM8K, or None where there is none.

    Raises:
        ValueError: a file that was named is not there.
    """
    for source, name in (("--gsm8k", named), ("the environment's GSM8K", os.environ.get("GSM8K"))):
        if name:
            if not Path(name).is_file():
                raise ValueError(f"{source}, {name}, is no file")
            return Path(name).resolve()
    return next((ROOT / name for name in _GSM8K_NAMES if (ROOT / name).is_file()), None)


def _math_texts(gsm8k: Path, target: Path) -> None:
    """GSM8K as running text, one problem a document.

    Raises:
        ValueError: a line without question and answer.
    """
    lines = []
    for number, line in enumerate(gsm8k.read_text(encoding="utf-8").splitlines(), start=1):
        record = json.loads(line)
        if not {"question", "answer"} <= record.keys():
            raise ValueError(f'--gsm8k {gsm8k}, line {number}: expected "question" and "answer"')
        lines.append(json.dumps({"text": f"Question: {record['question']}{_ANSWER} {record['answer']}"}))
    target.write_text("\n".join(lines) + "\n", encoding="utf-8")


def prepare(domain: str, folder: Path, size: Size, gsm8k: Path | None) -> None:
    """Tokenizer, `corpus.bin/.idx`, `prompts.jsonl` in `folder`; what is there is made again."""
    from bebop_megatron.data.build import build
    from bebop_megatron.data.documents import first_bytes, read_documents
    from bebop_megatron.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

    folder.mkdir(parents=True, exist_ok=True)
    source = "stdlib"
    if domain == MATH:
        assert gsm8k is not None
        _math_texts(gsm8k, folder / "gsm8k.jsonl")
        source = str(folder / "gsm8k.jsonl")

    def documents() -> Any:
        found = read_documents([source])
        return found if size.corpus_bytes is None else first_bytes(found, size.corpus_bytes)

    tokenizer = train_tokenizer(documents(), vocab_size=size.vocab_size)
    save_tokenizer(tokenizer, str(folder / "tokenizer"))
    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    build(documents(), tokenizer, str(folder / "corpus"), holdout=size.holdout, overwrite=True)
    texts = [json.loads(line)["text"] for line in (folder / "corpus-holdout.jsonl").read_text().splitlines()]
    prompts = _questions(texts, tokenizer) if domain == MATH else _windows(texts, tokenizer, size)
    chosen = _spread(prompts, size.prompts)
    (folder / "prompts.jsonl").write_text("".join(json.dumps({"tokens": tokens}) + "\n" for tokens in chosen))


def _questions(texts: list[str], tokenizer: Any) -> list[list[int]]:
    questions = [text.partition(_ANSWER)[0] + _ANSWER for text in texts]
    return tokenizer(questions, add_special_tokens=False, verbose=False)["input_ids"]


def _windows(texts: list[str], tokenizer: Any, size: Size) -> list[list[int]]:
    """Stretches of held-out documents that do not overlap, continuations included."""
    out, stride = [], size.prompt_tokens + size.new_tokens
    for tokens in tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]:
        starts = range(0, len(tokens) - size.prompt_tokens + 1, stride)
        out += [tokens[start : start + size.prompt_tokens] for start in starts]
    return out


def _spread(prompts: list[list[int]], count: int) -> list[list[int]]:
    """`count` of them, evenly over all.

    Raises:
        ValueError: there are fewer.
    """
    if len(prompts) < count:
        raise ValueError(f"the held-out text gives {len(prompts)} prompts, the study wants {count}: hold out more")
    return [prompts[index * len(prompts) // count] for index in range(count)]


def build_own(folder: Path, sequences: list[list[int]], vocab_size: int) -> None:
    """`own.bin/.idx` of token sequences that the backbone sampled, as they are: text would be cut up otherwise."""
    import numpy as np
    from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    builder = IndexedDatasetBuilder(str(folder / "own.bin.partial"), dtype=DType.optimal_dtype(vocab_size))
    for tokens in sequences:
        builder.add_document(np.array(tokens), [len(tokens)])  # pyright: ignore[reportArgumentType]
    (folder / "own.idx").unlink(missing_ok=True)
    builder.finalize(str(folder / "own.idx.partial"))
    (folder / "own.bin.partial").replace(folder / "own.bin")
    (folder / "own.idx.partial").replace(folder / "own.idx")
