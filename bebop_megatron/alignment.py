"""Who is the target of whom. The only shift by depth in the package.

Depth i (1..k) of anchor t predicts the token after position t+i, so its target distribution is the backbone's at row
t+i and its label is labels[t+i]. `mask[i]` says whether `labels[i]` may be a target.
"""

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


def packed_segments(cu_seqlens: Tensor, length: int) -> Tensor:
    """Number the documents of a packed sequence: cu_seqlens [documents + 1] -> segments [1, length] int64."""
    position = torch.arange(length, device=cu_seqlens.device)
    return torch.bucketize(position, cu_seqlens[1:].long(), right=True).unsqueeze(0)


def _targets(mask: Tensor, depths: int) -> tuple[Tensor, Tensor]:
    """Target position of each depth and position, clamped, and whether it is inside the sequence: [k, s] twice."""
    s = mask.shape[1]
    target = torch.arange(s, device=mask.device) + torch.arange(1, depths + 1, device=mask.device)[:, None]
    return target.clamp(max=s - 1), target < s


def valid_entries(mask: Tensor, depths: int, segments: Tensor | None = None) -> Tensor:
    """Which (depth, anchor) count; the arguments of `align` -> [k, n] bool."""
    target, inside = _targets(mask, depths)
    valid = mask.bool().t()[target] & inside[..., None]
    if segments is not None:
        segment = segments.expand(mask.shape).t()
        # segments are contiguous, so equal ends mean that every row between them is in the same one
        valid &= segment[target] == segment
    return valid.reshape(depths, -1)


def align(mask: Tensor, depths: int, segments: Tensor | None = None) -> Alignment:
    """Tables for whole sequences, `mask[b, s]` as Megatron's loss mask.

    Shape: mask [b, s] any number or bool, segments [b, s] int or None (one document per sequence).
    """
    b = mask.shape[0]
    target, _ = _targets(mask, depths)
    rows = target[..., None] * b + torch.arange(b, device=mask.device)
    return Alignment(rows.reshape(depths, -1), valid_entries(mask, depths, segments))
