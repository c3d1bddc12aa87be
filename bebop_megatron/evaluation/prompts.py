"""Reads prompts from a file, one per line, and encodes them as training data is encoded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_TEXT_KEYS = ("prompt", "text")


def _record(line: str, where: str) -> str | list[int]:
    """The text or the token ids of one line of JSON."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(record, dict):
        tokens = record.get("tokens")
        if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
            return tokens
        for key in _TEXT_KEYS:
            if isinstance(record.get(key), str):
                return record[key]
    raise ValueError(
        f'{where} has neither "prompt" or "text" with a string nor "tokens" with a list of ids: {line[:60]!r}'
    )


def _encode(text: str, tokenizer: Any) -> list[int]:
    """As training data is encoded: a beginning of sequence where the tokenizer sets one by itself."""
    start = [token for token in tokenizer("")["input_ids"] if token == tokenizer.bos_token_id]
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    # a rendered chat brings its own
    return tokens if not text or tokens[: len(start)] == start else start + tokens


def read_prompts(path: str, tokenizer: Any | None, prompt_tokens: int = 0) -> list[list[int]]:
    """Token ids of every prompt, cut to `prompt_tokens` (0: whole prompts); empty ones are left out.

    `.jsonl`: objects with "prompt" or "text", or with "tokens", which need no tokenizer. Anything else: one
    prompt per line.

    Raises:
        ValueError: no such file, a bad line (with its number), text without a tokenizer, no prompts.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--prompts {path}: no such file")
    prompts = []
    for number, line in enumerate(file.read_text(encoding="utf-8").split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        content = _record(line, where) if file.suffix == ".jsonl" else line
        if isinstance(content, str):
            if tokenizer is None:
                raise ValueError(f"{where} is text: add --tokenizer")
            content = _encode(content, tokenizer)
        if prompt_tokens:
            content = content[:prompt_tokens]
        if content:
            prompts.append(content)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts
