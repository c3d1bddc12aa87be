"""The all-gather that brings the rows of other context-parallel ranks, and their gradients back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class _AllGatherSequence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        out = x.new_empty((group.size() * x.shape[0], *x.shape[1:]))
        dist.all_gather_into_tensor(out, x.contiguous(), group=group)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        # gloo has no reduce-scatter
        grad = grads[0].contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad.chunk(ctx.group.size(), 0)[ctx.group.rank()].contiguous(), None


def all_gather_sequence(x: Tensor, group: Any) -> Tensor:
    """Concatenate every rank's rows in rank order.

    Shape: x [s/cp, ...] -> [s, ...].
    Gradient: each rank's rows get the sum over all ranks.
    Collectives: one all-gather over `group`, one all-reduce back.
    """
    return _AllGatherSequence.apply(x, group)  # pyright: ignore[reportReturnType]
