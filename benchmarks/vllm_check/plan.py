"""What is compared: two tiny models, two rules, three draft positions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

GAMMA = 3
TEMPERATURE = 1.0
# our name of a verification rule -> vLLM's draft_sample_method that makes it; None leaves vLLM's default, greedy drafts
RULES: dict[str, str | None] = {"rejection": "probabilistic", "target-only": None}


@dataclass(frozen=True)
class Model:
    """A tiny model of a family: its Hugging Face class and sizes.

    `dtype` is that of the exported weights and of the engine: vLLM's gated delta net on CPU needs bfloat16.
    """

    name: str
    architecture: str
    settings: dict[str, Any]
    dtype: str


_COMMON: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    # the kernels on CPU know head sizes of 64 and 128 only
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
MODELS = (
    # attention in every layer: the one Qwen3.5 that vLLM runs in float32 on CPU, so that nothing is rounded
    Model("qwen3.5", "Qwen3_5", _COMMON | {"num_hidden_layers": 2, "layer_types": ["full_attention"] * 2}, "float32"),
    Model(
        "qwen3-next",
        "Qwen3Next",
        _COMMON
        | {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 64,
            "shared_expert_intermediate_size": 64,
            "norm_topk_prob": True,
        },
        "bfloat16",
    ),
)


@dataclass(frozen=True)
class Size:
    """How long everything takes. More prompts make the standard errors smaller."""

    vocab_size: int = 512
    sequence: int = 128
    batch: int = 8
    backbone_steps: int = 160
    head_steps: int = 50
    lr: float = 3e-3
    head_lr: float = 1e-3
    corpus_bytes: int = 3_000_000
    holdout: float = 0.06
    prompts: int = 256
    prompt_tokens: int = 32
    new_tokens: int = 128
    decode_batch: int = 32
    seed: int = 1
