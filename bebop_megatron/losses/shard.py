"""Which columns of the vocabulary a rank holds, and the collectives over them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class VocabShard:
    """True columns [start, stop) of a vocabulary of `vocab_size`; start == stop on a rank that holds padding only."""

    start: int
    stop: int
    vocab_size: int
    group: Any = None

    @classmethod
    def of_columns(cls, columns: int, vocab_size: int | None, group: Any, name: str) -> VocabShard:
        """Rank r owns [r * columns, (r + 1) * columns) of the padded vocabulary.

        Raises:
            ValueError: the columns of all ranks do not reach `vocab_size`.
        """
        world = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        vocab_size = columns * world if vocab_size is None else vocab_size
        if not 0 < vocab_size <= columns * world:
            raise ValueError(
                f"{name} has {columns:,} columns on rank {rank} of {world}, {columns * world:,} in all, but vocab_size "
                f"is {vocab_size:,}. If the LM head is sharded, pass group; if padded, vocab_size is the true size"
            )
        start = min(rank * columns, vocab_size)
        return cls(start, min(start + columns, vocab_size), vocab_size, group if world > 1 else None)

    @property
    def columns(self) -> int:
        """True columns on this rank."""
        return self.stop - self.start

    def local(self, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Local column of global ids and whether this rank holds it; 0 where not.

        Shape: labels int64, any shape -> the same, twice: int64 and bool.
        """
        held = (labels >= self.start) & (labels < self.stop)
        return torch.where(held, labels - self.start, 0), held

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place.

        Shape: any, the same on every rank.
        Collectives: one all-reduce over `group`.
        """
        if self.group is not None:
            dist.all_reduce(values, group=self.group)
        return values

    def maximum(self, values: Tensor) -> Tensor:
        """Maximum over the ranks, in place.

        Shape: any, the same on every rank.
        Collectives: one all-reduce over `group`.
        """
        if self.group is not None:
            dist.all_reduce(values, op=dist.ReduceOp.MAX, group=self.group)
        return values

    def whole_sequence(self, rows: Tensor) -> Tensor:
        """Rows of all ranks, in their order.

        Shape: [k, n/tp, h] -> [k, n, h].
        Collectives: one all-gather over `group`.
        """
        if self.group is None:
            return rows
        own = rows.transpose(0, 1).contiguous()
        everyone = own.new_empty(self.group.size() * own.shape[0], *own.shape[1:])
        dist.all_gather_into_tensor(everyone, own, group=self.group)
        return everyone.transpose(0, 1)

    def sum_of_own_rows(self, rows: Tensor) -> Tensor:
        """The sum over ranks of this rank's rows.

        Shape: [k, n, h] -> [k, n/tp, h].
        Collectives: one reduce-scatter over `group`.
        """
        if self.group is None:
            return rows
        whole = rows.transpose(0, 1).contiguous()
        own = whole.new_empty(whole.shape[0] // self.group.size(), *whole.shape[1:])
        dist.reduce_scatter_tensor(own, whole, group=self.group)
        return own.transpose(0, 1)

    def bit(self, holds: Tensor) -> Tensor:
        """Mark whose sum over ranks tells a holder whether it is the first: rank r adds 4^-r.

        Shape: holds [n] bool -> [n] float32.
        """
        return holds * 4.0**-self._rank

    def first(self, holds: Tensor, total: Tensor) -> Tensor:
        """Whether this rank holds and no lower one does: what later ranks add stays below a lower rank's mark.

        Shape: holds [n] bool, total [n] (the sum of `bit` over the ranks) -> [n] bool.
        """
        return holds & (total < 2 * 4.0**-self._rank)

    @property
    def _rank(self) -> int:
        return 0 if self.group is None else dist.get_rank(self.group)
