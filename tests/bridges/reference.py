"""The MTP block of the Qwen families in plain torch, from Hugging Face tensors: what engines compute.

Transformers' classes drop `mtp.*`, so this is written from the definition of each part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Tensors = dict[str, Tensor]


class MtpBlock:
    """One MTP layer; `config` is config.json's content.

    Shape: hidden, embedding [b, s, h] -> [b, s, h], final-normed.
    """

    def __init__(self, tensors: Tensors, config: dict[str, Any], layer: int = 0) -> None:
        start = f"mtp.layers.{layer}."
        self.inner = {k.removeprefix(start): v for k, v in tensors.items() if k.startswith(start)}
        self.outer = {k.removeprefix("mtp."): v for k, v in tensors.items() if k.startswith("mtp.")}
        self.config = config
        self.gated = config["model_type"] != "qwen3" and config["model_type"] != "qwen3_moe"

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        scale = 1 + weight if self.gated else weight
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * scale

    def rotate(self, x: Tensor) -> Tensor:
        """Shape: [b, heads, s, d] -> same; the first `partial_rotary_factor` of d turns, half by half."""
        rotary = self.config["rope_parameters"]
        width = int(x.shape[-1] * rotary.get("partial_rotary_factor", 1.0))
        speed = rotary["rope_theta"] ** (-torch.arange(0, width, 2).float() / width)
        angle = torch.arange(x.shape[2])[:, None] * speed
        sin, cos = angle.sin(), angle.cos()
        first, second, rest = x.split([width // 2, width // 2, x.shape[-1] - width], -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def attention(self, x: Tensor) -> Tensor:
        w, (b, s, _) = self.inner, x.shape
        heads, groups, d = (self.config[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim"))
        query, gate = (x @ w["self_attn.q_proj.weight"].T).view(b, s, heads, -1), None
        if self.gated:
            query, gate = query.chunk(2, -1)
        key = (x @ w["self_attn.k_proj.weight"].T).view(b, s, groups, d)
        value = (x @ w["self_attn.v_proj.weight"].T).view(b, s, groups, d).transpose(1, 2)
        query = self.rotate(self.norm(query, w["self_attn.q_norm.weight"]).transpose(1, 2))
        key = self.rotate(self.norm(key, w["self_attn.k_norm.weight"]).transpose(1, 2))
        key, value = (t.repeat_interleave(heads // groups, 1) for t in (key, value))
        scores = query @ key.transpose(-1, -2) / d**0.5
        scores = scores.masked_fill(torch.ones(s, s).triu(1).bool(), float("-inf"))
        out = (scores.softmax(-1) @ value).transpose(1, 2)
        if gate is not None:
            out = out * gate.sigmoid()
        return out.reshape(b, s, -1) @ w["self_attn.o_proj.weight"].T

    def swiglu(self, x: Tensor, name: str) -> Tensor:
        gate, up, down = (self.inner[f"{name}.{part}_proj.weight"] for part in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def mlp(self, x: Tensor) -> Tensor:
        if "mlp.gate.weight" not in self.inner:
            return self.swiglu(x, "mlp")
        weights, chosen = (x @ self.inner["mlp.gate.weight"].T).softmax(-1).topk(self.config["num_experts_per_tok"])
        weights = weights / weights.sum(-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in range(len(self.inner["mlp.gate.weight"])):
            share = (weights * (chosen == expert)).sum(-1, keepdim=True)
            out = out + share * self.swiglu(x, f"mlp.experts.{expert}")
        if "mlp.shared_expert_gate.weight" in self.inner:
            gate = (x @ self.inner["mlp.shared_expert_gate.weight"].T).sigmoid()
            out = out + gate * self.swiglu(x, "mlp.shared_expert")
        return out

    def __call__(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        parts = [self.norm(embedding, self.outer["pre_fc_norm_embedding.weight"])]
        parts.append(self.norm(hidden, self.outer["pre_fc_norm_hidden.weight"]))
        x = torch.cat(parts, -1) @ self.outer["fc.weight"].T
        x = x + self.attention(self.norm(x, self.inner["input_layernorm.weight"]))
        x = x + self.mlp(self.norm(x, self.inner["post_attention_layernorm.weight"]))
        return self.norm(x, self.outer["norm.weight"])


def draft_states(tensors: Tensors, config: dict[str, Any], hidden: Tensor, ids: Tensor, depths: int) -> Tensor:
    """Hidden states [depths, b, s, h] of each draft step; step i is given the embedding of token t+i.

    Distinct layers take turns; the last i positions of step i have no token and are to be ignored.
    """
    count = 1 + max(int(name.split(".")[2]) for name in tensors if name.startswith("mtp.layers."))
    blocks = [MtpBlock(tensors, config, layer) for layer in range(count)]
    out = []
    for depth in range(1, depths + 1):
        embedding = F.embedding(ids.roll(-depth, 1), tensors["model.embed_tokens.weight"])
        hidden = blocks[(depth - 1) % count](hidden, embedding)
        out.append(hidden)
    return torch.stack(out)
