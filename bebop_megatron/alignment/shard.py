"""Which positions of a sequence a context-parallel rank holds, and who holds a given position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

LAYOUTS = ("zigzag", "contiguous")


@dataclass(frozen=True)
class ContextShard:
    """One rank's part of sequences that are cut over `size` ranks.

    `zigzag`: every unit (a packed document, or the whole sequence) is cut into 2*size chunks, and rank r holds chunks
    r and 2*size-1-r, so that causal attention is balanced. `contiguous`: every unit is cut into `size` chunks.
    Everything is a closed form of `bounds`: no loop over units, and nothing waits for the device.

    Shape: bounds [units + 1] int64, cumulative, from 0; a unit is a multiple of its number of chunks long,
    and may be empty.
    """

    bounds: Tensor
    length: int
    size: int = 1
    rank: int = 0
    layout: str = "zigzag"

    @classmethod
    def of(
        cls, length: int, documents: Tensor | None, size: int, rank: int, layout: str, device: Any = None
    ) -> ContextShard:
        """Cut whole sequences of `length`, or in zigzag each document of a packed one.

        Shape: documents [d + 1] int, cumulative lengths.
        """
        if documents is None or layout == "contiguous" or size == 1:
            # built on the device: a copy from the host would wait for it
            bounds = torch.arange(2, device=device if documents is None else documents.device) * length
        else:
            bounds = documents.long()
        return cls(bounds, length, size, rank, layout)

    @property
    def local_length(self) -> int:
        """Positions on one rank."""
        return self.length // self.size

    @property
    def pieces(self) -> int:
        """Runs of neighbouring positions of one unit that a rank holds."""
        return 2 if self.layout == "zigzag" and self.size > 1 else 1

    @property
    def chunk_lengths(self) -> Tensor:
        """Length of each unit's chunks [units]; 1 where a unit is empty."""
        return (self.bounds.diff() // (self.pieces * self.size)).clamp(min=1)

    def positions(self, rank: int | None = None) -> Tensor:
        """Positions that a rank (by default this one) holds, in its order: -> [local_length] int64.

        Rows behind the last unit are nobody's: their position is `length`.
        """
        rank = self.rank if rank is None else rank
        row = torch.arange(self.local_length, device=self.bounds.device)
        if self.size == 1:
            return row
        starts = self.bounds // self.size
        unit = torch.bucketize(row, starts[1:], right=True).clamp(max=len(starts) - 2)
        chunk = self.chunk_lengths[unit]
        inside = row - starts[unit]
        second = inside // chunk
        number = torch.where(second > 0, 2 * self.size - 1 - rank, rank) if self.pieces == 2 else rank
        position = self.bounds[unit] + number * chunk + inside % chunk
        return torch.where(row < starts[-1], position, self.length)

    def locate(self, position: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Who holds positions, and where.

        Shape: position int64, any shape -> rank, row there, number of the piece there, offset in the piece: the same.
        """
        unit = torch.bucketize(position, self.bounds[1:], right=True).clamp(max=len(self.bounds) - 2)
        start, chunk = self.bounds[unit], self.chunk_lengths[unit]
        number = (position - start) // chunk
        offset = (position - start) % chunk
        second = torch.zeros_like(number)
        if self.pieces == 2:
            second = (number >= self.size).long()
            number = torch.where(second > 0, 2 * self.size - 1 - number, number)
        return number, start // self.size + second * chunk + offset, unit * self.pieces + second, offset

    def piece_starts(self) -> Tensor:
        """Row at which each piece starts on every rank: -> [units * pieces]."""
        start = (self.bounds[:-1] // self.size)[:, None]
        piece = torch.arange(self.pieces, device=start.device)
        return (start + piece * self.chunk_lengths[:, None]).reshape(-1)
