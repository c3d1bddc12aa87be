"""Specs for the MTP layers, for GPTModel and HybridModel, on the Transformer Engine and the local backend.

Three ways in:

- `--spec bebop_megatron.mcore.spec chain` (or `first_depth`, `per_depth`, `qwen3`, `qwen3_next`, `qwen3_5`) on a
  Megatron command line, or the same function as `transformer_layer_spec=` of a Megatron or NeMo config;
- for HybridModel, `--spec bebop_megatron.mcore.spec hybrid_chain` (or `hybrid_first_depth`, `hybrid_per_depth`);
- `mtp_block_spec` and `hybrid_spec` from Python.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
)
from megatron.core.transformer.spec_utils import ModuleSpec

from bebop_megatron.mcore.mtp_attention import (
    mtp_attention,
    require_attention_only,
    set_mtp_attention,
    wants_our_layers,
)
from bebop_megatron.mcore.mtp_layer import DraftStepLayer
from bebop_megatron.mcore.presets import require_preset


def _with_our_layers(block: Any, mode: str | None) -> Any:
    """The same MTP block, made of our layers. `mode` None: the one that the model config carries.

    Raises:
        ValueError: the block is made of something else than Megatron's MTP layers.
    """
    submodules = block.submodules if isinstance(block, ModuleSpec) else block
    layers = []
    for layer in submodules.layer_specs:
        if not isinstance(layer.module, type) or not issubclass(layer.module, MultiTokenPredictionLayer):
            raise ValueError(f"an MTP block is made of MultiTokenPredictionLayer, not of {layer.module}")
        params = layer.params if mode is None else layer.params | {"mode": mode}
        layers.append(dataclasses.replace(layer, module=DraftStepLayer, params=params))
    submodules = MultiTokenPredictionBlockSubmodules(layer_specs=layers)
    return dataclasses.replace(block, submodules=submodules) if isinstance(block, ModuleSpec) else submodules


def make_mtp_block_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function behind every GPT builder's MTP block; configs without our mark get Megatron's own."""

    @functools.wraps(original)
    def get_gpt_mtp_block_spec_for_backend(config: Any, *args: Any, **kwargs: Any) -> Any:
        block = original(config, *args, **kwargs)
        return block if block is None or not wants_our_layers(config) else _with_our_layers(block, None)

    return get_gpt_mtp_block_spec_for_backend


def _linear_attention(config: Any) -> bool:
    return getattr(config, "experimental_attention_variant", None) == "gated_delta_net"


def make_builder_mtp_block_spec(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the GPT builder's own function, which knows no MTP for models with gated delta net layers.

    Their MTP layer is the decoder's last one with ordinary attention, as in Qwen3-Next and Qwen3.5.
    """

    @functools.wraps(original)
    def mtp_block_spec(config: Any, transformer_layer_spec: Any, vp_stage: int | None = None) -> Any:
        transformer = config.transformer
        if not (wants_our_layers(transformer) and transformer.mtp_num_layers and _linear_attention(transformer)):
            return original(config, transformer_layer_spec, vp_stage=vp_stage)
        layers = variants.get_transformer_layer_with_experimental_attention_variant_spec(transformer)
        ordinary = [x for x in layers if hasattr(x.submodules.self_attention.submodules, "core_attention")]  # pyright: ignore[reportAttributeAccessIssue]
        engine = transformer.transformer_impl == "transformer_engine"
        return gpt_layer_specs.get_gpt_mtp_block_spec(
            transformer, ordinary[-1], use_transformer_engine=engine, vp_stage=vp_stage
        )

    return mtp_block_spec


def mtp_block_spec(
    config: Any,
    spec: Any,
    *,
    use_transformer_engine: bool,
    mode: str | None = None,
    vp_stage: int | None = None,
    pp_rank: int | None = None,
) -> MultiTokenPredictionBlockSubmodules | None:
    """The `mtp_block_spec` of a GPTModel: Megatron's, made of our layers. None where this stage has no MTP layers.

    `spec` is the decoder's layer or block spec; `mode` is `per-depth`, `chain` or `first-depth`, by default what
    `set_mtp_attention` put on the config.

    Raises:
        ValueError: the mode does not work with this config.
    """
    if mode is not None:
        set_mtp_attention(config, mode)
    block = gpt_layer_specs.get_gpt_mtp_block_spec(
        config, spec, use_transformer_engine=use_transformer_engine, vp_stage=vp_stage, pp_rank=pp_rank
    )
    return None if block is None else _with_our_layers(block, mode)


def hybrid_spec(stack: Any, mode: str | None = None) -> ModuleSpec:
    """A HybridModel stack spec whose MTP block is made of our layers.

    The MTP pattern may hold attention, MLP and MoE layers; recurrent ones are refused when the model is built, unless
    the mode is `per-depth`.
    """
    block = _with_our_layers(stack.submodules.mtp_block_spec, mode)
    return dataclasses.replace(stack, submodules=dataclasses.replace(stack.submodules, mtp_block_spec=block))


def use_mtp_attention(config: Any, mode: str | None) -> None:
    """Have the model of a GPTModelConfig or HybridModelConfig built with our MTP layers.

    Raises:
        ValueError: the mode does not work with this config.
    """
    from bebop_megatron.mcore.install import install_builder

    install_builder()
    set_mtp_attention(config.transformer, mode)
    if hasattr(config, "hybrid_stack_spec"):
        require_attention_only(config.hybrid_layer_pattern, config.transformer)
        config.hybrid_stack_spec = hybrid_spec(config.hybrid_stack_spec or hybrid_stack_spec)


def _gpt(config: Any, vp_stage: int | None, mode: str) -> Any:
    """The decoder spec that Megatron would choose without `--spec`; the config gets our mark."""
    from bebop_megatron.mcore.install import install, install_builder

    # a builder makes the MTP block from the config, not from the spec that it is given
    install()
    transformer = getattr(config, "transformer", config)
    set_mtp_attention(transformer, mode)
    if transformer is not config:
        from megatron.training.models.gpt import default_layer_spec

        install_builder()
        return default_layer_spec(config, vp_stage)  # pyright: ignore[reportArgumentType]
    if _linear_attention(config):
        return variants.get_transformer_block_with_experimental_attention_variant_spec(config, vp_stage=vp_stage)
    engine = getattr(config, "transformer_impl", "transformer_engine") == "transformer_engine"
    return gpt_layer_specs.get_gpt_decoder_block_spec(
        config, use_transformer_engine=engine, normalization=config.normalization, vp_stage=vp_stage
    )


def _preset(config: Any, vp_stage: int | None, name: str) -> Any:
    require_preset(config, name)
    mode = mtp_attention(getattr(config, "transformer", config), default="chain")
    return _gpt(config, vp_stage, mode)


def per_depth(config: Any, vp_stage: int | None = None) -> Any:
    """Decoder spec of a GPT config; its MTP layers attend as Megatron's do."""
    return _gpt(config, vp_stage, "per-depth")


def chain(config: Any, vp_stage: int | None = None) -> Any:
    """Decoder spec of a GPT config; its MTP layers are trained as vLLM and SGLang serve them."""
    return _gpt(config, vp_stage, "chain")


def first_depth(config: Any, vp_stage: int | None = None) -> Any:
    """Decoder spec of a GPT config; later draft steps of its MTP layers see the keys of step 1 only."""
    return _gpt(config, vp_stage, "first-depth")


def qwen3(config: Any, vp_stage: int | None = None) -> Any:
    """Decoder spec of a Qwen3 model, dense or MoE; MTP attention `chain` unless `--mtp-attention` says otherwise.

    Raises:
        ValueError: the config differs from the family's.
    """
    return _preset(config, vp_stage, "qwen3")


def qwen3_next(config: Any, vp_stage: int | None = None) -> Any:
    """As `qwen3`, for Qwen3-Next."""
    return _preset(config, vp_stage, "qwen3-next")


def qwen3_5(config: Any, vp_stage: int | None = None) -> Any:
    """As `qwen3`, for the text model of Qwen3.5."""
    return _preset(config, vp_stage, "qwen3.5")


hybrid_per_depth = hybrid_spec(hybrid_stack_spec, "per-depth")
hybrid_chain = hybrid_spec(hybrid_stack_spec, "chain")
hybrid_first_depth = hybrid_spec(hybrid_stack_spec, "first-depth")
