"""Where a rank's anchors are in the whole sequence, and where their documents start: what a draft may attend to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bebop_megatron.alignment import ContextShard
from bebop_megatron.mcore.targets import document_bounds


@dataclass(frozen=True)
class Anchors:
    """The anchors of one context-parallel rank, in the order it holds them.

    Shape: position [s] int64, ascending, in the whole (packed) sequence of S tokens; first [s] int64, where the
    anchor's document starts; order [S] int64 or None, what puts the rows of all ranks, in rank order, into sequence
    order. `host` holds (position, first) on the CPU: blocks are cut without waiting for the device.
    """

    position: Tensor
    first: Tensor
    order: Tensor | None
    cp_group: Any
    host: tuple[Tensor, Tensor]

    def spans(self, rows: int, length: int) -> list[tuple[int, int, int, int]]:
        """Cut the anchors into blocks: (first row, last row + 1, first key, last key + 1 that the block can see).

        `length` is S: rows behind the last document are nobody's, and their position may lie outside.
        """
        position, first = self.host
        starts = range(0, len(position), rows)
        ends = [min(start + rows, len(position)) for start in starts]
        last = [min(int(position[z - 1]) + 1, length) for z in ends]
        return [(a, z, int(first[a]), key) for a, z, key in zip(starts, ends, last, strict=True)]

    def whole(self, x: Tensor) -> Tensor:
        """Rows of every context-parallel rank, in sequence order: [s, ...] -> [S, ...].

        Gradient: each rank's rows get the sum over all ranks.
        Collectives: one all-gather over the context-parallel group, one reduce-scatter back; none without it.
        """
        if self.order is None:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[self.order]


def find_anchors(length: int, packed: Any, cp_group: Any, layout: str, device: torch.device) -> Anchors:
    """The anchors of this rank's `length` rows: whole sequences, or documents packed into one (THD).

    Documents start at their padded boundaries where these are given: there the rotary positions start again.
    Packed sequences wait once for the device to send the boundaries.
    """
    size, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    bounds = document_bounds(packed)[0]
    bounds = None if bounds is None else bounds.detach().long().cpu()
    shard = ContextShard.of(length * size, bounds, size, rank, layout, torch.device("cpu"))
    position = shard.positions()
    starts = torch.zeros(1, dtype=torch.int64) if bounds is None else bounds
    # rows behind the last document see each other
    first = starts[torch.bucketize(position, starts, right=True) - 1]
    order = None
    if size > 1:
        order = torch.argsort(torch.cat([shard.positions(other) for other in range(size)]), stable=True).to(device)
    return Anchors(position.to(device), first.to(device), order, cp_group, (position, first))
