"""HybridModel's layers for the CPU, laid out and named as Transformer Engine's are."""

from __future__ import annotations

from functools import partial

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.multi_latent_attention import MLASelfAttention, MLASelfAttentionSubmodules
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionBlock,
    MultiTokenPredictionBlockSubmodules,
    MultiTokenPredictionLayer,
    MultiTokenPredictionLayerSubmodules,
)
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import (
    MoETransformerLayer,
    TransformerLayer,
    TransformerLayerSubmodules,
)

from bebop_megatron.platform.spec_provider import CpuSpecProvider

_CAUSAL = {"attn_mask_type": AttnMaskType.causal}


def _attention_layers(backend: CpuSpecProvider) -> dict[str, ModuleSpec]:
    norm, fused = backend.layer_norm(), backend.column_parallel_layer_norm_linear()
    column, row = backend.column_parallel_linear(), backend.row_parallel_linear()
    delta_net = ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(in_proj=fused, out_norm=norm, out_proj=row),
    )
    attention = ModuleSpec(
        module=SelfAttention,
        params=_CAUSAL,
        # no query or key norm here: Megatron adds its default norm when the config asks for qk_layernorm
        submodules=SelfAttentionSubmodules(linear_qkv=fused, core_attention=backend.core_attention(), linear_proj=row),
    )
    latent = ModuleSpec(
        module=MLASelfAttention,
        params=_CAUSAL,
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=column,
            linear_q_down_proj=backend.linear(),
            linear_q_up_proj=column,
            linear_kv_down_proj=backend.linear(),
            linear_kv_up_proj=column,
            core_attention=backend.core_attention(),
            linear_proj=row,
            q_layernorm=IdentityOp,
            kv_layernorm=IdentityOp,
        ),
    )
    return {
        "gdn_layer": _attention_layer(delta_net),
        "attention_layer": _attention_layer(attention),
        "mla_layer": _attention_layer(latent, input_layernorm=norm),
    }


def _attention_layer(attention: ModuleSpec, **submodules: type) -> ModuleSpec:
    return ModuleSpec(
        module=TransformerLayer,
        submodules=TransformerLayerSubmodules(
            self_attention=attention, self_attn_bda=get_bias_dropout_add, **submodules
        ),
    )


def hybrid_stack_spec() -> ModuleSpec:
    """Gated delta net, attention, latent attention, MLP and MoE layers, and the MTP block; no Mamba layer."""
    backend = CpuSpecProvider()
    norm, fused = backend.layer_norm(), backend.column_parallel_layer_norm_linear()
    mlp = partial(
        MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=fused, linear_fc2=backend.row_parallel_linear())
    )
    # any number of experts: the config decides how many are built
    moe = get_moe_module_spec_for_backend(backend=backend, num_experts=1)
    head = MultiTokenPredictionLayerSubmodules(
        enorm=norm, hnorm=norm, eh_proj=backend.column_parallel_linear(), mtp_model_layer=None, layer_norm=norm
    )
    return ModuleSpec(
        module=HybridStack,
        submodules=HybridStackSubmodules(
            **_attention_layers(backend),
            mlp_layer=ModuleSpec(
                module=MLPLayer,
                submodules=TransformerLayerSubmodules(mlp=mlp, mlp_bda=get_bias_dropout_add),
            ),
            moe_layer=ModuleSpec(
                module=MoETransformerLayer,
                submodules=TransformerLayerSubmodules(pre_mlp_layernorm=norm, mlp=moe, mlp_bda=get_bias_dropout_add),
            ),
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    layer_specs=[ModuleSpec(module=MultiTokenPredictionLayer, submodules=head)]
                ),
            ),
        ),
    )
