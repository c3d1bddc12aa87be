"""What the Qwen families' checkpoints need of a Megatron config, by name.

Sizes are the checkpoint's own. A preset holds what a family has whatever its size; a config that differs would load
the weights and compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F


@dataclass(frozen=True)
class Setting:
    """One field of a Megatron config, its value in the family, and the flag that sets it."""

    field: str
    value: Any
    flag: str


_QWEN = (
    Setting("normalization", "RMSNorm", "--normalization RMSNorm"),
    Setting("add_bias_linear", False, "--disable-bias-linear"),
    Setting("gated_linear_unit", True, "--swiglu"),
    Setting("activation_func", F.silu, "--swiglu"),
    Setting("qk_layernorm", True, "--qk-layernorm"),
    Setting("position_embedding_type", "rope", "--position-embedding-type rope"),
    Setting("attention_dropout", 0.0, "--attention-dropout 0"),
    Setting("hidden_dropout", 0.0, "--hidden-dropout 0"),
    # one block, applied at every depth: what the public converters map and the engines serve
    Setting("mtp_use_repeated_layer", True, "--mtp-use-repeated-layer"),
)
_LINEAR_ATTENTION = (
    Setting("layernorm_zero_centered_gamma", True, "--apply-layernorm-1p"),
    Setting("attention_output_gate", True, "--attention-output-gate"),
    Setting("rotary_percent", 0.25, "--rotary-percent 0.25"),
    Setting("rotary_base", 10_000_000, "--rotary-base 10000000"),
)
PRESETS: dict[str, tuple[Setting, ...]] = {
    "qwen3": (
        *_QWEN,
        Setting("layernorm_zero_centered_gamma", False, "no --apply-layernorm-1p"),
        Setting("attention_output_gate", False, "no --attention-output-gate"),
        Setting("rotary_percent", 1.0, "--rotary-percent 1.0"),
        Setting("rotary_base", 1_000_000, "--rotary-base 1000000"),
    ),
    "qwen3-next": (
        *_QWEN,
        *_LINEAR_ATTENTION,
        Setting("moe_shared_expert_gate", True, "--moe-shared-expert-gate"),
    ),
    "qwen3.5": (*_QWEN, *_LINEAR_ATTENTION),
}


def preset(name: str) -> dict[str, Any]:
    """Field -> value of a family, for a Megatron config built in Python.

    Raises:
        ValueError: an unknown family.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(sorted(PRESETS))}")
    return {setting.field: setting.value for setting in PRESETS[name]}


def require_preset(config: Any, name: str) -> None:
    """Refuse a config that differs from its family: a GPTModelConfig, HybridModelConfig or NeMo's.

    Fields that this kind of config does not have are not compared.

    Raises:
        ValueError: with every field that differs, and its flag.
    """
    preset(name)
    missing = object()
    wrong = []
    for setting in PRESETS[name]:
        received = getattr(config, setting.field, missing)
        if received is not missing and received != setting.value:
            wrong.append(f"{setting.field} is {received!r}, {name} has {setting.value!r} ({setting.flag})")
    if wrong:
        raise ValueError(f"this model is no {name}: {'; '.join(wrong)}")
