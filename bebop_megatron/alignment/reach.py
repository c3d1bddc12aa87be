"""What lies up to `depths` positions ahead of a rank's own rows, and the one exchange that brings it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.alignment.shard import ContextShard


@dataclass(frozen=True)
class Reach:
    """Rows ahead of a shard's own, in a table of its rows followed by the halo of `extend`.

    Only the heads of a neighbour's pieces can lie ahead of a piece, so every rank sends the first `depths` rows of each
    of its pieces, or all its rows where documents are so short that these are as many. How many depends on shapes only.

    Shape: position [s/cp] (of this rank's rows), rows [k, s/cp] int64 (where in the table position + depth is; any row
    in range for what lies beyond the unit), exported [e] (rows that this rank sends) or None without context
    parallelism.
    """

    position: Tensor
    rows: Tensor
    exported: Tensor | None
    size: int

    @classmethod
    def of(cls, shard: ContextShard, depths: int) -> Reach:
        """Reach of one rank. Collectives: none."""
        position = shard.positions()
        depth = torch.arange(1, depths + 1, device=position.device)
        target = (position + depth[:, None]).clamp(max=shard.length - 1)
        if shard.size == 1:
            return cls(position, target, None, 1)
        local = shard.local_length
        rank, row, piece, offset = shard.locate(target)
        heads = shard.piece_starts()
        if len(heads) * depths < local:
            exported = (heads[:, None] + torch.arange(depths, device=heads.device)).reshape(-1)
            # pieces shorter than the reach repeat a row that nobody looks up
            exported = exported.clamp(max=local - 1)
            sent = piece * depths + offset.clamp(max=depths - 1)
        else:
            exported = torch.arange(local, device=heads.device)
            sent = row
        return cls(
            position,
            torch.where(rank == shard.rank, row, local + rank * len(exported) + sent),
            exported,
            shard.size,
        )

    def extend(self, values: Tensor, group: Any) -> Tensor:
        """Own rows with the halo behind them, without gradient.

        Shape: values [s/cp, ...] -> [s/cp + cp * e, ...]; unchanged without context parallelism.
        Collectives: one all-gather of e rows over `group`, the context-parallel group.
        Memory: a copy of the values and the halo.
        """
        if self.exported is None:
            return values
        values = values.detach()
        sent = values[self.exported]
        table = values.new_empty((len(values) + self.size * len(sent), *values.shape[1:]))
        table[: len(values)] = values
        dist.all_gather_into_tensor(table[len(values) :], sent, group=group)
        return table
