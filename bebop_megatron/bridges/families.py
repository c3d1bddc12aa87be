"""The model families: what a Hugging Face config says of sizes. Megatron's arguments for it are in `arguments.py`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.outputs import read_json


@dataclass(frozen=True)
class Family:
    """What the sizes do not say.

    `preset` is a key of `mcore.presets.PRESETS`, `mtp_count` the config's key for the number of physical MTP layers.
    `moe`: some layers have experts, in one tensor for all of them where `fused_experts`; `gated`: attention has an
    output gate and norms are deltas from 1; `linear`: which names its gated delta nets have, if it has any.
    """

    name: str
    preset: str
    model_types: tuple[str, ...]
    mtp_count: str
    moe: bool = False
    gated: bool = False
    linear: str | None = None
    fused_experts: bool = False


FAMILIES = (
    Family("qwen3", "qwen3", ("qwen3",), "mtp_num_hidden_layers"),
    Family("qwen3-moe", "qwen3", ("qwen3_moe",), "mtp_num_hidden_layers", moe=True),
    Family(
        "qwen3-next",
        "qwen3-next",
        ("qwen3_next",),
        "num_nextn_predict_layers",
        moe=True,
        gated=True,
        linear="next",
    ),
    Family("qwen3.5", "qwen3.5", ("qwen3_5_text", "qwen3_5"), "mtp_num_hidden_layers", gated=True, linear="3.5"),
    Family(
        "qwen3.5-moe",
        "qwen3.5",
        ("qwen3_5_moe_text", "qwen3_5_moe"),
        "mtp_num_hidden_layers",
        moe=True,
        gated=True,
        linear="3.5",
        fused_experts=True,
    ),
)
MTP_COUNTS = ("mtp_num_hidden_layers", "num_nextn_predict_layers")


@dataclass(frozen=True)
class Sizes:
    """One model's sizes. `linear` and `experts_in` say for each decoder layer what it is made of."""

    family: Family
    hidden: int
    heads: int
    groups: int
    head_dim: int
    vocab: int
    ffn: int
    linear: tuple[bool, ...]
    experts_in: tuple[bool, ...]
    tied: bool
    experts: int = 0
    expert_ffn: int = 0
    shared_ffn: int = 0
    key_heads: int = 0
    value_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    kernel: int = 0
    # where the text model's names begin, and whether there is a vision model beside it
    prefix: str = "model."
    multimodal: bool = False

    @property
    def layers(self) -> int:
        """Decoder layers."""
        return len(self.linear)

    @property
    def gated(self) -> bool:
        """Whether attention has an output gate, and norms are stored as deltas from 1."""
        return self.family.gated

    @property
    def keys(self) -> int:
        """Rows of a gated delta net's keys, all heads together."""
        return self.key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Rows of its values."""
        return self.value_heads * self.value_dim

    @property
    def attention_layer(self) -> int:
        """The last decoder layer with ordinary attention: what the inner layer of an MTP head looks like."""
        return max(i for i, linear in enumerate(self.linear) if not linear)

    def symbols(self) -> dict[str, int]:
        """Values of the symbols in `names.py`'s shapes."""
        rows = self.heads * self.head_dim
        return {
            "1": 1,
            "h": self.hidden,
            "2h": 2 * self.hidden,
            "vocab": self.vocab,
            "head_dim": self.head_dim,
            "heads_rows": rows,
            "query_rows": 2 * rows if self.gated else rows,
            "key_rows": self.groups * self.head_dim,
            "ffn": self.ffn,
            "experts": self.experts,
            "expert_ffn": self.expert_ffn,
            "expert_gate_up": 2 * self.expert_ffn,
            "shared_ffn": self.shared_ffn,
            "value_heads": self.value_heads,
            "value_dim": self.value_dim,
            "values": self.values,
            "conv": 2 * self.keys + self.values,
            "qkvz": 2 * self.keys + 2 * self.values,
            "ba": 2 * self.value_heads,
            "kernel": self.kernel,
        }


class _Config(dict[str, Any]):
    """What config.json holds; a key that is needed and not there is the folder's fault."""

    def __missing__(self, key: str) -> Any:
        raise ValueError(f"config.json has no {key!r}")


def read_config(folder: str | Path) -> dict[str, Any]:
    """A Hugging Face folder's config.json; its text model's part where there is a vision model too.

    Raises:
        ValueError: there is none, or it is no JSON; later, where a key is read that it lacks.
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise ValueError(f"{folder} has no config.json: give the folder of a Hugging Face model")
    return read_json(path, object_hook=_Config)


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The part of a config that describes the text model."""
    return config.get("text_config", config)


def family_of(config: dict[str, Any]) -> Family:
    """The family of a config.

    Raises:
        ValueError: it is none of those in the table.
    """
    kind = config.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = ", ".join(sorted(kind for family in FAMILIES for kind in family.model_types))
    raise ValueError(f"model_type {kind!r} is none that can be converted: {known}")


def rotary_of(config: dict[str, Any]) -> dict[str, Any]:
    """The config's rotary settings, under whichever name it has them; raises ValueError for scaling."""
    rotary = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = rotary.get("rope_type", rotary.get("type", "default"))
    if kind != "default":
        raise ValueError(f"rope_type {kind!r} is not converted: Megatron's arguments for it are yours to set")
    return rotary


def sizes_of(config: dict[str, Any]) -> Sizes:
    """Read the sizes out of config.json's content.

    Raises:
        ValueError: an unknown family, or something that the table has no names for.
    """
    family, text = family_of(config), text_config(config)
    if text.get("attention_bias") or text.get("use_sliding_window"):
        raise ValueError("models with attention_bias or use_sliding_window are not converted: the table has no names")
    if text.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act {text['hidden_act']!r} is not converted: these families have silu")
    rotary_of(text)
    layers = text["num_hidden_layers"]
    kinds = text.get("layer_types")
    if family.linear and not kinds:
        every = text.get("full_attention_interval", 4)
        kinds = ["full_attention" if (i + 1) % every == 0 else "linear_attention" for i in range(layers)]
    linear = tuple(kind == "linear_attention" for kind in kinds or ()) if family.linear else (False,) * layers
    if len(linear) != layers:
        raise ValueError(f"layer_types names {len(linear)} layers, num_hidden_layers is {layers}")
    if all(linear):
        raise ValueError("no layer has ordinary attention: an MTP head could not be built")
    step, dense = text.get("decoder_sparse_step") or 1, text.get("mlp_only_layers") or []
    experts_in = tuple(family.moe and i not in dense and (i + 1) % step == 0 for i in range(layers))
    heads = text["num_attention_heads"]
    optional = {
        "experts": text.get("num_experts", text.get("num_local_experts", 0)) if family.moe else 0,
        "expert_ffn": text.get("moe_intermediate_size", 0) if family.moe else 0,
        "shared_ffn": (text.get("shared_expert_intermediate_size") or 0) if family.moe and family.gated else 0,
    }
    if family.linear:
        optional |= {
            "key_heads": text["linear_num_key_heads"],
            "value_heads": text["linear_num_value_heads"],
            "key_dim": text["linear_key_head_dim"],
            "value_dim": text["linear_value_head_dim"],
            "kernel": text["linear_conv_kernel_dim"],
        }
    multimodal = "text_config" in config
    return Sizes(
        family,
        hidden=text["hidden_size"],
        heads=heads,
        groups=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        vocab=text["vocab_size"],
        ffn=text.get("intermediate_size") or optional["expert_ffn"],
        linear=linear,
        experts_in=experts_in,
        tied=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
        prefix="model.language_model." if multimodal else "model.",
        multimodal=multimodal,
        **optional,
    )


def mtp_layers_in(config: dict[str, Any]) -> int:
    """The number of physical MTP layers that a config states; 0 where it states none."""
    text = text_config(config)
    return next((int(text[key]) for key in MTP_COUNTS if text.get(key)), 0)


def with_mtp_layers(config: dict[str, Any], family: Family, count: int) -> dict[str, Any]:
    """A copy of a config that states `count` physical MTP layers under the family's own key."""
    config = json.loads(json.dumps(config))
    text = text_config(config)
    for key in MTP_COUNTS:
        text.pop(key, None)
    if count:
        text[family.mtp_count] = count
    return config


def hybrid_pattern(sizes: Sizes, depth: int) -> str:
    """HybridModel's pattern: two positions for each layer, then one MTP layer for each draft step."""
    mlp = ["E" if experts else "-" for experts in sizes.experts_in]
    main = "".join(("G" if linear else "*") + mlp[i] for i, linear in enumerate(sizes.linear))
    return main + f"/*{mlp[sizes.attention_layer]}" * depth


def model_kind(sizes: Sizes, requested: str | None = None) -> str:
    """`gpt` or `hybrid`: HybridModel is what Megatron builds MTP with beside gated delta nets."""
    return requested or ("hybrid" if any(sizes.linear) else "gpt")
