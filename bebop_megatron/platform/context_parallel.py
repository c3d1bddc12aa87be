"""Which positions a context-parallel rank holds, and the all-gather that brings the others."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.alignment import ContextShard


def zigzag_positions(bounds: Tensor, size: int, rank: int) -> Tensor:
    """Global positions that `rank` of `size` holds: of each document's 2*size chunks, its own and the mirrored one.

    Shape: bounds [documents + 1] int, cumulative, each document a multiple of 2*size long -> [positions/size] int64.
    """
    return ContextShard(bounds.long(), int(bounds[-1]), size, rank).positions()


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
    """Concatenate every rank's rows in rank order: x [s/cp, ...] -> [s, ...]."""
    return _AllGatherSequence.apply(x, group)  # pyright: ignore[reportReturnType]
