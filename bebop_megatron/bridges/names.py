"""Which Hugging Face tensors are which Megatron tensors, for Qwen3, Qwen3-MoE, Qwen3-Next and Qwen3.5, MTP included.

Data only. It is this package's own table, complete without any other converter: a tensor that it does not name is
reported, never dropped. Megatron names are GPTModel's; `checkpoint_keys.py` knows HybridModel's and stacked layers.

`{e}` is an expert; a name with `[e]` is that expert's slab of one tensor that holds all of them. Shapes are written in
the symbols of `families.Sizes.symbols`.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Rule:
    """Names below a layer (or below the model), how they are laid out, and the shapes on the Hugging Face side."""

    hf: tuple[str, ...]
    megatron: tuple[str, ...]
    shapes: tuple[str, ...]
    layout: str = "same"


def _one(hf: str, megatron: str, shape: str, layout: str = "same") -> Rule:
    return Rule((hf,), (megatron,), (shape,), layout)


EMBEDDING = _one("embed_tokens.weight", "embedding.word_embeddings.weight", "vocab h")
FINAL_NORM = _one("norm.weight", "decoder.final_layernorm.weight", "h")
LM_HEAD = _one("lm_head.weight", "output_layer.weight", "vocab h")

_QKV = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
ATTENTION = (
    _one("input_layernorm.weight", "self_attention.linear_qkv.layer_norm_weight", "h"),
    # with an output gate, query_rows is twice heads * head_dim
    Rule(_QKV, ("self_attention.linear_qkv.weight",), ("query_rows h", "key_rows h", "key_rows h"), "qkv"),
    _one("self_attn.q_norm.weight", "self_attention.q_layernorm.weight", "head_dim"),
    _one("self_attn.k_norm.weight", "self_attention.k_layernorm.weight", "head_dim"),
    _one("self_attn.o_proj.weight", "self_attention.linear_proj.weight", "h heads_rows"),
)

_CONV = tuple(f"self_attention.conv1d.weight.{part}" for part in ("query", "key", "value"))
_IN_PROJ = tuple(f"self_attention.in_proj.weight.{part}" for part in ("query", "key", "value", "z", "beta", "alpha"))
_DELTA_NET = (
    _one("input_layernorm.weight", "self_attention.in_proj.layer_norm_weight", "h"),
    Rule(("linear_attn.conv1d.weight",), _CONV, ("conv 1 kernel",), "delta-qkv"),
    _one("linear_attn.A_log", "self_attention.A_log", "value_heads"),
    _one("linear_attn.dt_bias", "self_attention.dt_bias", "value_heads"),
    # the one norm of these families that Hugging Face stores plainly; in Megatron it is a delta as all others are
    _one("linear_attn.norm.weight", "self_attention.out_norm.weight", "value_dim", "minus-one"),
    _one("linear_attn.out_proj.weight", "self_attention.out_proj.weight", "h values"),
)
DELTA_NET_NEXT = (
    *_DELTA_NET,
    Rule(("linear_attn.in_proj_qkvz.weight",), _IN_PROJ[:4], ("qkvz h",), "delta-qkvz-by-head"),
    Rule(("linear_attn.in_proj_ba.weight",), _IN_PROJ[4:], ("ba h",), "delta-ba-by-head"),
)
DELTA_NET_35 = (
    *_DELTA_NET,
    Rule(("linear_attn.in_proj_qkv.weight",), _IN_PROJ[:3], ("conv h",), "delta-qkv"),
    _one("linear_attn.in_proj_z.weight", _IN_PROJ[3], "values h"),
    _one("linear_attn.in_proj_b.weight", _IN_PROJ[4], "value_heads h"),
    _one("linear_attn.in_proj_a.weight", _IN_PROJ[5], "value_heads h"),
)

DENSE_MLP = (
    _one("post_attention_layernorm.weight", "mlp.linear_fc1.layer_norm_weight", "h"),
    Rule(("mlp.gate_proj.weight", "mlp.up_proj.weight"), ("mlp.linear_fc1.weight",), ("ffn h", "ffn h"), "halves"),
    _one("mlp.down_proj.weight", "mlp.linear_fc2.weight", "h ffn"),
)
MOE = (
    _one("post_attention_layernorm.weight", "pre_mlp_layernorm.weight", "h"),
    _one("mlp.gate.weight", "mlp.router.weight", "experts h"),
)
_FC1, _FC2 = "mlp.experts.experts.linear_fc1.weight[e]", "mlp.experts.experts.linear_fc2.weight[e]"
# repeated for every expert
SEPARATE_EXPERTS = (
    Rule(
        ("mlp.experts.{e}.gate_proj.weight", "mlp.experts.{e}.up_proj.weight"),
        (_FC1,),
        ("expert_ffn h", "expert_ffn h"),
        "halves",
    ),
    _one("mlp.experts.{e}.down_proj.weight", _FC2, "h expert_ffn"),
)
FUSED_EXPERTS = (
    _one("mlp.experts.gate_up_proj[e]", _FC1, "expert_gate_up h"),
    _one("mlp.experts.down_proj[e]", _FC2, "h expert_ffn"),
)
SHARED_EXPERT = (
    Rule(
        ("mlp.shared_expert.gate_proj.weight", "mlp.shared_expert.up_proj.weight"),
        ("mlp.shared_experts.linear_fc1.weight",),
        ("shared_ffn h", "shared_ffn h"),
        "halves",
    ),
    _one("mlp.shared_expert.down_proj.weight", "mlp.shared_experts.linear_fc2.weight", "h shared_ffn"),
    _one("mlp.shared_expert_gate.weight", "mlp.shared_experts.gate_weight", "1 h"),
)

# around an MTP layer's inner layer; `fc` reads [embedding, hidden], as `eh_proj` does
MTP_OUTER = (
    _one("fc.weight", "eh_proj.weight", "h 2h"),
    _one("pre_fc_norm_embedding.weight", "enorm.weight", "h"),
    _one("pre_fc_norm_hidden.weight", "hnorm.weight", "h"),
    _one("norm.weight", "final_layernorm.weight", "h"),
)

# the same tensors where Megatron did not fuse a norm with the linear layer behind it
UNFUSED_NORMS = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "self_attention.in_proj.layer_norm_weight": "input_layernorm.weight",
    "mlp.linear_fc1.layer_norm_weight": "pre_mlp_layernorm.weight",
}

# modules that keep an extra state in a checkpoint on some backend, by what a layer is made of: Megatron asks for it,
# and it is empty unless training used fp8
_ATTENTION = ("linear_qkv", "linear_proj", "q_layernorm", "k_layernorm", "core_attention")
STATES_ATTENTION = tuple(f"self_attention.{module}" for module in _ATTENTION)
STATES_DELTA_NET = tuple(f"self_attention.{module}" for module in ("in_proj", "out_norm", "out_proj"))
STATES_DENSE_MLP = ("mlp.linear_fc1", "mlp.linear_fc2")
STATES_MOE = ("pre_mlp_layernorm", "mlp.experts.experts.linear_fc1[e]", "mlp.experts.experts.linear_fc2[e]")
STATES_SHARED_EXPERT = ("mlp.shared_experts.linear_fc1", "mlp.shared_experts.linear_fc2")
STATES_MTP = ("enorm", "hnorm", "eh_proj", "final_layernorm")
