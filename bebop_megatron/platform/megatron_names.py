"""The names inside Megatron that have to point elsewhere on a CPU, and why each does."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
from typing import Any

import torch

from bebop_megatron.patching import Patcher
from bebop_megatron.platform.distributed_optimizer import patch_distributed_optimizer


class _NoFp8:
    @staticmethod
    def is_fp8_enabled() -> bool:
        return False

    @staticmethod
    def get_fp8_recipe() -> None:
        return None


def _patch_randomness(patcher: Patcher) -> None:
    # the tracker of per-rank generators swaps the state of the CUDA generator: here that is the CPU's
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    patcher.set(random, "_set_cuda_rng_state", lambda state, *_, **__: torch.random.set_rng_state(state))
    patcher.set(random, "_get_cuda_rng_state", lambda *_, **__: torch.random.get_rng_state())
    if not hasattr(random, "FP8GlobalStateManager"):
        # selective recompute names three things that only Transformer Engine brings
        nothing = lambda *_, **__: contextlib.nullcontext()  # noqa: E731
        patcher.set(random, "FP8GlobalStateManager", _NoFp8)
        patcher.set(random, "activation_recompute_forward", nothing)
        patcher.set(random, "fp8_autocast", nothing)


def _patch_backends(patcher: Patcher) -> None:
    from bebop_megatron.platform.modules import CpuDotProductAttention, CpuLinear, CpuNorm
    from bebop_megatron.platform.spec_provider import CpuSpecProvider

    def module(name: str) -> Any:
        return importlib.import_module(f"megatron.core.{name}")

    for name in (
        "extensions.transformer_engine_spec_provider",
        "models.gpt.gpt_layer_specs",
        "models.gpt.experimental_attention_variant_module_specs",
        "transformer.multi_token_prediction",
    ):
        patcher.set(module(name), "TESpecProvider", CpuSpecProvider)
    patcher.set(module("models.gpt.gpt_layer_specs"), "TENorm", CpuNorm)
    patcher.set(module("models.gpt.gpt_layer_specs"), "LNImpl", CpuNorm)
    patcher.set(module("transformer.transformer_block"), "LayerNormImpl", CpuNorm)
    patcher.set(module("transformer.attention"), "TENorm", CpuNorm)
    # with column-parallel down projections Megatron loses the other ranks' part of the rotary key's gradient
    patcher.set(module("transformer.multi_latent_attention"), "TELinear", CpuLinear)
    # torch's RMSNorm knows no sequence parallelism; the local attention refuses packed sequences
    local = module("models.backends").LocalSpecProvider
    patcher.set(local, "layer_norm", lambda self, *_, **__: CpuNorm)
    patcher.set(local, "core_attention", lambda self: CpuDotProductAttention)


def _patch_hybrid(patcher: Patcher) -> None:
    """HybridModel names Transformer Engine's norm itself, and its only layer spec is Transformer Engine's."""
    from bebop_megatron.platform import gated_delta
    from bebop_megatron.platform.hybrid_spec import hybrid_stack_spec
    from bebop_megatron.platform.modules import CpuLayerNormColumnParallelLinear, CpuNorm

    block = importlib.import_module("megatron.core.models.hybrid.hybrid_block")
    patcher.set(block, "TENorm", CpuNorm)
    patcher.set(block, "TELayerNormColumnParallelLinear", CpuLayerNormColumnParallelLinear)
    # its name has been imported elsewhere and has aliases: what it holds is replaced, not the name
    stock = importlib.import_module("megatron.core.models.hybrid.hybrid_layer_specs").hybrid_stack_spec
    patcher.set(stock, "submodules", hybrid_stack_spec().submodules)
    common = importlib.import_module("megatron.core.ssm.gated_delta_net.common")
    if not common.HAVE_FLA:
        layer = importlib.import_module("megatron.core.ssm.gated_delta_net.gdn")
        patcher.set(common, "HAVE_FLA", True)
        patcher.set(common, "l2norm", gated_delta.l2norm)
        patcher.set(layer, "causal_conv1d", gated_delta.causal_conv1d)
        patcher.set(layer, "chunk_gated_delta_rule", gated_delta.chunk_gated_delta_rule)


def _patch_moe(patcher: Patcher) -> None:
    dispatcher = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    move = dispatcher.maybe_move_tensor_to_cpu

    def maybe_move_tensor_to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        # the original moves nothing that is on the CPU already, and then forgets the conversion
        if as_numpy and isinstance(tensor, torch.Tensor):
            return tensor.detach().numpy()
        return move(tensor, as_numpy=as_numpy, record_stream=False)

    patcher.set(dispatcher, "maybe_move_tensor_to_cpu", maybe_move_tensor_to_cpu)


def _patch_datasets(patcher: Patcher) -> None:
    # the wheel ships the compiled helper, not the makefile that would build it; a source tree has the makefile
    if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is not None:
        patcher.set(importlib.import_module("megatron.core.datasets.utils"), "compile_helpers", lambda: None)


def patch_megatron(patcher: Patcher) -> None:
    """Point Megatron's GPU-only names at CPU equivalents until `patcher.restore()`."""
    _patch_randomness(patcher)
    _patch_backends(patcher)
    _patch_hybrid(patcher)
    _patch_moe(patcher)
    patch_distributed_optimizer(patcher)
    _patch_datasets(patcher)
