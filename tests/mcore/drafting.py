"""Tiny models with our MTP layers, and two slow ways to compute what each draft step must be.

`decoded` feeds tokens one verification at a time to the evaluation decoder's key-value cache; `dense` lays anchors and
chain steps of all depths out as one sequence under an explicit mask.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor

from tests.mcore.settings import QWEN, layer_spec

VOCAB, DEPTHS = 32, 4


def build(mode: str, *, latent: bool = False, engine: bool = True, position: str = "rope", **overrides: Any) -> Any:
    """A two-layer GPTModel whose MTP layer works in `mode`; weights depend on the parameters' names only."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    from bebop_megatron.mcore.spec import mtp_block_spec
    from tests.mcore.weights import same_weights_everywhere

    tp, cp = parallel_state.get_tensor_model_parallel_world_size(), parallel_state.get_context_parallel_world_size()
    settings: dict[str, Any] = QWEN | {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": None if latent else 2,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": tp,
        "context_parallel_size": cp,
        "mtp_num_layers": DEPTHS,
        "qk_layernorm": not latent,
    }
    if latent:
        sizes = {"kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "q_lora_rank": 12}
        settings |= sizes | {"rope_type": "rope"}
    config = (MLATransformerConfig if latent else TransformerConfig)(**(settings | overrides))
    spec = layer_spec(config, engine=engine)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=128,
        position_embedding_type=position,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=mtp_block_spec(config, spec, use_transformer_engine=engine, mode=mode),
    )
    same_weights_everywhere(model)
    return model


def packing(lengths: list[int], padded: list[int] | None = None) -> Any:
    """Megatron's description of documents packed into one sequence."""
    from megatron.core.packed_seq_params import PackedSeqParams

    bounds = lambda sizes: torch.tensor([0, *sizes]).cumsum(0).to(torch.int32)  # noqa: E731
    real, whole = bounds(lengths), None if padded is None else bounds(padded)
    longest = max(padded or lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=whole,
        cu_seqlens_kv_padded=whole,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def positions_of(lengths: list[int]) -> Tensor:
    """Position ids [1, s] that start again with every document."""
    return torch.cat([torch.arange(n) for n in lengths])[None]


class _Enough(Exception):
    """The MTP block has run; what Megatron makes of its output is another test's."""


def hidden_by_depth(
    model: Any, ids: Tensor, position_ids: Tensor | None = None, packed: Any = None, padding: Tensor | None = None
) -> Tensor:
    """What a training pass computes: final-normed hidden states [1 + k, s/tp, b, h] of backbone and depths."""
    out: list[Tensor] = []

    def keep(module: Any, arguments: Any, output: Tensor) -> None:
        out.append(output)
        raise _Enough

    handle = model.mtp.register_forward_hook(keep)
    if position_ids is None:
        position_ids = torch.arange(ids.shape[1]).expand_as(ids)
    with contextlib.suppress(_Enough):
        model(ids, position_ids, None, packed_seq_params=packed, padding_mask=padding)
    handle.remove()
    return out[0].unflatten(0, (1 + model.config.mtp_num_layers, -1))


def decoded(model: Any, tokens: list[int], mode: str) -> Tensor:
    """Hidden states [k, n, h] of every step at every anchor of one document, from an incremental decoder with a cache.

    Entry (i, t) is filled where the document holds x_{t+i}; the others are NaN.
    """
    from bebop_megatron.evaluation.cache import make_window
    from bebop_megatron.evaluation.cached_model import CachedModel

    n, k = len(tokens), model.config.mtp_num_layers
    x = torch.tensor([tokens])
    cached = CachedModel(model, batch_size=1, capacity=n + k)
    result = torch.full((k, n, model.config.hidden_size), torch.nan)
    with cached.attached():
        at = torch.arange(n)[None]
        backbone = cached.backbone(x, make_window(at, length=n))
        for anchor in range(n - 1):
            # every anchor is the last confirmed one once: keys of step 1 up to it, none behind
            known = at[:, : anchor + 1]
            window = make_window(known, length=n + k)
            hidden = cached.mtp(0, backbone[: anchor + 1], x[:, 1 : anchor + 2], window)[-1:]
            for depth in range(1, min(k, n - 1 - anchor) + 1):
                if depth > 1:
                    last = None if mode == "chain" else torch.tensor([[anchor]])
                    window = make_window(torch.tensor([[anchor + depth - 1]]), length=n + k, last_key=last)
                    hidden = cached.mtp(0, hidden, x[:, anchor + depth, None], window)
                result[depth - 1, anchor] = hidden[0, 0]
    return result


def dense(model: Any, backbone: Tensor, ids: Tensor, mode: str) -> Tensor:
    """Hidden states [k, s, b, h] of every step, recomputed with ordinary attention under an explicit mask.

    `model` is one in mode `per-depth`. Depth i runs on the i * s rows of depths 1..i one after another: nothing is
    carried; the mask says who sees whom. Differentiable.
    """
    layer, s = model.mtp.layers[0], ids.shape[1]
    rows, tokens, places, outputs = [backbone], [], [], []
    table = model.rotary_pos_emb(s + model.config.mtp_num_layers)
    for depth in range(1, model.config.mtp_num_layers + 1):
        tokens.append(torch.nn.functional.pad(ids[:, depth:], (0, depth)))
        places.append(torch.arange(s) + depth - 1)
        embedded = model.embedding(input_ids=torch.cat(tokens, 1), position_ids=None)
        output = layer._proj_and_transformer_layer(
            hidden_states=torch.cat(rows),
            decoder_input=embedded,
            attention_mask=~visible(depth, torch.arange(s), torch.zeros(s), mode)[None, None],
            rotary_pos_emb=table[torch.cat(places)],
        )
        outputs.append(output[-s:])
        rows.append(output[-s:])
    return torch.stack(outputs)


def visible(depths: int, position: Tensor, first: Tensor, mode: str) -> Tensor:
    """Who sees whom among the rows of depths 1..k, one after another: [k * s, k * s] bool."""
    s = len(position)
    depth = torch.arange(1, depths + 1).repeat_interleave(s)
    at, start = position.repeat(depths), first.repeat(depths)
    step_one = (depth == 1) & (at <= at[:, None]) & (at >= start[:, None])
    own = (depth > 1) & (depth <= depth[:, None]) & (at == at[:, None])
    return step_one | own if mode == "chain" else step_one


def gradients(model: Any, outputs: Tensor, seed: int = 5) -> dict[str, Tensor]:
    """Gradients of all parameters that have one, for a fixed random slope of the depths' hidden states [k, s, b, h].

    The last k anchors of each sequence have no slope: not all of their steps have a token.
    """
    slope = torch.randn(outputs.shape, generator=torch.Generator().manual_seed(seed))
    slope[:, -model.config.mtp_num_layers :] = 0
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.grad = None
    (outputs * slope).sum().backward()
    # the backbone's hidden states share a tensor with the depths', and get zeros from them
    return {name: p.grad.clone() for name, p in parameters.items() if p.grad is not None and p.grad.any()}
