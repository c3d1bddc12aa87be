"""Which rows are projected together: every target row once, beside all the draft rows that meet it."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """One step of a plan: a slice of its entries, and the slice of its target rows that they meet."""

    entries: slice
    targets: slice


@dataclass(frozen=True)
class Plan:
    """Entries of a [k, n] table in the order of their target rows, cut into chunks.

    Shape: order [e] flat index of each valid entry, needed [u] target rows in ascending order, place [e] where in
    `needed` an entry's row is.
    """

    order: Tensor
    needed: Tensor
    place: Tensor
    chunks: list[Chunk]


def make_plan(target_rows: Tensor, valid: Tensor, limit: int, looked_at: Tensor | None = None) -> Plan:
    """Cut the valid entries into chunks of at most `limit` draft rows, and as many target rows.

    A target row is in one chunk only, unless more entries meet it than fit: then it is in several. The host waits for
    the device three times.

    Shape: target_rows [k, n] int64, valid [k, n] bool, looked_at [r] int64: target rows wanted without any entry.
    """
    entries = valid.flatten().nonzero()[:, 0]
    rows, by_row = target_rows.flatten()[entries].sort(stable=True)
    needed = torch.unique(rows if looked_at is None else torch.cat([rows, looked_at]))
    ends = torch.searchsorted(rows, needed, right=True)
    return Plan(entries[by_row], needed, torch.searchsorted(needed, rows), _cut(ends.tolist(), limit))


def plan_without_target(valid: Tensor, limit: int) -> Plan:
    """Chunks of at most `limit` valid entries [k, n], in order; the host waits for the device once."""
    entries = valid.flatten().nonzero()[:, 0]
    starts = range(0, len(entries), limit)
    chunks = [Chunk(slice(start, min(start + limit, len(entries))), slice(0, 0)) for start in starts]
    return Plan(entries, entries[:0], torch.zeros_like(entries), chunks)


def _cut(ends: list[int], limit: int) -> list[Chunk]:
    """`ends[u]`: how many entries meet target rows 0..u."""
    chunks, row, entry = [], 0, 0
    while row < len(ends):
        last = min(bisect_right(ends, entry + limit), row + limit)
        if last > row:
            chunks.append(Chunk(slice(entry, ends[last - 1]), slice(row, last)))
            row, entry = last, ends[last - 1]
        else:
            # more entries meet this one row than a chunk may hold
            stop = min(entry + limit, ends[row])
            chunks.append(Chunk(slice(entry, stop), slice(row, row + 1)))
            entry = stop
            row += entry == ends[row]
    return chunks
