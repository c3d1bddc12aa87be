"""PREFIX.json: what the files of a prefix hold, and with which tokenizer they were made."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

# ours has some hundred bytes; raw data of the same name is not to be read whole
_MAX_BYTES = 65_536


@dataclass(frozen=True)
class Description:
    """What a prefix holds."""

    documents: int
    tokens: int
    target_tokens: int
    vocab_size: int
    tokenizer: str
    tokenizer_hash: str
    format: str
    has_mask: bool


def write_description(description: Description, prefix: str | Path) -> None:
    """Write PREFIX.json."""
    text = json.dumps(vars(description), indent=2) + "\n"
    Path(f"{prefix}.json").write_text(text, encoding="utf-8")


def read_description(prefix: str | Path) -> Description | None:
    """PREFIX.json, or None where there is no such file or another tool's."""
    file = Path(f"{prefix}.json")
    if not file.is_file() or file.stat().st_size > _MAX_BYTES:
        return None
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return Description(**{field.name: content[field.name] for field in fields(Description)})
    except (ValueError, KeyError, TypeError):
        return None
