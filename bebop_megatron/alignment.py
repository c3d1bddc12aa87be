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


def align(mask: Tensor, depths: int, segments: Tensor | None = None) -> Alignment:
    """Tables for whole sequences, `mask[b, s]` as Megatron's loss mask.

    Shape: mask [b, s] any number or bool, segments [b, s] int or None (one document per sequence).
    """
    b, s = mask.shape
    position = torch.arange(s, device=mask.device)
    step = torch.arange(1, depths + 1, device=mask.device)
    target = position + step[:, None]
    inside = target < s
    target = target.clamp(max=s - 1)
    valid = (mask.bool().t()[target]) & inside[..., None]
    if segments is not None:
        segment = segments.expand(b, s).t()
        # segments are contiguous, so equal ends mean that every row between them is in the same one
        valid &= segment[target] == segment
    rows = target[..., None] * b + torch.arange(b, device=mask.device)
    return Alignment(rows.reshape(depths, s * b), valid.reshape(depths, s * b))


def counted_anchors(valid: Tensor, horizon: str) -> Tensor:
    """How many anchors each depth's average runs over: valid [k, n] bool -> [k] int64.

    `full` and `partial` count whole anchors, the same number for every depth; `per-depth` counts each depth's own.
    """
    if horizon == "per-depth":
        return valid.sum(1)
    chains = valid.all(0) if horizon == "full" else valid[0]
    return chains.sum().expand(valid.shape[0])
