"""What one micro-batch's drafts are compared with, and where it lies: labels, validity, and rows of the backbone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.alignment import Alignment, ContextShard, Reach, document_ends
from bebop_megatron.alignment.tables import chains, rows_of_batch


@dataclass(frozen=True)
class Targets:
    """Tables of a micro-batch on one rank; rows count through `reach.extend` of its hidden states.

    Shape: labels [k, n] int64, num_tokens [] (this rank's mask, summed).
    """

    reach: Reach
    alignment: Alignment
    labels: Tensor
    num_tokens: Tensor


def document_bounds(packed: Any) -> tuple[Tensor | None, Tensor | None]:
    """Cumulative lengths of Megatron's packed documents with their padding, and without it: [documents + 1] each.

    The second is None where documents are not padded, both where the batch is not packed.
    """
    if packed is None or packed.cu_seqlens_q is None:
        return None, None
    if packed.cu_seqlens_q_padded is None:
        return packed.cu_seqlens_q, None
    return packed.cu_seqlens_q_padded, packed.cu_seqlens_q


def shard_of(packed: Any, local_length: int, group: Any, layout: str, device: Any) -> ContextShard:
    """Which positions this rank of a context-parallel group holds; `group` None means that it holds all."""
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    return ContextShard.of(local_length * size, document_bounds(packed)[0], size, rank, layout, device)


def ends_of(packed: Any, reach: Reach, length: int) -> Tensor:
    """First position behind each row's document, padding not counted: [1, s/cp]."""
    bounds, unpadded = document_bounds(packed)
    if bounds is None:
        return torch.full_like(reach.position, length)[None]
    return document_ends(reach.position, bounds[None], None if unpadded is None else unpadded[None])


def targets_of(
    labels: Tensor | None,
    mask: Tensor | None,
    input_ids: Tensor | None,
    depths: int,
    packed: Any,
    group: Any,
    layout: str,
) -> Targets:
    """Tables of one micro-batch from this rank's part of it.

    Without labels (RL-style forward) the label of a row is the next row's id. A mask then says which *tokens* may be
    targets, as ids do, and both lie one position further ahead.

    Shape: labels, mask, input_ids [b, s/cp] or None.
    Collectives: one all-gather of labels and mask of the halo over `group`, the context-parallel group.
    """
    ahead = 0 if labels is not None else 1
    known = input_ids if labels is None else labels
    assert known is not None
    weights = torch.ones_like(known, dtype=torch.float32) if mask is None else mask
    # a negative label (-100) is no token, whatever the mask says
    allowed = (weights != 0) & (known >= 0)
    b, s = known.shape
    shard = shard_of(packed, s, group, layout, known.device)
    reach = Reach.of(shard, depths + ahead)
    seen = reach.extend(torch.stack([known.t(), allowed.t().to(known.dtype)], dim=-1), group)[reach.rows]
    valid = chains(seen[..., 1] != 0, reach.position, ends_of(packed, reach, shard.length))
    return Targets(
        reach,
        Alignment(rows_of_batch(reach.rows[:depths], b), valid[ahead:]),
        seen[ahead:, ..., 0].reshape(depths, -1),
        weights.sum(),
    )
