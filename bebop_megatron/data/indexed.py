"""Whether Megatron's .bin and .idx belong together, read from the index alone: Megatron finds out at the last token."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
# Megatron's codes of token types -> bytes
_SIZES = {1: 1, 2: 1, 3: 2, 4: 4, 5: 8, 6: 8, 7: 4, 8: 2}


def require_whole_pair(prefix: str) -> None:
    """See that `prefix.idx` is a whole index and that `prefix.bin` has the tokens it promises.

    Raises:
        ValueError: either is damaged, cut short, or of another build.
    """
    index, tokens = Path(prefix + ".idx"), Path(prefix + ".bin")
    size = index.stat().st_size
    with index.open("rb") as file:
        start = file.read(_HEADER.size)
    magic, _, kind, sequences, documents = _HEADER.unpack(start.ljust(_HEADER.size, b"\0"))
    if magic != _MAGIC or kind not in _SIZES:
        raise ValueError(f"{index} is not an index of Megatron's, or is damaged: build the data again")
    needed = _HEADER.size + 12 * sequences + 8 * documents
    if size < needed:
        raise ValueError(f"{index} has {size:,} bytes of {needed:,}: it was cut short, build the data again")
    if not sequences:
        raise ValueError(f"{index} holds no documents: nothing to train on")
    lengths = np.memmap(index, np.int32, "r", _HEADER.size, (sequences,))
    starts = np.memmap(index, np.int64, "r", _HEADER.size + 4 * sequences, (sequences,))
    end = int(starts[-1]) + int(lengths[-1]) * _SIZES[kind]
    if tokens.stat().st_size != end:
        raise ValueError(
            f"{tokens} has {tokens.stat().st_size:,} bytes, its index says {end:,}: cut short, or of another build"
        )
