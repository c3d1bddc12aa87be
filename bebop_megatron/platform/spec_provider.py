"""A Megatron backend for the CPU that stands where Transformer Engine's stands."""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.experts import SequentialMLP

from bebop_megatron.platform.modules import (
    CpuDotProductAttention,
    CpuLayerNormColumnParallelLinear,
    CpuLinear,
    CpuNorm,
)


class CpuSpecProvider(BackendSpecProvider):
    """Modules with Transformer Engine's parameter names, in plain torch."""

    def linear(self) -> type:
        return CpuLinear

    def column_parallel_linear(self) -> type:
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type[RowParallelLinear]:
        return RowParallelLinear

    def fuse_layernorm_and_linear(self) -> bool:
        return True

    def column_parallel_layer_norm_linear(self) -> type:
        return CpuLayerNormColumnParallelLinear

    def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, has_residual: bool = False) -> Any:
        return CpuNorm

    def core_attention(self) -> type:
        return CpuDotProductAttention

    def grouped_mlp_modules(self, moe_use_grouped_gemm: bool) -> Any:
        submodules = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear, activation_func=None)
        return partial(SequentialMLP, submodules=submodules)

    def activation_func(self) -> None:
        return None
