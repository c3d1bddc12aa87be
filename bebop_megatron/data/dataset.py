"""Megatron's GPT dataset with a loss mask beside the tokens.

In PREFIX_mask, mask[i] says whether token i may be a target. It is shifted together with the labels:
loss_mask[i] says whether labels[i] may be a target.
"""

from __future__ import annotations

import copy
import zlib
from typing import Any, cast

import numpy as np
import torch
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
from megatron.core.datasets.indexed_dataset import IndexedDataset

from bebop_megatron.data.build import MASK_SUFFIX
from bebop_megatron.data.description import read_description


class MaskedGPTDataset(GPTDataset):
    """`GPTDataset` that trains on the targets of PREFIX_mask only; without such a file it is a `GPTDataset`.

    Raises:
        ValueError: a mask of other documents, or none where the description of the data says there is one.
    """

    config: GPTDatasetConfig

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        masks = _open_mask(cast(IndexedDataset, self.dataset), self.config)
        self._masks = None
        if masks is not None:
            # a view of this dataset with the same indices, whose "text" is the mask, padded with zeros
            self._masks = copy.copy(self)
            self._masks.dataset = masks
            self._masks._pad_token_id = 0

    def _build_document_sample_shuffle_indices(self) -> Any:
        # Megatron caches the order of samples by path and settings; the lengths tell new data from old
        lengths = zlib.crc32(cast(IndexedDataset, self.dataset).sequence_lengths)
        self.unique_description_hash = f"{self.unique_description_hash}-{lengths:08x}"
        return super()._build_document_sample_shuffle_indices()

    def __getitem__(self, idx: int | None) -> dict[str, torch.Tensor]:
        sample = super().__getitem__(idx)
        if self._masks is None:
            return sample
        text, _, _ = self._masks._query_document_sample_shuffle_indices(0 if idx is None else idx)
        mask = torch.from_numpy(text)[1:]
        if not self.config.add_extra_token_to_sequence:
            # the last label is padding
            mask = torch.nn.functional.pad(mask, (0, 1))
        # out of place: the base class keeps its loss mask for the next sample
        sample["loss_mask"] = sample["loss_mask"] * mask
        return sample


def _open_mask(tokens: IndexedDataset, config: GPTDatasetConfig) -> IndexedDataset | None:
    prefix = tokens.path_prefix
    path = prefix + MASK_SUFFIX
    if not IndexedDataset.exists(path):
        description = read_description(prefix)
        if description and description.has_mask:
            raise ValueError(
                f"{prefix}.json says that some tokens are no targets, but {path}.bin and {path}.idx are not "
                "both there: prompts would be trained on. Copy them beside the data, or build it again"
            )
        return None
    config = copy.copy(config)
    # its counts and its type belong to the tokens
    config.sequences_per_dataset = None
    masks = GPTDataset.build_low_level_dataset(path, config)
    if not np.array_equal(masks.sequence_lengths, tokens.sequence_lengths):
        raise ValueError(
            f"{path} holds {_size(masks)}, {prefix} {_size(tokens)}: every document must have the same "
            "length in both. The mask belongs to other data; build both again"
        )
    return masks


def _size(data: IndexedDataset) -> str:
    return f"{len(data):,} documents with {int(data.sequence_lengths.sum(dtype=np.int64)):,} tokens"
