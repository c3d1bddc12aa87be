"""Where a rank's anchors are in the whole sequence, and in which document: what draft steps need of a batch layout."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from torch import Tensor

from bebop_megatron.platform.context_parallel import zigzag_positions


@dataclass(frozen=True)
class Anchors:
    """The anchors of one context-parallel rank, in the order it holds them.

    Shape: position [s] int64, ascending, in the whole (packed) sequence of S tokens; first and end [s] int64, where the
    anchor's document starts and stops; order [S] int64 or None, what puts the rows of all ranks, in rank order, into
    sequence order. `host` holds (position, first) on the CPU: blocks are cut without waiting for the device.
    """

    position: Tensor
    first: Tensor
    end: Tensor
    order: Tensor | None
    cp_group: Any
    host: tuple[Tensor, Tensor]

    def spans(self, rows: int) -> list[tuple[int, int, int, int]]:
        """Cut the anchors into blocks: (first row, last row + 1, first key, last key + 1 that the block can see)."""
        position, first = self.host
        starts = range(0, len(position), rows)
        ends = [min(start + rows, len(position)) for start in starts]
        return [(a, z, int(first[a]), int(position[z - 1]) + 1) for a, z in zip(starts, ends, strict=True)]

    def whole(self, x: Tensor) -> Tensor:
        """Rows of every context-parallel rank, in sequence order: [s, ...] -> [S, ...].

        Gradient: each rank's rows get the sum over all ranks.
        Collectives: one all-gather over the context-parallel group, one reduce-scatter back; none without it.
        """
        if self.order is None:
            return x
        return gather_from_sequence_parallel_region(x.contiguous(), group=self.cp_group)[self.order]

    def shifted(self, whole: Tensor, depth: int) -> Tensor:
        """Entry t + depth for each anchor t, 0 where its document has none.

        Shape: whole [S, ...] -> [s, ...].
        """
        index = self.position + depth
        inside = (index < self.end).view(-1, *[1] * (whole.dim() - 1))
        return whole[index.clamp(max=len(whole) - 1)] * inside


def find_anchors(length: int, packed: Any, cp_group: Any, device: torch.device) -> Anchors:
    """The anchors of this rank's `length` rows: whole sequences, or documents packed into one (THD), zigzag over ranks.

    Documents end at their padded boundaries where these are given: that is where tokens and rotary positions of the
    next one begin. Packed sequences wait once for the device to send the boundaries.
    """
    cp, rank = (1, 0) if cp_group is None else (cp_group.size(), cp_group.rank())
    if packed is None:
        bounds = torch.tensor([0, length * cp])
    else:
        bounds = packed.cu_seqlens_q if packed.cu_seqlens_q_padded is None else packed.cu_seqlens_q_padded
        bounds = bounds.detach().long().cpu()
    at = [zigzag_positions(bounds, cp, other) for other in range(cp)]
    position = at[rank]
    document = torch.bucketize(position, bounds[1:], right=True)
    first, end = bounds[document], bounds[document + 1]
    order = None if cp == 1 else torch.argsort(torch.cat(at)).to(device)
    return Anchors(position.to(device), first.to(device), end.to(device), order, cp_group, (position, first))
