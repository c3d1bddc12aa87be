"""A core attention whose later draft steps see the first step's keys, made from any backend's class by inheritance.

The class keeps its parameters, its checkpoint names and its forward pass: step 1 is the backend's own attention.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor

from bebop_megatron.mcore.anchors import Anchors
from bebop_megatron.mcore.draft_attention import draft_attention

# what one attention hands on: keys and values of step 1 (whole sequence), then of the chain's steps 2, 3, ...
Carried = tuple[Tensor, ...]


@dataclasses.dataclass
class Call:
    """One step through one attention: what it may see, and what it leaves behind."""

    depth: int
    anchors: Anchors
    chain: bool
    carried: Carried
    made: Carried = ()


class SharedKeys(torch.nn.Module):
    """Mixed into a core attention class. Outside a `stepping` block it is that class and nothing more."""

    call: Call | None = None
    config: Any
    honours_mask: bool

    def __init__(self, *args: Any, softmax_scale: float | None = None, **kwargs: Any) -> None:
        super().__init__(*args, softmax_scale=softmax_scale, **kwargs)
        self.scale = softmax_scale

    def _first(self, *tensors: Any, **kwargs: Any) -> Tensor:
        config, forward = self.config, functools.partial(super().forward, **kwargs)
        if self.training and config.recompute_granularity == "selective" and "core_attn" in config.recompute_modules:
            return tensor_parallel.checkpoint(forward, False, *tensors)
        return forward(*tensors)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any) -> Any:
        """Shape: as the class it is mixed into; packed tensors have no batch dimension."""
        call = self.call
        if call is None:
            return super().forward(query, key, value, attention_mask, **kwargs)
        packed = query.dim() == 3
        rows = [x.unsqueeze(1) for x in (query, key, value)] if packed else [query, key, value]
        if call.depth == 1:
            call.made = tuple(call.anchors.whole(x) for x in rows[1:])
            return self._first(query, key, value, attention_mask, **kwargs)
        own = call.carried[2:]
        if call.chain:
            own += (rows[1], rows[2])
            call.made = (rows[1], rows[2])
        mask = attention_mask
        if not self.honours_mask or packed or (mask is not None and mask.shape[-2:] != (len(query), len(query))):
            # a mask of another size belongs to another layer
            mask = None
        out = draft_attention(
            rows[0],
            call.carried[0],
            call.carried[1],
            own[::2],
            own[1::2],
            anchors=call.anchors,
            scale=self.scale,
            mask=None if mask is None else mask.bool(),
        )
        return out.flatten(2).squeeze(1) if packed else out.flatten(2)


@functools.cache
def _with_shared_keys(core: type) -> type:
    # Transformer Engine's causal attention looks at no mask that it is handed
    honours_mask = not core.__module__.startswith("megatron.core.extensions.")
    return type(f"SharedKeys{core.__name__}", (SharedKeys, core), {"honours_mask": honours_mask})


def with_shared_keys(layer: Any) -> Any:
    """The `ModuleSpec` of a Transformer layer, its core attention replaced; one without attention as it is.

    Raises:
        ValueError: the layer mixes tokens in another way than by keys and values.
    """
    attention: Any = getattr(layer.submodules, "self_attention", None)
    if not isinstance(attention, ModuleSpec):
        return layer
    core: Any = getattr(attention.submodules, "core_attention", None)
    kind = core.module if isinstance(core, ModuleSpec) else core
    if not isinstance(kind, type) or (isinstance(core, ModuleSpec) and core.submodules is not None):
        name = getattr(attention.module, "__name__", attention.module)
        raise ValueError(
            f"--mtp-attention chain and first-depth need attention with keys and values in the MTP layer, and it has "
            f"{name}: use --mtp-attention per-depth"
        )
    shared = _with_shared_keys(kind)
    new_core = dataclasses.replace(core, module=shared) if isinstance(core, ModuleSpec) else shared
    attention = dataclasses.replace(
        attention, submodules=dataclasses.replace(attention.submodules, core_attention=new_core)
    )
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


class ShiftedRotary(torch.nn.Module):
    """Latent attention's own rotary embedding, `shift` positions further on."""

    def __init__(self, original: Any) -> None:
        super().__init__()
        self.original, self.shift = original, 0

    def forward(self, max_seq_len: int, offset: int = 0, **kwargs: Any) -> Any:
        return self.original(max_seq_len, offset=offset + self.shift, **kwargs)

    def get_rotary_seq_len(self, *args: Any, **kwargs: Any) -> int:
        return self.original.get_rotary_seq_len(*args, **kwargs)


@contextmanager
def stepping(attentions: list[Any], calls: list[Call]) -> Iterator[None]:
    """Run one draft step: each attention module works on its call, and is ordinary again afterwards."""
    try:
        for attention, call in zip(attentions, calls, strict=True):
            attention.core_attention.call = call
            if isinstance(getattr(attention, "rotary_pos_emb", None), ShiftedRotary):
                attention.rotary_pos_emb.shift = call.depth - 1
        yield
    finally:
        for attention in attentions:
            attention.core_attention.call = None
            if isinstance(getattr(attention, "rotary_pos_emb", None), ShiftedRotary):
                attention.rotary_pos_emb.shift = 0
