"""Weights from the learner's ranks to a worker's model, whatever tensor and pipeline sizes cut them.

Megatron's sharded state dict says where each local tensor lies in the whole one; a worker copies what overlaps its own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.surgery import unwrapped


@dataclass(frozen=True)
class Shard:
    """A part of the tensor `key`, beginning at `offset`; as wide as the whole tensor has axes."""

    key: str
    offset: tuple[int, ...]
    data: Tensor


Shards = list[Shard]


def _own(model: Any) -> list[Any]:
    """This rank's sharded tensors, with views of the parameters as data."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories

    state = unwrapped(model).sharded_state_dict()
    apply_factories(state)
    found: list[Any] = []

    def collect(value: Any) -> None:
        if isinstance(value, dict):
            value = list(value.values())
        if isinstance(value, (list, tuple)):
            for item in value:
                collect(item)
        elif isinstance(value, ShardedTensor) and value.data is not None:
            found.append(value)

    collect(state)
    return found


def _is_main(replica: int | tuple[int, ...]) -> bool:
    return replica == 0 if isinstance(replica, int) else all(index == 0 for index in replica)


def _whole_rank(sharded: Any) -> Tensor:
    """The data with the axes that stacked layers prepend."""
    return sharded.data.reshape(*([1] * sharded.prepend_axis_num), *sharded.local_shape)


@torch.no_grad()
def export_shards(chunks: list[Any], parts: frozenset[str]) -> Shards:
    """Copies of what this rank is the first to hold, of the parts `backbone` and `mtp` that are asked for."""
    return [
        Shard(sharded.key, tuple(sharded.global_offset), _whole_rank(sharded).detach().cpu().clone())
        for chunk in chunks
        for sharded in _own(chunk)
        if _is_main(sharded.replica_id) and ("mtp" if sharded.key.startswith("mtp.") else "backbone") in parts
    ]


@torch.no_grad()
def load_shards(model: Any, shards: list[Shards]) -> None:
    """Copy the shards of all ranks into a model; what the model lacks, such as a head, is left out.

    Raises:
        RuntimeError: a tensor of the model is filled in part only.
    """
    by_key: dict[str, list[Shard]] = {}
    for part in shards:
        for shard in part:
            by_key.setdefault(shard.key, []).append(shard)
    for sharded in _own(model):
        found = by_key.get(sharded.key)
        if found is None:
            continue
        target = _whole_rank(sharded)
        filled = 0
        for shard in found:
            filled += _copy(target, tuple(sharded.global_offset), shard)
        # columns that pad the vocabulary may be fewer in the learner
        if filled < target.numel() and not sharded.allow_shape_mismatch:
            raise RuntimeError(f"the learner's ranks sent {filled:,} of {target.numel():,} values of {sharded.key}")


def _copy(target: Tensor, offset: tuple[int, ...], shard: Shard) -> int:
    """Copy the overlap of two boxes; returns its size."""
    into, out_of = [], []
    for begin, length, other, other_length in zip(offset, target.shape, shard.offset, shard.data.shape, strict=True):
        low, high = max(begin, other), min(begin + length, other + other_length)
        if low >= high:
            return 0
        into.append(slice(low - begin, high - begin))
        out_of.append(slice(low - other, high - other))
    part = shard.data[tuple(out_of)]
    target[tuple(into)].copy_(part)
    return part.numel()
