"""Reads prompts from a file, one per line, and encodes them as training data is encoded."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.data.tokenizer import beginning_of_sequence

_TEXT_KEYS = ("prompt", "text")


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, and as what it was read from: text, the messages of a conversation, or neither."""

    tokens: list[int]
    text: str | None = None
    messages: list[dict[str, Any]] | None = None


def _record(line: str, where: str) -> str | list[int] | list[dict[str, Any]]:
    """The text, the messages or the token ids of one line of JSON."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not JSON: {error}") from error
    if isinstance(record, dict):
        tokens = record.get("tokens")
        if isinstance(tokens, list) and tokens and all(type(token) is int for token in tokens):
            return tokens
        messages = record.get("messages")
        if isinstance(messages, list) and messages and all(isinstance(message, dict) for message in messages):
            return messages
        for key in _TEXT_KEYS:
            if isinstance(record.get(key), str):
                return record[key]
    raise ValueError(
        f'{where} has neither "prompt" or "text" with a string nor "messages" nor "tokens" with a list of ids: '
        f"{line[:60]!r}"
    )


def _encode(text: str, tokenizer: Any) -> list[int]:
    """As training data is encoded: a beginning of sequence where the tokenizer sets one by itself."""
    start = beginning_of_sequence(tokenizer)
    tokens = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    # a rendered chat brings its own
    return tokens if not text or tokens[: len(start)] == start else start + tokens


def _cut(text: str, tokens: list[int], size: int, tokenizer: Any) -> Prompt:
    """The first `size` tokens, or a few less where they would end inside a character."""
    start = beginning_of_sequence(tokenizer)
    skipped = len(start) if tokens[: len(start)] == start and not text.startswith(tokenizer.decode(start)) else 0
    while size > skipped + 1 and not text.startswith(tokenizer.decode(tokens[skipped:size])):
        size -= 1
    return Prompt(tokens[:size], tokenizer.decode(tokens[skipped:size]))


def _chat(messages: list[dict[str, Any]], tokenizer: Any, where: str) -> Prompt:
    """A conversation up to where the assistant is to answer; a last answer of the assistant is taken away."""
    if messages[-1].get("role") == "assistant":
        messages = messages[:-1]
    if not messages or not getattr(tokenizer, "chat_template", None):
        problem = "asks nothing" if not messages else "needs a tokenizer with a chat template"
        raise ValueError(f"{where}: the conversation {problem}")
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    return Prompt(_encode(text, tokenizer), text, messages)


def read_prompts(path: str, tokenizer: Any | None, prompt_tokens: int = 0) -> list[list[int]]:
    """Token ids of every prompt, cut to `prompt_tokens` (0: whole prompts); empty ones are left out.

    `.jsonl`: objects with "prompt" or "text", with "messages", or with "tokens", which need no tokenizer.
    Anything else: one prompt per line.

    Raises:
        ValueError: no such file, a bad line (with its number), text without a tokenizer, no prompts.
    """
    return [prompt.tokens[: prompt_tokens or None] for prompt in read_prompt_records(path, tokenizer)]


def read_prompt_records(path: str, tokenizer: Any | None, prompt_tokens: int = 0) -> list[Prompt]:
    """As `read_prompts`, with the texts; a text cut to `prompt_tokens` ends with a whole character.

    Raises:
        ValueError: as `read_prompts`; a conversation that would have to be cut.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--prompts {path}: no such file")
    prompts = []
    try:
        lines = file.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompts {file} is not UTF-8 text: {error}") from error
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        content = _record(line, where) if file.suffix == ".jsonl" else line
        prompt = _prompt(content, tokenizer, where)
        if prompt_tokens and len(prompt.tokens) > prompt_tokens:
            if prompt.messages is not None:
                raise ValueError(f"{where}: a conversation cannot be cut to {prompt_tokens} tokens; leave out the cut")
            if prompt.text is None:
                prompt = Prompt(prompt.tokens[:prompt_tokens])
            else:
                prompt = _cut(prompt.text, prompt.tokens, prompt_tokens, tokenizer)
        if prompt.tokens:
            prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} holds no prompts")
    return prompts


def _prompt(content: Any, tokenizer: Any | None, where: str) -> Prompt:
    if isinstance(content, list) and isinstance(content[0], int):
        return Prompt(content)
    if tokenizer is None:
        raise ValueError(f"{where} is text: add --tokenizer")
    if isinstance(content, list):
        return _chat(content, tokenizer, where)
    return Prompt(_encode(content, tokenizer), content)
