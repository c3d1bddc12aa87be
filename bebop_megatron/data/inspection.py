"""Shows what a prefix holds, with the parts of a document that are no targets visible."""

from __future__ import annotations

from itertools import groupby
from typing import Any

import numpy as np

from bebop_megatron.data.build import MASK_SUFFIX
from bebop_megatron.data.description import read_description
from bebop_megatron.data.indexed import require_whole_pair

# not in any alphabet that a corpus is likely to use
MASKED_OPEN, MASKED_CLOSE = "⟦", "⟧"

_DESCRIBED = ("format", "tokenizer", "vocab_size")


def inspect(prefix: str, tokenizer: Any, *, document: int = 0, max_tokens: int = 400) -> str:
    """Counts of the whole prefix, and one document decoded: what stands in ⟦ ⟧ is read but not trained on.

    Raises:
        ValueError: nothing at the prefix, no such document, a mask of other documents.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    if not IndexedDataset.exists(prefix):
        raise ValueError(f"{prefix}.bin and {prefix}.idx are not both there; pass the prefix without a suffix")
    require_whole_pair(prefix)
    tokens = IndexedDataset(prefix)
    if not 0 <= document < len(tokens):
        raise ValueError(f"--document must be 0 to {len(tokens) - 1}, got {document}")
    has_mask = IndexedDataset.exists(prefix + MASK_SUFFIX)
    if has_mask:
        require_whole_pair(prefix + MASK_SUFFIX)
    mask = IndexedDataset(prefix + MASK_SUFFIX) if has_mask else None
    if mask is not None and not np.array_equal(mask.sequence_lengths, tokens.sequence_lengths):
        raise ValueError(f"{prefix}{MASK_SUFFIX} has other documents than {prefix}; build both again")

    description = read_description(prefix)
    num_tokens = int(tokens.sequence_lengths.sum(dtype=np.int64))
    num_targets = num_tokens
    if mask is not None:
        num_targets = int(np.memmap(f"{prefix}{MASK_SUFFIX}.bin", dtype=np.uint8).sum(dtype=np.int64))
    ids = np.asarray(tokens[document])
    is_target = np.ones(len(ids)) if mask is None else np.asarray(mask[document])
    lines = [
        f"{'documents':<14}{len(tokens):,}",
        f"{'tokens':<14}{num_tokens:,}",
        f"{'targets':<14}{num_targets:,} ({num_targets / max(1, num_tokens):.1%})",
        f"{'mask':<14}{prefix + MASK_SUFFIX if has_mask else 'none: every token is a target'}",
        *(f"{name:<14}{getattr(description, name)}" for name in _DESCRIBED if description),
        "",
        f"document {document}, {len(ids):,} tokens; {MASKED_OPEN}not a target{MASKED_CLOSE}",
        _marked(ids[:max_tokens], is_target[:max_tokens], tokenizer) + ("…" if len(ids) > max_tokens else ""),
    ]
    return "\n".join(lines)


def _marked(ids: np.ndarray, is_target: np.ndarray, tokenizer: Any) -> str:
    parts = []
    for kept, run in groupby(zip(ids.tolist(), is_target.tolist(), strict=True), key=lambda pair: bool(pair[1])):
        text = tokenizer.decode([token for token, _ in run], clean_up_tokenization_spaces=False)
        parts.append(text if kept else f"{MASKED_OPEN}{text}{MASKED_CLOSE}")
    return "".join(parts)
