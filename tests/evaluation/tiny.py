"""Tiny Megatron models for decoding, and the slow way to compute what decoding does: full forward passes."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tests.mcore.settings import QWEN, layer_spec
from tests.mcore.weights import sections

VOCAB, POSITIONS = 32, 96


@contextmanager
def megatron_world() -> Iterator[None]:
    """Megatron on the CPU, a world of one process; taken down again at the end."""
    from bebop_megatron.platform import enter, leave

    threads = torch.get_num_threads()
    # these tensors are too small to share, and idle threads spin
    torch.set_num_threads(1)
    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        enter()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import (
            initialize_rng_tracker,
            model_parallel_cuda_manual_seed,
        )

        os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}
        torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        initialize_rng_tracker(force_reset=True)
        model_parallel_cuda_manual_seed(1)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()
            for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
                os.environ.pop(name)
            leave()
            torch.set_num_threads(threads)


DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
}
# Qwen3-Next and Qwen3.5: three delta nets to an attention layer, in either of Megatron's classes
DELTA_NETS: dict[str, dict[str, Any]] = {
    "hybrid": DELTA_NET | {"pattern": "G-G-*-/*-/*-/*-", "num_layers": 6},
    "hybrid-experts": DELTA_NET
    | {
        "pattern": "GEGE*E/*E/*E/*E",
        "num_layers": 6,
        "num_moe_experts": 4,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 32,
        "moe_shared_expert_intermediate_size": 16,
        "moe_shared_expert_gate": True,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
    },
    "gpt-variant": DELTA_NET
    | {
        "num_layers": 4,
        "experimental_attention_variant": "gated_delta_net",
        "linear_attention_freq": 4,
        "fused_norms": True,
    },
}


def _weights(model: Any, seed: int, sharpness: float) -> None:
    """Full-size random weights, cut to this rank's share, so that every tensor-parallel size starts equal."""
    world, rank = model.pg_collection.tp.size(), model.pg_collection.tp.rank()
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        shape = list(parameter.shape)
        sharded = getattr(parameter, "tensor_model_parallel", False) and world > 1
        if sharded:
            shape[parameter.partition_dim] *= world
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 0.2 * value + (0 if model.config.layernorm_zero_centered_gamma else 1)
        else:
            value = value * (sharpness if "output_layer" in name or "embedding" in name else 0.2)
        if sharded:
            at = parameter.partition_dim
            blocks = value.split(sections(name, shape[at], model.config), at)
            value = torch.cat([block.chunk(world, at)[rank] for block in blocks], at)
        parameter.data.copy_(value)


def build(
    *,
    vocab_size: int = VOCAB,
    position: str = "rope",
    tied: bool = False,
    latent: bool = False,
    fused_norms: bool = False,
    pattern: str | None = None,
    sharpness: float = 0.4,
    seed: int = 0,
    **overrides: Any,
) -> Any:
    """A two-layer model with one MTP layer for three depths; random weights, peaked distributions.

    With `pattern` a HybridModel of these layers.
    """
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.experimental_attention_variant_module_specs import (
        get_transformer_block_with_experimental_attention_variant_spec,
    )
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings: dict[str, Any] = QWEN | {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": None if latent else 2,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": parallel_state.get_tensor_model_parallel_world_size(),
        "mtp_num_layers": 3,
        "pipeline_dtype": torch.float32,
        "qk_layernorm": not latent,
    }
    config = (MLATransformerConfig if latent else TransformerConfig)(**(settings | overrides))
    common: dict[str, Any] = {
        "vocab_size": vocab_size,
        "max_sequence_length": POSITIONS,
        "position_embedding_type": position,
        "share_embeddings_and_output_weights": tied,
    }
    if pattern:
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        model: Any = HybridModel(config, hybrid_stack_spec, hybrid_layer_pattern=pattern, **common)
        _weights(model, seed, sharpness)
        return model
    spec = layer_spec(config, engine=fused_norms)
    decoder: Any = spec
    if config.experimental_attention_variant is not None:
        decoder = get_transformer_block_with_experimental_attention_variant_spec(config)
    mtp = get_gpt_mtp_block_spec(config, spec, use_transformer_engine=fused_norms) if config.mtp_num_layers else None
    model = GPTModel(config, decoder, mtp_block_spec=mtp, **common)
    _weights(model, seed, sharpness)
    return model


def prompts(*lengths: int, vocab_size: int = VOCAB) -> list[list[int]]:
    """Random prompts of these lengths."""
    generator = torch.Generator().manual_seed(sum(lengths))
    return [torch.randint(0, vocab_size, (n,), generator=generator).tolist() for n in lengths]


def _causal(length: int) -> Tensor:
    """Megatron's convention: True must not be seen."""
    return torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)


@torch.no_grad()
def full_logits(model: Any, tokens: list[int]) -> Tensor:
    """Logits [n, v] of Megatron's own forward pass, without caches."""
    ids, positions = torch.tensor([tokens]), torch.arange(len(tokens))[None]
    if model.position_embedding_type == "mrope":
        positions = positions.expand(3, 1, -1)
    logits = model.eval()(ids, positions, _causal(len(tokens)), runtime_gather_output=True)
    return logits[0].float()


@torch.no_grad()
def full_hidden(model: Any, tokens: list[int]) -> Tensor:
    """Final-normed hidden states [n, 1, h] of the backbone, without caches."""
    out: list[Tensor] = []
    handle = model.decoder.register_forward_hook(lambda module, args, output: out.append(output))
    full_logits(model, tokens)
    handle.remove()
    return out[0]


@torch.no_grad()
def draft_logits(model: Any, tokens: list[int], drafts: list[int], attention: str = "chain") -> Tensor:
    """Logits [gamma, v] of every draft step at the last anchor, recomputed from nothing with explicit masks.

    `tokens` are x_0 .. x_{t+1}; step i > 1 takes `drafts[i - 2]`. The dense sequence is anchors 0..t at depth
    1, then the chain's steps 2, 3, ...
    """
    anchors = len(tokens) - 1
    states = [full_hidden(model, tokens)[:anchors]]
    layer, logits = model.mtp.layers[0], []
    for step in range(1, len(drafts) + 1):
        length = anchors + step - 1
        mask = _causal(length)
        if attention == "first-depth":
            # no step may see a key of a deeper one, not even its own
            mask[..., anchors:, anchors:] = True
        inputs = torch.tensor([tokens[1:] + drafts[: step - 1]])
        positions = torch.arange(length)[None]
        rotary = model.rotary_pos_emb(length) if hasattr(model, "rotary_pos_emb") else None
        output = layer.eval().forward_single_position(
            hidden_states=torch.cat(states),
            next_token_ids=inputs,
            position_ids=positions + 1,
            embedding=model.embedding,
            attention_mask=mask,
            rotary_pos_emb=rotary,
        )
        states.append(output[-1:])
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits.append(model.output_layer(output[-1:], weight=weight)[0][0, 0])
    return torch.stack(logits).float()
