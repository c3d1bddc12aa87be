"""A data file of random documents whose first half is a prompt, which is no target."""

from __future__ import annotations

from pathlib import Path

import numpy as np


def write_prompts(prefix: Path, vocab_size: int, documents: int = 60, length: int = 48) -> None:
    """Write PREFIX.bin/.idx and PREFIX_mask.bin/.idx."""
    import torch
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    from bebop_megatron.data.build import MASK_SUFFIX

    generator = np.random.default_rng(5)
    parts = {
        str(prefix): (np.uint16, generator.integers(0, vocab_size, (documents, length))),
        f"{prefix}{MASK_SUFFIX}": (np.uint8, np.tile(np.arange(length) >= length // 2, (documents, 1))),
    }
    for path, (kind, rows) in parts.items():
        builder = IndexedDatasetBuilder(f"{path}.bin", dtype=kind)
        for row in rows:
            builder.add_document(torch.from_numpy(row.astype(np.int64)), [length])
        builder.finalize(f"{path}.idx")
