"""What a distributed checkpoint of Megatron holds, read on one process."""

from __future__ import annotations

from pathlib import Path

import torch


def saved_tensors(folder: Path, *, optimizer: bool = False) -> dict[str, torch.Tensor]:
    """Every tensor of the checkpoint of one iteration, by its name in the file; those of the optimizer if asked for."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata
    from torch.distributed.checkpoint.state_dict_loader import load

    reader = FileSystemReader(folder)
    state = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in reader.read_metadata().state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata) and (optimizer or not name.startswith("optimizer."))
    }
    load(state, storage_reader=reader, no_dist=True)
    return state
