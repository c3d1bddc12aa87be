"""A small tokenizer, and Megatron's own builder around our dataset."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from bebop_megatron.data.documents import read_documents
from bebop_megatron.data.tokenizer import load_tokenizer, save_tokenizer, train_tokenizer

VOCAB_SIZE = 400


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    sources = sorted(str(file) for file in Path(json.__file__).parent.glob("*.py"))
    save_tokenizer(train_tokenizer(read_documents(sources), vocab_size=VOCAB_SIZE), folder)
    return folder


@pytest.fixture
def tokenizer(tokenizer_folder: str) -> Any:
    """Of one test: it may set another chat template."""
    return load_tokenizer(tokenizer_folder)


@pytest.fixture
def write_jsonl(tmp_path: Path) -> Callable[..., str]:
    def write(records: Iterable[dict[str, Any]], name: str = "records.jsonl") -> str:
        file = tmp_path / name
        file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
        return str(file)

    return write


@pytest.fixture
def interrupt_moves(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """From now on so many files are moved into place; the next one is interrupted, as by Ctrl-C."""

    def interrupt(after: int) -> None:
        replace, calls = Path.replace, []

        def interrupted(self: Path, target: Path) -> Path:
            if len(calls) == after:
                raise KeyboardInterrupt
            calls.append(target)
            return replace(self, target)

        monkeypatch.setattr(Path, "replace", interrupted)

    return interrupt


@pytest.fixture
def chats() -> list[dict[str, Any]]:
    """Twelve conversations of one to three turns; every assistant word is in capitals, no other is."""
    records = []
    for number in range(12):
        messages = [{"role": "system", "content": f"you are system {number}"}] if number % 3 == 0 else []
        for turn in range(1 + number % 3):
            messages.append({"role": "user", "content": f"question {turn} of chat {number}?\nmore"})
            messages.append({"role": "assistant", "content": f"ANSWER {turn}\n OF CHAT {number} ÄÖ!"})
        records.append({"messages": messages})
    return records
