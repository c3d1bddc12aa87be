"""Which rows are projected together: every target row once, and then all the draft rows that meet it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunk:
    """One step of a plan: a slice of its target rows, and in turn the slices of its entries that meet them."""

    targets: slice
    drafts: list[slice]


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
    """Cut the needed target rows into chunks of at most `limit`, and the entries of each into parts of at most `limit`.

    Every target row is in one chunk; more depths make more parts and not larger ones. The host waits for the device
    three times.

    Shape: target_rows [k, n] int64, valid [k, n] bool, looked_at [r] int64: target rows wanted without any entry.
    """
    entries = valid.flatten().nonzero()[:, 0]
    rows, by_row = target_rows.flatten()[entries].sort(stable=True)
    needed = torch.unique(rows if looked_at is None else torch.cat([rows, looked_at]))
    parts = _parts(0, len(needed), limit)
    last = torch.tensor([part.stop - 1 for part in parts], dtype=torch.int64, device=rows.device)
    ends = torch.searchsorted(rows, needed[last], right=True).tolist()
    chunks = [
        Chunk(part, _parts(start, stop, limit)) for part, start, stop in zip(parts, [0, *ends], ends, strict=False)
    ]
    return Plan(entries[by_row], needed, torch.searchsorted(needed, rows), chunks)


def plan_without_target(valid: Tensor, limit: int) -> Plan:
    """Chunks of at most `limit` valid entries [k, n], in order; the host waits for the device once."""
    entries = valid.flatten().nonzero()[:, 0]
    chunks = [Chunk(slice(0, 0), [part]) for part in _parts(0, len(entries), limit)]
    return Plan(entries, entries[:0], torch.zeros_like(entries), chunks)


def _parts(start: int, stop: int, limit: int) -> list[slice]:
    return [slice(begin, min(begin + limit, stop)) for begin in range(start, stop, limit)]
