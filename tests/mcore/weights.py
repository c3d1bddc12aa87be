"""Weights that depend only on a parameter's name in the whole model: cut as a layout says, and put together again."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def global_name(name: str, chunk: Any) -> str:
    """The name a parameter has in a model that is not cut up."""
    from megatron.core import parallel_state

    if name == "output_layer.weight" and chunk.share_embeddings_and_output_weights:
        # a stage without the embedding holds it as its LM head
        return "embedding.word_embeddings.weight"
    parts = name.split(".")
    if name.startswith("decoder.layers."):
        parts[2] = str(chunk.decoder.layers[int(parts[2])].layer_number - 1)
    if "local_experts" in parts:
        at = parts.index("local_experts") + 1
        local = chunk.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
        parts[at] = str(int(parts[at]) + local * parallel_state.get_expert_model_parallel_rank())
    return ".".join(parts)


def _is_sharded(parameter: Any) -> bool:
    from megatron.core import parallel_state

    # experts are not cut by tensor parallelism here: gloo has no uneven all-gather
    return (
        getattr(parameter, "tensor_model_parallel", False)
        and getattr(parameter, "allreduce", True)
        and parallel_state.get_tensor_model_parallel_world_size() > 1
    )


def sections(name: str, size: int, config: Any) -> list[int]:
    """Blocks along the sharded dimension that are cut on their own: gate and up, or the inputs of a delta net."""
    if "linear_fc1" in name:
        return [size // 2] * 2
    keys = (config.linear_key_head_dim or 0) * (config.linear_num_key_heads or 0)
    values = (config.linear_value_head_dim or 0) * (config.linear_num_value_heads or 0)
    if "conv1d" in name:
        return [keys, keys, values]
    if "self_attention.in_proj.weight" in name:
        return [keys, keys, values, values, config.linear_num_value_heads, config.linear_num_value_heads]
    return [size]


def direction(name: str, shape: list[int] | torch.Size) -> torch.Tensor:
    """A fixed random direction for a weight."""
    generator = torch.Generator().manual_seed(int(hashlib.md5(f"{name} moves".encode()).hexdigest()[:8], 16))
    return torch.randn(shape, generator=generator)


def same_weights_everywhere(chunk: Any, scale: float = 0.15) -> None:
    """Initialise a model chunk by global parameter name and full shape, then cut, so that every layout starts equal."""
    from megatron.core import parallel_state

    tp = parallel_state.get_tensor_model_parallel_world_size()
    rank = parallel_state.get_tensor_model_parallel_rank()
    for name, parameter in chunk.named_parameters():
        sharded, shape = _is_sharded(parameter), list(parameter.shape)
        if sharded:
            shape[parameter.partition_dim] *= tp
        known = global_name(name, chunk)
        generator = torch.Generator().manual_seed(int(hashlib.md5(known.encode()).hexdigest()[:8], 16))
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 0.1 * value + (0.0 if chunk.config.layernorm_zero_centered_gamma else 1.0)
        else:
            value = scale * value
        if sharded:
            at = parameter.partition_dim
            blocks = value.split(sections(name, shape[at], chunk.config), at)
            value = torch.cat([block.chunk(tp, at)[rank] for block in blocks], at)
        parameter.data.copy_(value)


def whole(name: str, value: torch.Tensor, parameter: Any, config: Any) -> torch.Tensor:
    """Put the tensor-parallel shards of a gradient or weight together."""
    from megatron.core import parallel_state

    if not _is_sharded(parameter):
        return value.clone()
    tp, at = parallel_state.get_tensor_model_parallel_world_size(), parameter.partition_dim
    shards = [torch.empty_like(value) for _ in range(tp)]
    group = parallel_state.get_tensor_model_parallel_group()
    torch.distributed.all_gather(shards, value.contiguous(), group=group)
    sizes = [size // tp for size in sections(name, value.shape[at] * tp, config)]
    blocks = zip(*(shard.split(sizes, at) for shard in shards), strict=True)
    return torch.cat([block for section in blocks for block in section], at)
