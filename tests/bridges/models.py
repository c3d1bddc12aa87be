"""Tiny random Hugging Face folders of every family, made by transformers' own classes, with an MTP head beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

_COMMON: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts": 4, "num_experts_per_tok": 2, "norm_topk_prob": True}
_DELTA = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_SHARED = {"shared_expert_intermediate_size": 24}
# class, settings, MTP layers, the config's key for them
MODELS: dict[str, tuple[str, dict[str, Any], int, str]] = {
    "qwen3": ("Qwen3", {}, 1, "mtp_num_hidden_layers"),
    "qwen3-tied": ("Qwen3", {"tie_word_embeddings": True}, 1, "mtp_num_hidden_layers"),
    "qwen3-two-layers": ("Qwen3", {}, 2, "mtp_num_hidden_layers"),
    "qwen3-moe": ("Qwen3Moe", _EXPERTS, 1, "mtp_num_hidden_layers"),
    "qwen3-next": ("Qwen3Next", _EXPERTS | _DELTA | _SHARED, 1, "num_nextn_predict_layers"),
    "qwen3.5": ("Qwen3_5", _DELTA, 1, "mtp_num_hidden_layers"),
    "qwen3.5-attention": ("Qwen3_5", _DELTA | {"layer_types": ["full_attention"] * 4}, 1, "mtp_num_hidden_layers"),
    "qwen3.5-moe": ("Qwen3_5Moe", _EXPERTS | _DELTA | _SHARED, 1, "mtp_num_hidden_layers"),
}


def make_model(name: str) -> Any:
    """A model in fp32 with every parameter random; norms near what means 1."""
    import transformers

    kind, settings, _, _ = MODELS[name]
    settings = _COMMON | settings
    if kind == "Qwen3_5Moe":
        settings = {key: value for key, value in settings.items() if key not in ("norm_topk_prob", "intermediate_size")}
    text = "Text" if kind.startswith("Qwen3_5") else ""
    config = getattr(transformers, f"{kind}{text}Config")(**settings)
    config._attn_implementation = "eager"
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{kind}ForCausalLM")(config).float().eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            value = torch.randn_like(parameter) * (0.1 if "norm" in key else 0.25)
            if "norm" in key and float(parameter.float().mean()) > 0.5:
                value += 1
            parameter.copy_(value)
    return model


def mtp_tensors(
    sizes: dict[str, Tensor], layers: int, hidden: int, attention_layer: int, zero: bool
) -> dict[str, Tensor]:
    """Random `mtp.*` tensors whose inner layers have the shapes of a decoder layer."""
    generator = torch.Generator().manual_seed(5)
    out = {}
    for k in range(layers):
        start = f"model.layers.{attention_layer}."
        for name, value in sizes.items():
            if name.startswith(start):
                out[f"mtp.layers.{k}.{name.removeprefix(start)}"] = torch.randn(value.shape, generator=generator) * 0.25
    out["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) * 0.25
    for name in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        out[f"mtp.{name}.weight"] = torch.randn(hidden, generator=generator)
    for name, value in out.items():
        if "norm" in name:
            out[name] = 0.1 * value + (0 if zero else 1)
    return out


def separate_experts(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Experts one by one, as `mtp.*` experts are stored."""
    out = {}
    for name, value in tensors.items():
        if name.endswith("experts.gate_up_proj"):
            for e, expert in enumerate(value):
                for part, half in zip(("gate_proj", "up_proj"), expert.chunk(2), strict=True):
                    out[name.replace("gate_up_proj", f"{e}.{part}.weight")] = half.contiguous()
        elif name.endswith("experts.down_proj"):
            for e, expert in enumerate(value):
                out[name.replace("down_proj", f"{e}.down_proj.weight")] = expert.contiguous()
        else:
            out[name] = value
    return out


def make_folder(
    name: str, folder: Path, *, with_mtp: bool = True, dtype: torch.dtype = torch.float32, fused_mtp: bool = False
) -> dict[str, Tensor]:
    """Write a folder and return its tensors."""
    _, _, layers, key = MODELS[name]
    model = make_model(name)
    model.to(dtype).save_pretrained(folder)
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    config = json.loads((folder / "config.json").read_text())
    if with_mtp:
        kinds = config.get("layer_types") or ["full_attention"] * 4
        last = max(i for i, kind in enumerate(kinds) if kind == "full_attention")
        zero = name.startswith(("qwen3-next", "qwen3.5"))
        head = mtp_tensors(tensors, layers, config["hidden_size"], last, zero)
        if not fused_mtp:
            head = separate_experts(head)
        tensors |= {key: value.to(dtype) for key, value in head.items()}
        config[key] = layers
        save_file(tensors, file, metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(config, indent=2))
    (folder / "tokenizer.json").write_text("{}")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    return tensors


def read_folder(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, whatever its files."""
    out: dict[str, Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        for key, value in load_file(file).items():
            assert key not in out, f"{key} is in two files"
            out[key] = value
    return out


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Names, types, shapes and every bit."""
    assert sorted(actual) == sorted(expected)
    for name, value in expected.items():
        assert actual[name].dtype == value.dtype, name
        assert actual[name].shape == value.shape, name
        assert torch.equal(actual[name].view(torch.uint8), value.view(torch.uint8)), name
