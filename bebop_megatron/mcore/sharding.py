"""A micro-batch as the model of one context-parallel rank wants it: its part of the rows, in Megatron's packed form."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from bebop_megatron.alignment import ContextShard
from bebop_megatron.mcore.targets import document_bounds

_SEQUENCE_DIM = {"tokens": 1, "labels": 1, "loss_mask": 1, "position_ids": 1, "attention_mask": 2}
_FLAT = ("tokens", "labels", "loss_mask", "position_ids")


def pack(batch: dict[str, Any]) -> tuple[dict[str, Any], PackedSeqParams | None]:
    """Samples of packed documents as one flat row, and where its documents lie.

    Shape: tokens and the like [b, s], `cu_seqlens` [b, documents + 1] -> [1, b * s]. With `cu_seqlens_padded` that is
    where the rows lie, and `cu_seqlens` counts true lengths. Rows may be filled up to equal length: empty documents
    are dropped. A batch without `cu_seqlens` comes back as it is, with None.

    Raises:
        ValueError: documents that do not cover their samples.
    """
    real = batch.get("cu_seqlens")
    if real is None:
        return batch, None
    padded = real if batch.get("cu_seqlens_padded") is None else batch["cu_seqlens_padded"]
    room = padded.diff(dim=1)
    exists = room > 0
    rows = _flat(room[exists])
    true = None
    if padded is not real:
        true = _flat(torch.minimum(real.diff(dim=1), room)[exists])
    flat = dict(batch)
    for key in _FLAT:
        value = batch.get(key)
        if value is None:
            continue
        flat[key] = value.reshape(1, -1)
        if value.numel() != int(rows[-1]):
            raise ValueError(
                f"cu_seqlens covers {int(rows[-1])} positions of packed samples, but {key} has {value.numel()}: "
                "the last document must reach to the end of its sample"
            )
    longest = int(rows.diff().max())
    return flat, PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=rows if true is None else true,
        cu_seqlens_kv=rows if true is None else true,
        cu_seqlens_q_padded=None if true is None else rows,
        cu_seqlens_kv_padded=None if true is None else rows,
        # rotary tables must reach over the padding, too
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def _flat(lengths: Tensor) -> Tensor:
    """Lengths [documents] to cumulative lengths [documents + 1] int32, as attention kernels take them."""
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()


def shard(batch: dict[str, Any], packed: PackedSeqParams | None, group: Any, layout: str = "zigzag") -> dict[str, Any]:
    """This rank's rows of whole sequences: [b, s] -> [b, s/cp].

    Raises:
        ValueError: sequences or packed documents that cannot be cut evenly over the ranks.
    """
    size = group.size()
    present = [key for key in _SEQUENCE_DIM if batch.get(key) is not None]
    if size == 1 or not present:
        return batch
    first = batch[present[0]]
    bounds = document_bounds(packed)[0]
    cut = ContextShard.of(first.shape[_SEQUENCE_DIM[present[0]]], bounds, size, group.rank(), layout, first.device)
    if bool((cut.bounds % (cut.pieces * size)).any()) or int(cut.bounds[-1]) != cut.length:
        what = "the sequence" if bounds is None or layout == "contiguous" else "every packed document"
        raise ValueError(
            f"context parallelism over {size} ranks cuts {what} into {cut.pieces * size} parts: pad to a multiple of "
            f"that length (cumulative lengths are {cut.bounds.tolist()[:16]}, {cut.length} rows in all)"
        )
    positions = cut.positions()
    return {k: v.index_select(_SEQUENCE_DIM[k], positions) if k in present else v for k, v in batch.items()}
