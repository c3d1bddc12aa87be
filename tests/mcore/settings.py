"""What the small models of the tests have in common, whatever their size and layout."""

from __future__ import annotations

from typing import Any

import torch

# fields of Megatron's TransformerConfig: a Qwen3-shaped decoder, one MTP layer for all depths, nothing random or fused
QWEN: dict[str, Any] = {
    "use_cpu_initialization": True,
    "mtp_use_repeated_layer": True,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "qk_layernorm": True,
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
    "bias_dropout_fusion": False,
    "gradient_accumulation_fusion": False,
}


def layer_spec(config: Any, *, engine: bool) -> Any:
    """Megatron's spec of a GPTModel's layers, with Transformer Engine's parameter names or the local backend's."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_layer_with_transformer_engine_spec,
    )

    kinds: dict[str, Any] = {
        "num_experts": config.num_moe_experts,
        "qk_layernorm": config.qk_layernorm,
        "multi_latent_attention": config.multi_latent_attention,
    }
    if engine:
        return get_gpt_layer_with_transformer_engine_spec(**kinds)
    return get_gpt_layer_local_spec(normalization=config.normalization, **kinds)
