"""Puts caches into a Megatron model, and takes them out again.

Megatron's own inference contexts are not used: the static one has a single offset for the whole batch, so
rows that accepted different numbers of drafts cannot share it, and the dynamic one verifies drafts by exact
match, without draft probabilities, and keeps no cache for MTP layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.cache import CachedAttention, Call
from bebop_megatron.patching import Patcher

if TYPE_CHECKING:
    from bebop_megatron.evaluation.recurrent import CachedDeltaNet

# fused rotary kernels know one position per column, decoding has one per row and column
_OFF_IN_CONFIG = ("apply_rope_fusion", "fused_single_qkv_rope", "sequence_parallel", "flash_decode")
_OFF_IN_MODULES = ("sequence_parallel", "reduce_scatter_embeddings", "scatter_to_sequence_parallel")
_SUPPORTED = {
    "window_size": None,
    "softmax_type": "vanilla",
    "apply_query_key_layer_scaling": False,
    "cuda_graph_impl": "none",
    "cache_mla_latents": False,
}


def unwrapped(model: Any) -> Any:
    """The model inside Megatron's wrappers (data parallel, half precision) and its one-element list of
    chunks.

    Raises:
        ValueError: several chunks, or something that is no decoder-only model.
    """
    if isinstance(model, list | tuple):
        if len(model) != 1:
            raise ValueError(f"decoding needs the whole model in one chunk, got {len(model)}: build it without VPP")
        model = model[0]
    while not hasattr(model, "decoder") and hasattr(model, "module"):
        model = model.module
    if not hasattr(model, "decoder"):
        raise ValueError(f"{type(model).__name__} is not a GPTModel or HybridModel: it has no decoder")
    return model


def data_parallel_group(model: Any) -> Any | None:
    """The group of ranks that hold copies of this rank's part of the model; None where there is one copy."""
    group = getattr(unwrapped(model).pg_collection, "dp", None)
    return group if group is not None and group.size() > 1 else None


def refuse_unsupported(model: Any) -> None:
    """Refuse what the caches cannot serve.

    Raises:
        ValueError: pipeline or context parallelism, a kind of attention not implemented, a recurrent layer
        other than the backbone's gated delta nets.
    """
    # on demand, here and below: Megatron takes seconds to import
    from bebop_megatron.mcore.delta_net import is_delta_net

    for name, group in (("pipeline", model.pg_collection.pp), ("context", model.pg_collection.cp)):
        if group is not None and group.size() > 1:
            raise ValueError(
                f"decoding does not run under {name} parallelism (size {group.size()}): build the model with "
                "size 1. Tensor parallelism works, and a checkpoint loads under any layout"
            )
    for name, value in _SUPPORTED.items():
        received = getattr(model.config, name, value)
        if received != value:
            raise ValueError(f"decoding supports {name}={value!r} only, but the model has {name}={received!r}")
    drafting = set(model.mtp.modules()) if getattr(model, "mtp", None) is not None else set()
    for module in model.modules():
        mixer = getattr(module, "mixer", None) or getattr(module, "self_attention", None)
        if mixer is None or type(mixer).__name__ == "IdentityOp" or hasattr(mixer, "core_attention"):
            continue
        if is_delta_net(mixer):
            if module not in drafting:
                continue
            raise ValueError(
                "the MTP layer has a gated delta net: its draft steps would start from states that no engine "
                "defines. Use a pattern with attention (*) in the MTP layer"
            )
        raise ValueError(
            f"decoding needs attention or gated delta net layers: {type(mixer).__name__} keeps a recurrent "
            "state, which cannot be rolled back when a draft is rejected"
        )


class _RowRotary(torch.nn.Module):
    """Stands where latent attention looks up rotary frequencies: [t, b, 1, d] by the call's positions."""

    def __init__(self, original: Any, call: Call, capacity: int) -> None:
        super().__init__()
        self.get_rotary_seq_len = original.get_rotary_seq_len
        table = original(capacity)
        self.table, self.scale = table if isinstance(table, tuple) else (table, None)
        self.call = call

    def forward(self, *_: Any, **__: Any) -> Any:
        freqs = gathered(self.table, self.call.window.positions)
        return freqs if self.scale is None else (freqs, self.scale)


def gathered(table: Tensor, positions: Tensor) -> Tensor:
    """Rotary frequencies by position.

    Shape: table [capacity, 1, 1, d], positions [b, t] int64 -> [t, b, 1, d].
    """
    return table[:, 0][positions.t()]


def rotary_table(model: Any, capacity: int) -> Tensor | None:
    """Frequencies [capacity, 1, 1, d] of the model's own embedding; None where it has none."""
    embedding = getattr(model, "rotary_pos_emb", None)
    if embedding is None or model.config.multi_latent_attention:
        return None
    if model.position_embedding_type == "mrope":
        # text advances all three coordinates together
        positions = torch.arange(capacity).expand(3, 1, capacity)
        return embedding(positions, model.mrope_section)
    table = embedding(capacity)
    return table[0] if isinstance(table, tuple) else table


@contextmanager
def with_caches(
    model: Any, call: Call, *, batch_size: int, capacity: int
) -> Iterator[list[CachedAttention | CachedDeltaNet]]:
    """Replace every core attention and every delta net of `model` by a cache that works on `call`'s window.

    Yields the caches.

    Dropout, sequence parallelism and fused rotary kernels are off meanwhile. On leaving, everything is as it
    was.
    """
    from bebop_megatron.evaluation.recurrent import CachedDeltaNet
    from bebop_megatron.mcore.delta_net import is_delta_net

    patcher = Patcher()
    training = [module for module in model.modules() if module.training]
    attentions = [module for module in model.modules() if hasattr(module, "core_attention")]
    recurrent = [m for m in model.modules() if is_delta_net(getattr(m, "self_attention", None))]
    # Megatron remembers rotary tables: one made in inference mode could not be used in training afterwards
    with torch.inference_mode(False), torch.no_grad():
        rotary = {m: _RowRotary(m.rotary_pos_emb, call, capacity) for m in attentions if hasattr(m, "rotary_pos_emb")}
    caches: list[CachedAttention | CachedDeltaNet] = []
    try:
        model.eval()
        for owner in {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}.values():
            for name in _OFF_IN_CONFIG:
                if getattr(owner, name, False):
                    patcher.set(owner, name, False)
        for module in model.modules():
            for name in _OFF_IN_MODULES:
                if getattr(module, name, False) is True:
                    patcher.set(module, name, False)
        for attention in attentions:
            # latent attention has a scale of its own; None is 1 / sqrt(d)
            scale = getattr(attention, "softmax_scale", None) or attention.config.softmax_scale
            cache = CachedAttention(call, batch_size=batch_size, capacity=capacity, scale=scale)
            caches.append(cache)
            patcher.set(attention, "core_attention", cache)
            if attention in rotary:
                patcher.set(attention, "rotary_pos_emb", rotary[attention])
        for layer in recurrent:
            caches.append(CachedDeltaNet(call, layer.self_attention, batch_size=batch_size))
            patcher.set(layer, "self_attention", caches[-1])
        yield caches
    finally:
        patcher.restore()
        for module in training:
            module.training = True
