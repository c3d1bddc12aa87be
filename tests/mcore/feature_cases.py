"""One case of the feature tests: a small model of some kind, and a layout; and Megatron's config of it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from tests.mcore.settings import QWEN


@dataclass(frozen=True)
class Case:
    """One model under one layout.

    `packed` puts two documents in each sequence; `frozen` takes the backbone out of training; `nudge` moves the first
    MTP layer's weights along `direction`.
    `mode` is train, eval, no-labels (the model sees no labels, as in RL) or last-masked (what no-labels must equal).
    `kind` names an entry of MODELS; `stages` is Megatron's pipeline layout, or the hybrid pattern with `|`; `steps`
    counts optimizer steps (0: gradients only); `saved_as` is the layout that writes the checkpoint it starts from.
    """

    kind: str = "dense"
    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    micro_batch: int = 1
    stages: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)
    ddp: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    steps: int = 0
    loss: str | None = "tv"
    joint: bool = False
    saved_as: Case | None = None
    mode: str = "train"
    packed: bool = False
    # --mtp-attention; None: Megatron's own layers
    attention: str | None = None
    frozen: bool = False
    nudge: float = 0.0


_BASE: dict[str, Any] = QWEN | {
    "num_layers": 4,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 24,
    "pipeline_dtype": torch.float32,
    "mtp_num_layers": 2,
    "mtp_loss_scaling_factor": 0.3,
}
_EXPERTS: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 12,
    "moe_shared_expert_intermediate_size": 12,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_grouped_gemm": False,
}
_LATENT: dict[str, Any] = {
    "multi_latent_attention": True,
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "qk_head_dim": 4,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 4,
    "apply_rope_fusion": False,
    "qk_layernorm": True,
}
_DELTA: dict[str, Any] = {
    "linear_conv_kernel_dim": 3,
    "linear_key_head_dim": 4,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "attention_output_gate": True,
    "layernorm_zero_centered_gamma": True,
}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "tied": {"tied": True},
    "distinct": {"mtp_use_repeated_layer": False},
    "moe": _EXPERTS,
    # DeepSeek-V3: router bias instead of a balancing loss
    "moe-mla": _EXPERTS | _LATENT | {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"},
    "mla": _LATENT,
    "hybrid": _DELTA | {"pattern": "G-G-G-*-/*-/*-", "num_layers": 8},
    "hybrid-moe": _DELTA | _EXPERTS | {"pattern": "GEGEGE*E/*E/*E", "num_layers": 8},
}


def make_config(case: Case) -> tuple[Any, dict[str, Any]]:
    """Megatron's config of a case, and what is not part of it: `tied`, `pattern`."""
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    settings = _BASE | MODELS[case.kind] | case.overrides
    extra = {key: settings.pop(key, None) for key in ("tied", "pattern")}
    if extra["pattern"] and case.stages:
        extra["pattern"] = case.stages
    elif case.stages:
        settings["pipeline_model_parallel_layout"] = case.stages
    if case.vpp:
        # batched point-to-point calls give wrong losses here with a virtual pipeline
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
        if not case.stages:
            settings["virtual_pipeline_model_parallel_size"] = case.vpp
    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    config = kind(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
        **({"sequence_parallel": case.tp > 1} | settings),
    )
    return config, extra
