"""Megatron's dataset of packed conversations (`--sft`), read from JSON lines without another package."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from megatron.training.datasets.sft_dataset import SFTDataset


class Conversations:
    """Lines of a file, each `{"messages": [{"role": ..., "content": ...}, ...]}`; only their offsets are in memory.

    Raises:
        ValueError: a line that is not of this form, when it is read.
    """

    def __init__(self, path: str) -> None:
        self._path = Path(path)
        offsets, here = [], 0
        with self._path.open("rb") as lines:
            for line in lines:
                if line.strip():
                    offsets.append(here)
                here += len(line)
        self._offsets = np.array(offsets, dtype=np.int64)

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, index: int) -> list[dict[str, Any]]:
        # opened each time: the loader's worker processes would share one position in the file
        with self._path.open("rb") as lines:
            lines.seek(int(self._offsets[index]))
            try:
                return json.loads(lines.readline())["messages"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(
                    f'{self._path}: conversation {index} is not a JSON object with "messages" ({error})'
                ) from error


class ConversationDataset(SFTDataset):
    """Conversations packed into samples of the sequence length, with `cu_seqlens`."""

    @staticmethod
    def build_low_level_dataset(dataset_path: str, config: Any) -> Any:
        return Conversations(dataset_path)
