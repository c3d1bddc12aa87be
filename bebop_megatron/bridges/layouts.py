"""How a tensor, or a group of tensors that Megatron fuses, is laid out on either side. Pure and exact both ways.

`pack` goes from Hugging Face to Megatron, `unpack` back. Every one but `minus-one` moves elements and computes nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Tensors = tuple[Tensor, ...]


@dataclass(frozen=True)
class Layout:
    """Both directions; the second argument holds the model's sizes."""

    pack: Callable[[Tensors, Any], Tensors]
    unpack: Callable[[Tensors, Any], Tensors]


def _same(tensors: Tensors, _: Any) -> Tensors:
    return tensors


def _pack_qkv(tensors: Tensors, sizes: Any) -> Tensors:
    """Per query group: its query heads, their gates if there are any, its key, its value.

    Shape: q [heads * d, h], gated [heads * 2d, h] with each head's gate behind its query; k, v [groups * d, h]
    -> [groups * (heads/group * (1 or 2) + 2) * d, h].
    """
    query, key, value = tensors
    width, groups = query.shape[-1], sizes.groups
    parts = [query.view(groups, -1, width)]
    if sizes.gated:
        heads = query.view(sizes.heads, 2, sizes.head_dim, width)
        parts = [heads[:, i].reshape(groups, -1, width) for i in (0, 1)]
    parts += [key.view(groups, -1, width), value.view(groups, -1, width)]
    return (torch.cat(parts, 1).reshape(-1, width),)


def _unpack_qkv(tensors: Tensors, sizes: Any) -> Tensors:
    (fused,) = tensors
    width, groups, d = fused.shape[-1], sizes.groups, sizes.head_dim
    queries = sizes.heads // groups * d
    blocks = [queries, queries, d, d] if sizes.gated else [queries, d, d]
    *query, key, value = fused.view(groups, sum(blocks), width).split(blocks, 1)
    heads = [part.reshape(sizes.heads, d, width) for part in query]
    return torch.stack(heads, 1).reshape(-1, width), key.reshape(-1, width), value.reshape(-1, width)


def _pack_halves(tensors: Tensors, _: Any) -> Tensors:
    """Shape: gate, up [f, h] -> [2f, h]."""
    return (torch.cat(tensors, 0),)


def _unpack_halves(tensors: Tensors, _: Any) -> Tensors:
    return tensors[0].chunk(2, 0)


def _pack_delta_qkv(tensors: Tensors, sizes: Any) -> Tensors:
    """Shape: [2 * keys + values, ...] -> query [keys, ...], key [keys, ...], value [values, ...]."""
    return tensors[0].split([sizes.keys, sizes.keys, sizes.values], 0)


def _unpack_delta_qkv(tensors: Tensors, _: Any) -> Tensors:
    return (torch.cat(tensors, 0),)


def _grouped(blocks: Callable[[Any], list[int]]) -> Layout:
    """Hugging Face keeps what belongs to one key head together, Megatron keeps one kind together."""

    def pack(tensors: Tensors, sizes: Any) -> Tensors:
        (fused,) = tensors
        width = fused.shape[-1]
        parts = fused.view(sizes.key_heads, -1, width).split(blocks(sizes), 1)
        return tuple(part.reshape(-1, width) for part in parts)

    def unpack(tensors: Tensors, sizes: Any) -> Tensors:
        width = tensors[0].shape[-1]
        return (torch.cat([part.view(sizes.key_heads, -1, width) for part in tensors], 1).reshape(-1, width),)

    return Layout(pack, unpack)


def _qkvz_blocks(sizes: Any) -> list[int]:
    return [*[sizes.key_dim] * 2, *[sizes.values // sizes.key_heads] * 2]


def _ba_blocks(sizes: Any) -> list[int]:
    return [sizes.value_heads // sizes.key_heads] * 2


_WIDER = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float64}


def _pack_minus_one(tensors: Tensors, _: Any) -> Tensors:
    """A plain norm weight for a model whose norms are stored as deltas from 1.

    In the weight's own type the difference is exact from one half on; for smaller weights a wider type keeps it exact.
    """
    (weight,) = tensors
    if weight.is_meta:
        return tensors
    dtype = weight.dtype
    while True:
        delta = (weight.double() - 1).to(dtype)
        if dtype not in _WIDER or torch.equal((delta.double() + 1).to(weight.dtype), weight):
            return (delta,)
        dtype = _WIDER[dtype]


def _unpack_minus_one(tensors: Tensors, _: Any) -> Tensors:
    (delta,) = tensors
    return ((delta.double() + 1).to(torch.float32 if delta.dtype == torch.float64 else delta.dtype),)


LAYOUTS = {
    "same": Layout(_same, _same),
    "qkv": Layout(_pack_qkv, _unpack_qkv),
    "halves": Layout(_pack_halves, _unpack_halves),
    "delta-qkv": Layout(_pack_delta_qkv, _unpack_delta_qkv),
    "delta-qkvz-by-head": _grouped(_qkvz_blocks),
    "delta-ba-by-head": _grouped(_ba_blocks),
    "minus-one": Layout(_pack_minus_one, _unpack_minus_one),
}
