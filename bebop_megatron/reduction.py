"""One normalisation: how much of the global batch's mean one micro-batch contributes.

Megatron divides twice after the loss has been attached: by the number of micro-batches and, while reducing gradients,
by the number of data x context parallel ranks (averaged mode), or by the number of tokens of the global batch
(per-token mode). `StepCounts` knows what those divisions will be, so that the sum that reaches the optimizer is the
exact mean over all valid anchors of the global batch, also when a rank or a micro-batch has none.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.alignment import valid_entries
from bebop_megatron.losses.prefix import anchors


@dataclass(frozen=True)
class StepCounts:
    """Counts over the global batch of one optimizer step.

    Shape: anchors [k] float64 (equal entries unless the horizon is per-depth), tokens [] float64.
    """

    anchors: Tensor
    tokens: Tensor
    num_microbatches: int

    def mean_scale(self) -> Tensor:
        """Factor [k] float32 that turns a micro-batch's sums into its part of the global mean; 0 where none count."""
        return torch.where(self.anchors > 0, 1.0 / self.anchors.clamp(min=1), 0.0).float()

    def megatron_divisor(self, per_token_loss: bool, replicas: int) -> Tensor:
        """What Megatron will divide the attached loss by, [] float32; `replicas`: data x context parallel ranks."""
        if per_token_loss:
            return self.tokens.clamp(min=1).float()
        return torch.tensor(float(self.num_microbatches * replicas), device=self.anchors.device)


def local_counts(valid: Tensor, num_tokens: Tensor, horizon: str, group: Any = None) -> StepCounts:
    """Counts of one micro-batch alone: Megatron's own normalisation, exact when micro-batches count alike.

    Shape: valid [k, n] bool, num_tokens [].
    Collectives: with a context-parallel `group` that holds parts of the micro-batch, one all-reduce of [k + 1] over it.
    """
    counts = torch.cat([anchors(valid, horizon).double(), num_tokens.double().view(1)])
    if group is not None and group.size() > 1:
        dist.all_reduce(counts, group=group)
    return StepCounts(counts[:-1], counts[-1], 1)


# Megatron Bridge describes packed documents otherwise, and ends its bounds with sentinels
_OTHER_PACKING = ("cu_seqlens_q", "cu_seqlens_argmin", "cu_seqlens_unpadded")


def _document_bounds(batch: dict[str, Any], b: int) -> tuple[Tensor | None, Tensor | None]:
    """Cumulative lengths of a batch's documents, without their padding (None if there is none) and with it."""
    bounds, padded = (
        None if batch.get(key) is None else batch[key].view(b, -1) for key in ("cu_seqlens", "cu_seqlens_padded")
    )
    return (None, bounds) if padded is None else (bounds, padded)


def batch_counts(batches: Iterable[Any], depths: int, horizon: str) -> Tensor:
    """Sum the counts of data-loader batches: -> [2 + k] float64: batches that could not be read, tokens, anchors.

    A batch is a mapping with `loss_mask` [b, s] of whole sequences and, for packed ones, `cu_seqlens`
    [b, documents + 1], with `cu_seqlens_padded` where documents are padded.
    """
    total = torch.zeros(2 + depths, dtype=torch.float64)
    for batch in batches:
        mask = batch.get("loss_mask") if isinstance(batch, dict) else None
        if mask is None or any(key in batch for key in _OTHER_PACKING):
            total[0] += 1
            continue
        unpadded, bounds = _document_bounds(batch, len(mask))
        total[1] += mask.sum().double().cpu()
        allowed, ahead = mask != 0, 0
        if batch.get("labels") is not None:
            allowed &= batch["labels"] >= 0
        elif batch.get("tokens") is not None:
            # without labels (RL-style) the mask is one of tokens: see `targets_of`
            ahead = 1
        valid = valid_entries(allowed, depths + ahead, bounds, unpadded)[ahead:]
        total[2:] += anchors(valid, horizon).double().cpu()
    return total


def global_counts(
    local: Tensor, num_microbatches: int, device: torch.device | str, data_group: Any, tensor_group: Any
) -> StepCounts | None:
    """Add up `batch_counts` over the ranks; None where any rank could not read its batches.

    Shape: local [2 + k] float64.
    Collectives: one all-reduce of [2 + k] over the data-parallel group, one broadcast over the tensor-parallel group
    (only its first rank reads data).
    """
    total = local.to(device)
    if dist.get_rank(tensor_group) == 0:
        dist.all_reduce(total, group=data_group)
    dist.broadcast(total, dist.get_global_rank(tensor_group, 0), group=tensor_group)
    if total[0] > 0:
        return None
    return StepCounts(total[2:], total[1], num_microbatches)
