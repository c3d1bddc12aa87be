"""Documents as token ids with their loss mask.

mask[i] says whether token i may be a *target*. The dataset shifts the mask together with the labels, so that
loss_mask[i] says whether labels[i] may be a target.

Every segment is tokenised on its own: the boundary between prompt and answer then lies where it lies when a
model is prompted and goes on by itself, and no token straddles it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import batched
from typing import Any

import numpy as np

from bebop_megatron.data.documents import Chat, Document, Text
from bebop_megatron.data.segments import Segment, Segmenter
from bebop_megatron.data.tokenizer import beginning_of_sequence

# enough to keep the tokenizer's threads busy, little enough to hold in memory
_BATCH_DOCUMENTS = 256


@dataclass(frozen=True)
class Encoded:
    """A document, its tokens [n] and mask [n] uint8; the last token is the tokenizer's end of sequence."""

    document: Document
    segments: list[Segment]
    tokens: np.ndarray
    mask: np.ndarray


def encode(documents: Iterable[Document], tokenizer: Any) -> Iterator[Encoded]:
    """Every document in order, tokenised in batches.

    Raises:
        ValueError: a chat that cannot be rendered; a prompt with a tokenizer that cannot tokenise it apart.
    """
    segmenter = Segmenter(tokenizer)
    start = beginning_of_sequence(tokenizer)
    checked = False
    for batch in batched(documents, _BATCH_DOCUMENTS):
        cut = [segmenter(document) for document in batch]
        if not checked and any(len(segments) > 1 for segments in cut):
            _check_joins(tokenizer)
            checked = True
        ids = iter(_ids([segment.text for segments in cut for segment in segments], tokenizer))
        for document, segments in zip(batch, cut, strict=True):
            pieces = [(next(ids), segment.is_target) for segment in segments]
            if not isinstance(document, Chat):
                # a chat template writes the beginning of sequence itself
                pieces.insert(0, (start, isinstance(document, Text)))
            if not pieces[-1][0] or pieces[-1][0][-1] != tokenizer.eos_token_id:
                # behind a turn that has its own end, no model says another
                is_target = segments[-1].is_target and not (
                    isinstance(document, Chat) and segmenter.ends_turn(segments[-1].text)
                )
                pieces.append(([tokenizer.eos_token_id], is_target))
            tokens, mask = _concatenate(pieces)
            yield Encoded(document, segments, tokens, mask)


def padded(encoded: Encoded, length: int, pad: int) -> Encoded:
    """The document with exactly `length` tokens; what is added is no target.

    Raises:
        ValueError: it has more.
    """
    missing = length - len(encoded.tokens)
    if missing < 0:
        raise ValueError(
            f"{encoded.document.source} has {len(encoded.tokens)} tokens, more than the {length} that every document "
            "is padded to: allow more, or shorten it"
        )
    tokens = np.pad(encoded.tokens, (0, missing), constant_values=pad)
    return replace(encoded, tokens=tokens, mask=np.pad(encoded.mask, (0, missing)))


def _ids(texts: list[str], tokenizer: Any) -> list[list[int]]:
    return tokenizer(
        texts,
        add_special_tokens=False,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )["input_ids"]


def _concatenate(pieces: list[tuple[list[int], bool]]) -> tuple[np.ndarray, np.ndarray]:
    tokens = np.concatenate([np.array(ids, dtype=np.int64) for ids, _ in pieces])
    mask = np.concatenate([np.full(len(ids), is_target, dtype=np.uint8) for ids, is_target in pieces])
    return tokens, mask


def _check_joins(tokenizer: Any) -> None:
    first, second = _ids(["left", "right"], tokenizer)
    joined = tokenizer.decode([*first, *second])
    if joined != "leftright":
        raise ValueError(
            f"the tokenizer {tokenizer.name_or_path} turns 'left' and 'right', tokenised apart, into "
            f"{joined!r}: it adds to every piece, so a prompt cannot be told from its completion; "
            "use a byte-level tokenizer, or save this one with add_prefix_space=False (or legacy=False)"
        )
