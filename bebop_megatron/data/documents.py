"""Documents of the inputs: files and JSON lines become `Text`, `Completion` or `Chat`; bad lines are named.

No tokens here: a document is what the user wrote, and where.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.data.stdlib import stdlib_files

FORMATS = ("auto", "text", "code", "jsonl")
STDLIB = "stdlib"

# a byte order mark is no text
_ENCODING = "utf-8-sig"

_TEXT_SUFFIXES = frozenset((".txt", ".md", ".rst"))
_CODE_SUFFIXES = frozenset(
    (
        ".py",
        ".pyi",
        ".c",
        ".cc",
        ".cpp",
        ".h",
        ".hpp",
        ".cu",
        ".cuh",
        ".go",
        ".java",
        ".js",
        ".ts",
        ".rs",
        ".sh",
    )
)
_SUFFIXES = {
    "text": _TEXT_SUFFIXES,
    "code": _CODE_SUFFIXES,
    "jsonl": frozenset((".jsonl",)),
    "auto": _TEXT_SUFFIXES | _CODE_SUFFIXES | {".jsonl"},
}


@dataclass(frozen=True)
class Text:
    """Every token is a target."""

    text: str
    source: str

    def identity(self) -> str:
        """What must not be both trained on and held out; as for the other kinds."""
        return self.text

    def strings(self) -> list[str]:
        """All of its text, to count or to train a tokenizer on; as for the other kinds."""
        return [self.text]


@dataclass(frozen=True)
class Completion:
    """Only the completion, and the end of the document, are targets."""

    prompt: str
    completion: str
    source: str

    def identity(self) -> str:
        """The prompt: other answers to it go where this one goes."""
        return self.prompt or self.completion

    def strings(self) -> list[str]:
        return [self.prompt, self.completion]


@dataclass(frozen=True)
class Chat:
    """Only the assistant's turns are targets."""

    messages: list[dict[str, Any]]
    tools: list[Any] | None
    source: str

    def identity(self) -> str:
        """The messages through the user's first: other continuations go where this one goes."""
        users = (number for number, message in enumerate(self.messages, 1) if message["role"] == "user")
        return json.dumps(self.messages[: next(users, None)], sort_keys=True)

    def strings(self) -> list[str]:
        contents = (message.get("content") for message in self.messages)
        return [content for content in contents if isinstance(content, str)]


type Document = Text | Completion | Chat


def parse_keys(assignments: str | None) -> dict[str, str]:
    """`"prompt=question,completion=answer"` as a mapping from our names to the file's.

    Raises:
        ValueError: a name that we don't read, or no `=`.
    """
    known = ("text", "prompt", "completion", "messages", "tools")
    keys = {}
    for assignment in filter(None, (assignments or "").split(",")):
        name, equals, theirs = (part.strip() for part in assignment.partition("="))
        if not equals or not theirs or name not in known:
            raise ValueError(
                f"--keys: expected NAME=KEY with NAME one of {', '.join(known)}, got {assignment!r}; "
                "for example --keys prompt=question,completion=answer"
            )
        keys[name] = theirs
    return keys


def read_documents(
    inputs: Sequence[str], *, format: str = "auto", keys: Mapping[str, str] | None = None, separator: str = ""
) -> Iterator[Document]:
    """Documents of all inputs in order; empty files and texts are left out.

    An input is `stdlib`, a file, or a folder, of which the files with a suffix of `format` are read in
    sorted order. A text or code file is one document; a `.jsonl` file holds one per line, whose fields may
    have other names (`keys`). `separator` goes behind every prompt, and is part of it.

    Raises:
        ValueError: a missing input, a folder without matching files, a line that is no document, `keys` or a
            separator without JSON lines.
    """
    if format not in FORMATS:
        raise ValueError(f"--format {format!r} is unknown; choose from {', '.join(FORMATS)}")
    files = [(file, name) for name in inputs for file in input_files([name], format)]
    # before anything is read: a large input takes long
    if (keys or separator) and not any(_is_jsonl(file, format) for file, _ in files):
        raise ValueError(
            "--keys and --separator are for JSON lines, but --input names none; "
            "leave them out, or pass --format jsonl if the files have another suffix"
        )
    for file, name in files:
        if _is_jsonl(file, format):
            yield from _read_jsonl(file, keys or {}, separator)
        else:
            yield from _read_source(file, strict=name != STDLIB)


def first_bytes(documents: Iterable[Document], limit: int) -> Iterator[Document]:
    """Whole documents from the front while their texts fit into `limit` bytes of UTF-8.

    Raises:
        ValueError: a limit below one, or one that leaves not even the first document.
    """
    if limit < 1:
        raise ValueError(f"--max-bytes must be at least 1, got {limit}")
    size = 0
    for document in documents:
        previous, size = size, size + sum(len(text.encode()) for text in document.strings())
        if size > limit:
            if not previous:
                raise ValueError(
                    f"--max-bytes {limit:,}: the first document, {document.source}, has {size:,} bytes already; "
                    "allow more"
                )
            return
        yield document


def input_files(inputs: Sequence[str], format: str) -> list[Path]:
    """Every file to be read, in this order.

    Raises:
        ValueError: a missing input, a folder without files of this format.
    """
    return [file for name in inputs for file in (stdlib_files() if name == STDLIB else _files(Path(name), format))]


def _is_jsonl(file: Path, format: str) -> bool:
    return format == "jsonl" or (format == "auto" and file.suffix == ".jsonl")


def _files(path: Path, format: str) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ValueError(f"--input {path}: no such file or folder")
    # hidden folders hold version control and caches, not a corpus
    files = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in _SUFFIXES[format]
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not files:
        raise ValueError(
            f"--input {path}: the folder holds no file that --format {format} reads "
            f"({' '.join(sorted(_SUFFIXES[format]))}); name the files themselves, or choose another --format"
        )
    return files


def _read_source(file: Path, *, strict: bool) -> Iterator[Text]:
    try:
        text = file.read_text(encoding=_ENCODING)
    except UnicodeDecodeError as error:
        if strict:
            raise ValueError(f"--input {file} is not UTF-8 text: {error}") from error
        return
    if text.strip():
        yield Text(text, str(file))


def _read_jsonl(file: Path, keys: Mapping[str, str], separator: str) -> Iterator[Document]:
    # bytes: a line ends at a line feed only, and one that is not UTF-8 has a number too
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            source = f"{file}, line {number}"
            try:
                record = json.loads(line.decode(_ENCODING))
                if b"\\ud" in line.lower():
                    # half a surrogate pair is valid JSON, but no text
                    json.dumps(record, ensure_ascii=False).encode()
            except UnicodeError as error:
                raise ValueError(f"{source} is not UTF-8: {error}") from error
            except json.JSONDecodeError as error:
                raise ValueError(f"{source} is not JSON: {error}; got {line[:60]!r}") from error
            document = _document(record, keys, separator, source)
            if not isinstance(document, Text) or document.text.strip():
                yield document


def _document(record: Any, keys: Mapping[str, str], separator: str, source: str) -> Document:
    if not isinstance(record, dict):
        raise ValueError(f"{source} must hold a JSON object, got {json.dumps(record)[:60]}")

    def value(name: str, kind: type) -> Any:
        key = keys.get(name, name)
        if key not in record:
            raise ValueError(
                f'{source} has no "{key}" (its keys: {", ".join(sorted(record)) or "none"}); '
                f"if {name} has another name there, pass --keys {name}=THAT_NAME"
            )
        if not isinstance(record[key], kind):
            expected = "a string" if kind is str else "a list"
            raise ValueError(
                f'{source}: "{key}" must be {expected}, got {type(record[key]).__name__} {json.dumps(record[key])[:60]}'
            )
        return record[key]

    def has(name: str) -> bool:
        # a key that the user named is a promise: its absence is an error, not another kind of document
        return name in keys or name in record

    if has("messages"):
        messages = value("messages", list)
        for message in messages:
            if not isinstance(message, dict) or not isinstance(message.get("role"), str):
                raise ValueError(
                    f'{source}: every message must be an object with a "role", got {json.dumps(message)[:60]}'
                )
        if not any(message["role"] == "assistant" for message in messages):
            raise ValueError(
                f"{source}: no message has the role assistant, so there is nothing to train on; remove the line"
            )
        return Chat(messages, value("tools", list) if has("tools") else None, source)
    if has("prompt") or has("completion"):
        prompt, completion = value("prompt", str), value("completion", str)
        if not completion:
            raise ValueError(f"{source}: the completion is empty, so there is nothing to train on; remove the line")
        return Completion(prompt + separator, completion, source)
    if has("text"):
        return Text(value("text", str), source)
    raise ValueError(
        f'{source} has neither "text" nor "prompt" and "completion" nor "messages" '
        f"(its keys: {', '.join(sorted(record)) or 'none'}); name them with --keys, "
        "for example --keys prompt=question,completion=answer"
    )
