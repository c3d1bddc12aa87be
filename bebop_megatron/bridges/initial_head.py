"""MTP weights for a model that has none."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from bebop_megatron.bridges.families import Sizes
from bebop_megatron.bridges.plan import Place, Style, mtp_rows

METHODS = ("last-layer", "random")
_NORMS = ("norm.weight", "norm_weight")


def initial_head(
    sizes: Sizes, method: str, read: Callable[[Place], Tensor], *, dtype: torch.dtype, std: float, seed: int = 0
) -> Iterator[tuple[Place, Tensor]]:
    """The tensors of one MTP layer, by their GPTModel names.

    `last-layer`: the inner layer and the final norm are those of the last decoder layer with ordinary attention,
    `eh_proj` passes the hidden state on and adds a little of the embedding. `random`: everything is drawn, norms are 1.
    Each tensor is drawn from its own name, so the result depends on nothing but the seed.
    """
    inner, source = "mtp.layers.0.transformer_layer.", f"decoder.layers.{sizes.attention_layer}."
    # of a norm that is stored as its delta from 1
    one = 0.0 if sizes.gated else 1.0
    for row in mtp_rows(sizes, 1, Style()):
        for place, shape in zip(row.megatron, row.megatron_shapes(), strict=True):
            name = place.name
            if method == "last-layer" and name.startswith(inner):
                yield place, read(Place(name.replace(inner, source), place.index, place.counts))
                continue
            if method == "last-layer" and name.endswith(".final_layernorm.weight"):
                yield place, read(Place("decoder.final_layernorm.weight"))
                continue
            if name.endswith(_NORMS):
                yield place, torch.full(shape, one, dtype=dtype)
                continue
            digest = hashlib.sha256(f"{seed} {name} {place.index}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
            value = torch.randn(shape, generator=generator) * std
            if method == "last-layer" and name.endswith(".eh_proj.weight"):
                # columns: embedding, then hidden state
                value[:, sizes.hidden :] = torch.eye(sizes.hidden)
            yield place, value.to(dtype)
