"""Target rows and validity of every (depth, anchor)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Alignment:
    """Contract between a batch layout and the losses.

    Shape: target_rows [k, n] int64, valid [k, n] bool; row = position * b + batch, n = s * b. Entries that are not
    valid hold some in-range row.
    """

    target_rows: Tensor
    valid: Tensor


def document_ends(position: Tensor, bounds: Tensor, unpadded: Tensor | None = None) -> Tensor:
    """First position behind the document that holds each position, its padding not counted.

    `bounds` is cumulative as the rows lie, `unpadded` cumulative over the documents' true lengths. A position behind
    the last document ends before it starts: no chain begins there.

    Shape: position [s], bounds and unpadded [b, documents + 1] int -> [b, s] int64.
    """
    bounds = bounds.long().contiguous()
    document = torch.searchsorted(bounds[:, 1:].contiguous(), position.expand(len(bounds), -1).contiguous(), right=True)
    ends = bounds[:, 1:]
    if unpadded is not None:
        ends = torch.minimum(ends, bounds[:, :-1] + unpadded.long().diff(dim=1))
    return torch.cat([ends, torch.zeros_like(ends[:, :1])], dim=1).gather(1, document)


def rows_of_batch(rows: Tensor, b: int) -> Tensor:
    """Rows of a sequence to rows of a batch in Megatron's order: [k, s] -> [k, s * b]."""
    return (rows[..., None] * b + torch.arange(b, device=rows.device)).reshape(len(rows), -1)


def chains(allowed: Tensor, position: Tensor, ends: Tensor) -> Tensor:
    """Which (depth, anchor) count: depth i of position t ends inside t's document, on a label that may be a target.

    Documents are contiguous, so if the last row of a chain is inside, all of them are.

    Shape: allowed [k, s, b] bool, position [s], ends [b or 1, s] -> [k, s * b] bool.
    """
    depth = torch.arange(1, len(allowed) + 1, device=allowed.device)[:, None, None]
    return (allowed & (position[:, None] + depth < ends.t())).reshape(len(allowed), -1)


def valid_entries(mask: Tensor, depths: int, bounds: Tensor | None = None, unpadded: Tensor | None = None) -> Tensor:
    """Which (depth, anchor) count.

    Shape: as `align` takes them -> [k, n] bool.
    """
    position, target = _targets(mask, depths)
    ends = torch.full_like(position, len(position))[None]
    if bounds is not None:
        ends = document_ends(position, bounds, unpadded)
    return chains(mask.bool().t()[target], position, ends)


def align(mask: Tensor, depths: int, bounds: Tensor | None = None, unpadded: Tensor | None = None) -> Alignment:
    """Tables for whole sequences, `mask[b, s]` as Megatron's loss mask.

    Shape: mask [b, s] any number or bool; bounds, unpadded [b, documents + 1] int or None (one document per sequence).
    """
    _, target = _targets(mask, depths)
    return Alignment(rows_of_batch(target, mask.shape[0]), valid_entries(mask, depths, bounds, unpadded))


def _targets(mask: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """Positions [s], and the target of each depth, clamped to the sequence: [k, s]."""
    s = mask.shape[1]
    position = torch.arange(s, device=mask.device)
    return position, (position + torch.arange(1, depths + 1, device=mask.device)[:, None]).clamp(max=s - 1)
