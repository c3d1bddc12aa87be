"""Megatron's arguments of a Hugging Face config, and the way back: as flags, and compared with a checkpoint's."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from typing import Any

from bebop_megatron.bridges.families import Family, hybrid_pattern, rotary_of, sizes_of, text_config
from bebop_megatron.mcore.presets import PRESETS


@dataclass(frozen=True)
class Argument:
    """One Megatron argument: its name in the arguments that a checkpoint holds, its flag, its value."""

    name: str
    flag: str
    value: Any


def model_arguments(config: dict[str, Any], kind: str, mtp_layers: int, depth: int) -> list[Argument]:
    """The Megatron arguments that build this model as a `gpt` or `hybrid` one, with `depth` draft steps.

    Raises:
        ValueError: a depth that distinct MTP layers do not have.
    """
    sizes, text = sizes_of(config), text_config(config)
    rotary = rotary_of(text)
    if mtp_layers > 1 and depth != mtp_layers:
        raise ValueError(f"{mtp_layers} distinct MTP layers make {mtp_layers} draft steps, not {depth}")
    default_percent = next(s.value for s in PRESETS[sizes.family.preset] if s.field == "rotary_percent")
    percent = rotary.get("partial_rotary_factor", text.get("partial_rotary_factor", default_percent))
    base = rotary.get("rope_theta", text.get("rope_theta", 10_000))
    length = text["max_position_embeddings"]
    rows = [
        ("hidden_size", "--hidden-size", sizes.hidden),
        ("ffn_hidden_size", "--ffn-hidden-size", sizes.ffn),
        ("num_attention_heads", "--num-attention-heads", sizes.heads),
        ("group_query_attention", "--group-query-attention", True),
        ("num_query_groups", "--num-query-groups", sizes.groups),
        ("kv_channels", "--kv-channels", sizes.head_dim),
        ("seq_length", "--seq-length", min(length, 4096)),
        ("max_position_embeddings", "--max-position-embeddings", length),
        ("layernorm_epsilon", "--norm-epsilon", text.get("rms_norm_eps", 1e-6)),
        ("rotary_percent", "--rotary-percent", float(percent)),
        ("rotary_base", "--rotary-base", int(base)),
        ("untie_embeddings_and_output_weights", "--untie-embeddings-and-output-weights", not sizes.tied),
    ]
    if kind == "hybrid":
        rows.append(("hybrid_layer_pattern", "--hybrid-layer-pattern", hybrid_pattern(sizes, depth)))
    else:
        rows.append(("num_layers", "--num-layers", sizes.layers))
    if depth:
        rows.append(("mtp_num_layers", "--mtp-num-layers", depth))
        rows.append(("mtp_use_repeated_layer", "--mtp-use-repeated-layer", mtp_layers == 1))
    if any(sizes.linear):
        rows += [
            ("linear_key_head_dim", "--linear-key-head-dim", sizes.key_dim),
            ("linear_value_head_dim", "--linear-value-head-dim", sizes.value_dim),
            ("linear_num_key_heads", "--linear-num-key-heads", sizes.key_heads),
            ("linear_num_value_heads", "--linear-num-value-heads", sizes.value_heads),
            ("linear_conv_kernel_dim", "--linear-conv-kernel-dim", sizes.kernel),
        ]
        if kind == "gpt":
            rows.append(
                ("experimental_attention_variant", "--experimental-attention-variant", "gated_delta_net"),
            )
            rows.append(("linear_attention_freq", "--linear-attention-freq", [int(x) for x in sizes.linear]))
    if any(sizes.experts_in):
        # Megatron's default takes the softmax over the chosen experts, which is the normalised form
        normalised = text.get("norm_topk_prob", sizes.family.preset == "qwen3.5")
        rows += [
            ("num_experts", "--num-experts", sizes.experts),
            ("moe_router_topk", "--moe-router-topk", text["num_experts_per_tok"]),
            ("moe_ffn_hidden_size", "--moe-ffn-hidden-size", sizes.expert_ffn),
            ("moe_router_pre_softmax", "--moe-router-pre-softmax", not normalised),
            ("moe_router_load_balancing_type", "--moe-router-load-balancing-type", "none"),
            ("moe_token_dispatcher_type", "--moe-token-dispatcher-type", "alltoall"),
        ]
        if kind == "gpt" and not all(sizes.experts_in):
            rows.append(("moe_layer_freq", "--moe-layer-freq", [int(x) for x in sizes.experts_in]))
        if sizes.shared_ffn:
            rows.append(
                ("moe_shared_expert_intermediate_size", "--moe-shared-expert-intermediate-size", sizes.shared_ffn)
            )
            rows.append(("moe_shared_expert_gate", "--moe-shared-expert-gate", True))
    return [Argument(*row) for row in rows]


# set by `model_arguments` from the sizes, or not a flag
_NOT_FROM_PRESET = {"rotary_percent", "rotary_base", "mtp_use_repeated_layer", "moe_shared_expert_gate"}


def command_line(arguments: list[Argument], family: Family) -> list[str]:
    """The same as flags, with those of the family's preset."""
    flags: dict[str, list[str]] = {}
    for setting in PRESETS[family.preset]:
        if setting.field not in _NOT_FROM_PRESET and not setting.flag.startswith("no "):
            words = shlex.split(setting.flag)
            flags[words[0]] = words[1:]
    for argument in arguments:
        if argument.value is True:
            flags[argument.flag] = []
        elif argument.value is not False:
            text = str(argument.value).replace(" ", "") if isinstance(argument.value, list) else str(argument.value)
            flags[argument.flag] = [text]
    return [word for flag, values in flags.items() for word in (flag, *values)]


def _kinds_in(args: Any) -> tuple[list[bool], list[bool]]:
    """For each decoder layer of a Megatron run: gated delta net? experts?"""
    pattern = (getattr(args, "hybrid_layer_pattern", None) or "").split("/")[0].replace("|", "")
    if pattern:
        mixers, mlps = pattern[::2], pattern[1::2]
        if len(mixers) != len(mlps) or set(mixers) - set("G*") or set(mlps) - set("-E"):
            raise ValueError(
                f"hybrid_layer_pattern {args.hybrid_layer_pattern!r} is no Qwen: it alternates G or * with - or E"
            )
        return [symbol == "G" for symbol in mixers], [symbol == "E" for symbol in mlps]
    layers = args.num_layers
    linear, experts = getattr(args, "linear_attention_freq", None), getattr(args, "moe_layer_freq", 1)
    if isinstance(linear, int):
        linear = [(i + 1) % linear != 0 for i in range(layers)]
    if isinstance(experts, int):
        experts = [i % experts == 0 for i in range(layers)]
    has_experts = bool(getattr(args, "num_experts", None))
    return [bool(x) for x in linear or [0] * layers], [bool(x) and has_experts for x in experts]


def config_of_arguments(args: Any) -> dict[str, Any]:
    """What a Megatron checkpoint's arguments say, in the words of a Hugging Face config.

    Qwen3-Next and Qwen3.5-MoE are one model to Megatron: `qwen3_5_moe_text` stands for both.

    Raises:
        ValueError: the arguments describe none of the families.
    """
    linear, experts = _kinds_in(args)
    moe, gated = any(experts), bool(getattr(args, "attention_output_gate", False))
    kind = {(False, False): "qwen3", (True, False): "qwen3_moe", (False, True): "qwen3_5_text"}
    config: dict[str, Any] = {
        "model_type": kind.get((moe, gated), "qwen3_5_moe_text"),
        "hidden_size": args.hidden_size,
        "intermediate_size": args.ffn_hidden_size,
        "num_hidden_layers": len(linear),
        "num_attention_heads": args.num_attention_heads,
        "num_key_value_heads": args.num_query_groups if args.group_query_attention else args.num_attention_heads,
        "head_dim": args.kv_channels or args.hidden_size // args.num_attention_heads,
        "vocab_size": getattr(args, "padded_vocab_size", None) or args.vocab_size,
        "max_position_embeddings": args.max_position_embeddings,
        "rms_norm_eps": args.layernorm_epsilon,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
        "layer_types": ["linear_attention" if x else "full_attention" for x in linear],
        "rope_parameters": {"rope_theta": args.rotary_base, "partial_rotary_factor": args.rotary_percent},
    }
    if moe:
        config |= {
            "num_experts": args.num_experts,
            "num_experts_per_tok": args.moe_router_topk,
            "moe_intermediate_size": args.moe_ffn_hidden_size or args.ffn_hidden_size,
            "shared_expert_intermediate_size": args.moe_shared_expert_intermediate_size,
            "norm_topk_prob": not args.moe_router_pre_softmax,
            "mlp_only_layers": [i for i, x in enumerate(experts) if not x],
        }
    if gated:
        config |= {
            "linear_key_head_dim": args.linear_key_head_dim or 0,
            "linear_value_head_dim": args.linear_value_head_dim or 0,
            "linear_num_key_heads": args.linear_num_key_heads or 0,
            "linear_num_value_heads": args.linear_num_value_heads or 0,
            "linear_conv_kernel_dim": args.linear_conv_kernel_dim or 0,
        }
    return config


# how a run uses the model, or how long its sequences are: no matter for its weights
_FREE = {
    "seq_length",
    "max_position_embeddings",
    "moe_router_load_balancing_type",
    "moe_token_dispatcher_type",
    "mtp_num_layers",
    "mtp_use_repeated_layer",
    "hybrid_layer_pattern",
    "experimental_attention_variant",
    "linear_attention_freq",
    "moe_layer_freq",
    "num_layers",
    "moe_router_pre_softmax",
}


def differences(config: dict[str, Any], args: Any) -> list[str]:
    """Where a checkpoint's arguments describe another model than a Hugging Face config does."""
    sizes = sizes_of(config)
    out = []
    for row in model_arguments(config, "gpt", 0, 0):
        if row.name in _FREE or (row.name == "ffn_hidden_size" and all(sizes.experts_in)):
            continue
        received = getattr(args, row.name, None)
        if row.name == "num_query_groups" and not args.group_query_attention:
            received = args.num_attention_heads
        if row.name == "group_query_attention" or received == row.value:
            continue
        if isinstance(row.value, float) and received is not None and abs(received - row.value) <= 1e-6 * row.value:
            continue
        out.append(f"{row.name} is {received!r} in the checkpoint, {row.value!r} by config.json")
    linear, experts = _kinds_in(args)
    if tuple(linear) != sizes.linear:
        out.append(f"the checkpoint's gated delta net layers are {linear}, config.json's are {list(sizes.linear)}")
    if tuple(experts) != sizes.experts_in:
        out.append(f"the checkpoint's expert layers are {experts}, config.json's are {list(sizes.experts_in)}")
    for name, expected in (("attention_output_gate", sizes.gated), ("apply_layernorm_1p", sizes.gated)):
        received = bool(getattr(args, name, False) or (name == "apply_layernorm_1p" and _zero_centred(args)))
        if received != expected:
            out.append(f"{name} is {received} in the checkpoint, {sizes.family.name} has {expected}")
    return out


def _zero_centred(args: Any) -> bool:
    return bool(getattr(args, "layernorm_zero_centered_gamma", False))
