"""Activations that wait for the backward pass, by formula: rough, and said to be so.

After Korthikanti et al. (arXiv 2205.05198, section 4), with flash attention, no dropout, and what the paper's model
lacks: grouped queries, output gate, gated MLP, experts, gated delta net. Bytes a token of one layer: e bytes a value, h
hidden, q = heads x head size, kv likewise, f the MLP's size, t tensor-parallel ranks; / sp is / t under sequence
parallelism.

    attention     2 e h / sp (norm and its output) + e (3 q + 3 kv) / t (queries and keys before and after their norm,
                  values, output) + e 2 q / t with an output gate
    MLP           2 e h / sp + e 3 f / t (gate and up projection, their product)
    experts       2 e h / sp + 8 E / sp (scores) + top-k (2 e h + e 3 f) / sp + a shared expert's e 3 f / t
    delta net     2 e h / sp + e (2 K + 2 V) / t (projections) + e (2 K + V) / t (convolved)
                  + e (2 heads x key size + 2 V) / t
                  + e heads x key size x value size / 64 / t (a state for every 64 tokens)
    draft step    the MTP layer's own, and 7 e h / sp of norms, concatenation and projection

Full recomputation keeps e h / sp of each layer, and all of one layer at a time. A frozen backbone keeps nothing; one of
its layers is alive at a time. Pipeline stage r of p holds min(micro-batches, p - r) of them (1F1B); interleaved stages
hold p + (p - 1) / v in all, at most.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

_DELTA_CHUNK = 64
# of a hybrid model's pattern; other layers are counted as dense
_SYMBOLS = {"G": "delta", "*": "attention", "-": "dense", "E": "experts"}


@dataclass(frozen=True)
class Tokens:
    """A micro-batch on one rank: `rows` of it, and over how many ranks sequence parallelism spreads what is h wide."""

    rows: int
    spread: int

    @classmethod
    def of(cls, args: Any) -> Tokens:
        """Those of a launch."""
        rows = args.seq_length * args.micro_batch_size // args.context_parallel_size
        return cls(rows, args.tensor_model_parallel_size if args.sequence_parallel else 1)


def _value_bytes(args: Any) -> int:
    return 2 if args.bf16 or args.fp16 else 4


def _attention(args: Any, e: int, spread: int) -> float:
    t = args.tensor_model_parallel_size
    heads = args.num_attention_heads
    if args.multi_latent_attention:
        query = heads * (args.qk_head_dim + args.qk_pos_emb_head_dim)
        latent = (args.q_lora_rank or 0) + args.kv_lora_rank + args.qk_pos_emb_head_dim
        return 2 * e * args.hidden_size / spread + e * latent + e * (2 * query + 2 * heads * args.v_head_dim) / t
    q = heads * args.kv_channels
    kv = (args.num_query_groups if args.group_query_attention else heads) * args.kv_channels
    gate = 2 * q if args.attention_output_gate else 0
    return 2 * e * args.hidden_size / spread + e * (3 * q + 3 * kv + gate) / t


def _delta(args: Any, e: int, spread: int) -> float:
    t = args.tensor_model_parallel_size
    keys = args.linear_num_key_heads * args.linear_key_head_dim
    values = args.linear_num_value_heads * args.linear_value_head_dim
    wide = args.linear_num_value_heads * args.linear_key_head_dim
    state = args.linear_num_value_heads * args.linear_key_head_dim * args.linear_value_head_dim / _DELTA_CHUNK
    inner = (2 * keys + 2 * values) + (2 * keys + values) + (2 * wide + 2 * values) + state
    return 2 * e * args.hidden_size / spread + e * inner / t


def _dense(args: Any, e: int, spread: int) -> float:
    width = (3 if args.swiglu else 2) * args.ffn_hidden_size
    return 2 * e * args.hidden_size / spread + e * width / args.tensor_model_parallel_size


def _experts(args: Any, e: int, spread: int) -> float:
    factor = 3 if args.swiglu else 2
    routed = args.moe_router_topk * (2 * args.hidden_size + factor * args.moe_ffn_hidden_size)
    shared = factor * (args.moe_shared_expert_intermediate_size or 0) / args.tensor_model_parallel_size
    own = 2 * e * args.hidden_size + 8 * args.num_experts + e * routed
    return own / spread + e * shared


def layer_bytes(args: Any, kind: str) -> float:
    """Bytes a token of one layer; `kind` is attention or delta, with dense or experts, as in `delta+experts`.

    A hybrid model's layer is one of the two alone.
    """
    e, spread = _value_bytes(args), Tokens.of(args).spread
    parts = {"attention": _attention, "delta": _delta, "dense": _dense, "experts": _experts}
    return sum(parts[part](args, e, spread) for part in kind.split("+"))


def kinds(args: Any) -> list[str]:
    """The kind of each backbone layer, in order."""
    if args.hybrid_layer_pattern:
        main = args.hybrid_layer_pattern.split("/", 1)[0].replace("|", "")
        return [_SYMBOLS.get(symbol, "dense") for symbol in main]
    every = args.linear_attention_freq if args.experimental_attention_variant == "gated_delta_net" else None
    mixers = ["attention"] * args.num_layers
    if isinstance(every, int):
        mixers = ["attention" if (i + 1) % every == 0 else "delta" for i in range(args.num_layers)]
    elif every:
        mixers = ["delta" if linear else "attention" for linear in every]
    frequency = args.moe_layer_freq if args.num_experts else 0
    experts = (
        frequency if isinstance(frequency, list) else [frequency and i % frequency == 0 for i in range(len(mixers))]
    )
    return [f"{mixer}+{'experts' if moe else 'dense'}" for mixer, moe in zip(mixers, experts, strict=True)]


def mtp_kind(args: Any) -> str:
    """The kind of the MTP layer: ordinary attention, with the last layer's MLP."""
    if args.hybrid_layer_pattern:
        heads = args.hybrid_layer_pattern.split("/")
        return "+".join(_SYMBOLS.get(symbol, "dense") for symbol in heads[1]) if len(heads) > 1 else "attention+dense"
    return "attention+" + kinds(args)[-1].split("+")[1]


def in_flight(args: Any, stage: int, microbatches: int) -> float:
    """How many micro-batches a pipeline stage holds at its fullest."""
    stages, virtual = args.pipeline_model_parallel_size, args.virtual_pipeline_model_parallel_size
    if stages == 1:
        return 1
    if virtual:
        return min(stages + (stages - 1) / virtual, microbatches)
    return min(microbatches, stages - stage)


def backbone_bytes(args: Any, layers: list[str], stage: int, microbatches: int, frozen: bool) -> float:
    """Of the backbone's layers on one stage, of all micro-batches that it holds; `layers` their kinds."""
    tokens, e = Tokens.of(args), _value_bytes(args)
    if not layers:
        return 0
    each = [layer_bytes(args, kind) for kind in layers]
    boundary = e * args.hidden_size / tokens.spread
    if frozen:
        return tokens.rows * (max(each) + 2 * boundary)
    held = in_flight(args, stage, microbatches)
    if args.recompute_granularity != "full":
        return tokens.rows * held * sum(each)
    group = args.recompute_num_layers or 1
    if args.recompute_method == "block":
        kept = min(group, len(each))
        return tokens.rows * (held * (boundary * kept + sum(each[kept:])) + max(each))
    return tokens.rows * (held * boundary * math.ceil(len(each) / group) + sum(sorted(each)[-group:]))


def head_bytes(args: Any, depths: int, stage: int, microbatches: int) -> float:
    """Of the MTP layers, `depths` steps of them on one stage."""
    tokens, e = Tokens.of(args), _value_bytes(args)
    step = layer_bytes(args, mtp_kind(args)) + 7 * e * args.hidden_size / tokens.spread
    held = in_flight(args, stage, microbatches)
    if args.recompute_granularity == "full":
        boundary = 2 * e * args.hidden_size / tokens.spread
        return tokens.rows * (held * depths * boundary + step)
    return tokens.rows * held * depths * step


def logits_bytes(args: Any, columns: int) -> float:
    """Of the language model's own loss: logits in the model's type and in fp32."""
    return Tokens.of(args).rows * columns * (_value_bytes(args) + 4)
