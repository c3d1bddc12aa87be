"""Norm, fused norm + linear, and attention for the CPU, with Transformer Engine's parameter names.

Equal names mean that a checkpoint written on a CPU loads on a GPU, and that the public converters' tables apply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from bebop_megatron.mcore.attachment import layout_of
from bebop_megatron.mcore.targets import document_bounds, shard_of
from bebop_megatron.platform.context_parallel import all_gather_sequence


def _normalise(x: Tensor, weight: Tensor, bias: Tensor | None, config: Any, eps: float) -> Tensor:
    scale = weight.float() + 1 if config.layernorm_zero_centered_gamma else weight.float()
    if config.normalization == "RMSNorm":
        return F.rms_norm(x.float(), (x.shape[-1],), scale, eps).to(x.dtype)
    return F.layer_norm(x.float(), (x.shape[-1],), scale, bias.float() if bias is not None else None, eps).to(x.dtype)


def _norm_parameter(size: int, config: Any, fill: float) -> torch.nn.Parameter:
    parameter = torch.nn.Parameter(torch.full((size,), fill, dtype=config.params_dtype))
    # each sequence-parallel rank sees other rows: Megatron sums the gradients of parameters marked like this
    parameter.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]
    return parameter


class CpuNorm(torch.nn.Module):
    """RMSNorm or LayerNorm over the last dimension, in fp32, with sequence parallelism.

    Shape: x [..., h] any float -> same shape and dtype.
    """

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__()
        self.config, self.eps = config, eps
        self.weight = _norm_parameter(hidden_size, config, 0.0 if config.layernorm_zero_centered_gamma else 1.0)
        self.bias = None if config.normalization == "RMSNorm" else _norm_parameter(hidden_size, config, 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return _normalise(x, self.weight, self.bias, self.config, self.eps)


class CpuLinear(torch.nn.Module):
    """Linear whose weight every tensor-parallel rank holds whole, as latent attention's down projections are.

    Shape: x [s, b, in] -> [s, b, out]; each sequence-parallel rank sees its own rows.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Callable[[Tensor], Any],
        parallel_mode: str | None = None,
        bias: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or bias:
            raise ValueError(f"the CPU linear is duplicated and has no bias, got parallel_mode={parallel_mode!r}")
        self.weight = torch.nn.Parameter(torch.empty(output_size, input_size, dtype=config.params_dtype))
        if config.perform_initialization:
            init_method(self.weight)
        # each sequence-parallel rank sees other rows: Megatron sums the gradients of parameters marked like this
        self.weight.sequence_parallel = config.sequence_parallel  # pyright: ignore[reportAttributeAccessIssue]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return F.linear(x, self.weight), None


class CpuLayerNormColumnParallelLinear(ColumnParallelLinear):
    """Norm and column-parallel linear in one module, as Transformer Engine lays them out.

    Shape: x [s, b, h] -> [s, b, out/tp]; parameters `layer_norm_weight` [h] and `weight` [out/tp, h].
    """

    def __init__(self, input_size: int, output_size: int, *, config: Any, **kwargs: Any) -> None:
        super().__init__(input_size, output_size, config=config, **kwargs)
        fill = 0.0 if config.layernorm_zero_centered_gamma else 1.0
        self.layer_norm_weight = _norm_parameter(input_size, config, fill)
        has_bias = config.normalization != "RMSNorm"
        self.layer_norm_bias = _norm_parameter(input_size, config, 0.0) if has_bias else None

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        eps = self.config.layernorm_epsilon
        x = _normalise(x, self.layer_norm_weight, self.layer_norm_bias, self.config, eps)
        return super().forward(x, *args, **kwargs)


class CpuDotProductAttention(MegatronModule):
    """Causal or full attention with grouped queries, packed sequences and context parallelism.

    Shape: q [s, b, heads/tp, d], k and v [s, b, groups/tp, d] -> [s, b, heads/tp * d]; packed: without b.
    Collectives: with context parallelism, one all-gather of k and of v over the cp group; one all-reduce each back.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ) -> None:
        super().__init__(config=config)
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.cp_group = groups.cp
        self.attn_mask_type = attn_mask_type
        self.softmax_scale = softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def _mask(self, q: Tensor, k: Tensor, attention_mask: Tensor | None, packed: Any) -> Tensor | None:
        """Boolean mask (True = attend) that broadcasts to [b, heads, sq, sk], or None for plain causal or full."""
        cp = self.cp_group.size()
        if packed is None and cp == 1:
            # Megatron's masks mark what must not be seen; a mask of another size belongs to another layer
            if attention_mask is not None and attention_mask.shape[-2:] == (q.shape[0], k.shape[0]):
                return ~attention_mask.bool()
            return None
        shard = shard_of(packed, q.shape[0], self.cp_group, layout_of(self.config), q.device)
        bounds = document_bounds(packed)[0]
        query_at = shard.positions()
        key_at = torch.cat([shard.positions(rank) for rank in range(cp)])
        seen = query_at[:, None] >= key_at
        if bounds is not None:
            query_in, key_in = (torch.bucketize(at, bounds[1:].long(), right=True) for at in (query_at, key_at))
            seen &= query_in[:, None] == key_in
        return seen

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        packed = packed_seq_params if packed_seq_params is not None and packed_seq_params.qkv_format == "thd" else None
        flat = query.dim() == 3
        if flat:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if self.cp_group.size() > 1:
            key, value = (all_gather_sequence(x, self.cp_group) for x in (key, value))
        mask = self._mask(query, key, attention_mask, packed)
        causal = mask is None and (attn_mask_type or self.attn_mask_type) is not AttnMaskType.no_mask
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=mask,
            dropout_p=self.dropout if self.training else 0.0,
            is_causal=causal,
            scale=self.softmax_scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        out = out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
        # latent attention looks for padded values in a packed output by its number of dimensions
        return out.squeeze(1) if flat else out
