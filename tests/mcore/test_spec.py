"""Specs, presets and refusals: which layers a model gets by each way in, and what a layout cannot have.

Catches: our layers where nobody asked for them, Megatron's where somebody did, other checkpoint names, a mode that is
dropped between flag and layer, settings that train something else than they say.
"""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.evaluation import tiny
from tests.mcore import drafting
from tests.mcore.test_mtp_attention import close, random_ids, same_as_decoder

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")


@pytest.fixture(scope="module", autouse=True)
def megatron():
    from bebop_megatron.mcore import uninstall

    with tiny.megatron_world():
        yield
    uninstall()


@pytest.fixture
def clean():
    from bebop_megatron.mcore import uninstall

    uninstall()
    yield
    uninstall()


def model_config(**overrides):
    """A GPTModelConfig as Megatron's command line makes it."""
    from megatron.core.transformer.transformer_config import TransformerConfig
    from megatron.training.models.gpt import GPTModelConfig

    plain = drafting.build("per-depth", **overrides).config
    values = {f.name: getattr(plain, f.name) for f in dataclasses.fields(TransformerConfig) if f.init}
    return GPTModelConfig(
        transformer=TransformerConfig(**values), vocab_size=32, position_embedding_type="rope", seq_length=64
    )


def built(config):
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.training.models.gpt import GPTModelBuilder

    return GPTModelBuilder(config).build_model(
        ProcessGroupCollection.use_mpu_process_groups(), pre_process=True, post_process=True
    )


def stock(model):
    """The same model with Megatron's own MTP layers, weights included."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    other = GPTModel(
        model.config,
        model.transformer_layer_spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_sequence_length,
        position_embedding_type=model.position_embedding_type,
        mtp_block_spec=get_gpt_mtp_block_spec(model.config, model.transformer_layer_spec, use_transformer_engine=True),
    )
    other.load_state_dict(model.state_dict())
    return other


PER_DEPTH = {
    "plain": {},
    "learned": {"position": "learned_absolute"},
    "latent": {"latent": True},
    "recompute": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
}


@pytest.mark.parametrize("kind", PER_DEPTH)
@pytest.mark.parametrize("lengths", [None, [5, 9]], ids=["whole", "packed"])
def test_per_depth_is_megatrons_own(clean, kind, lengths):
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from bebop_megatron.mcore.mtp_layer import DraftStepLayer

    ours = drafting.build("per-depth", mtp_detach_heads=True, **PER_DEPTH[kind])
    theirs = stock(ours)
    assert type(ours.mtp.layers[0]) is DraftStepLayer
    assert type(theirs.mtp.layers[0]) is MultiTokenPredictionLayer
    ids, packed = random_ids(1, 14), None if lengths is None else drafting.packing(lengths)
    positions = drafting.positions_of(lengths or [14])
    hidden = [drafting.hidden_by_depth(m, ids, positions, packed) for m in (ours, theirs)]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=0)
    grads = [drafting.gradients(m, h[1:]) for m, h in zip((ours, theirs), hidden, strict=True)]
    close(grads[0], grads[1], 1e-7)


def test_padded_documents_equal_each_alone_where_megatron_shifts_across():
    ours = drafting.build("per-depth")
    lengths, padded = [5, 3], [8, 4]
    ids = random_ids(1, 12)
    packing, positions = drafting.packing(lengths, padded), drafting.positions_of(padded)
    packed = drafting.hidden_by_depth(ours, ids, positions, packing)[:, 8:11]
    alone = drafting.hidden_by_depth(ours, ids[:, 8:11])
    for depth in (1, 2):
        torch.testing.assert_close(packed[depth, : 3 - depth], alone[depth, : 3 - depth], rtol=1e-5, atol=1e-5)
    # the case tests something: Megatron takes the unpadded boundaries for places in the padded sequence
    theirs = drafting.hidden_by_depth(stock(ours), ids, positions, packing)[:, 8:11]
    assert (theirs[1, :2] - alone[1, :2]).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
def test_parameter_and_checkpoint_names_are_megatrons(mode):
    ours = drafting.build(mode)
    theirs = stock(ours)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    assert set(ours.sharded_state_dict()) == set(theirs.sharded_state_dict())


WAYS = {
    "per_depth": "per-depth",
    "chain": "chain",
    "first_depth": "first-depth",
    "qwen3": "chain",
}


@pytest.mark.parametrize("name", WAYS)
def test_spec_functions_build_our_layers_through_megatrons_builder(clean, name):
    # what `--spec bebop_megatron.mcore.spec NAME` does
    from megatron.core.transformer.spec_utils import import_module

    config = model_config()
    config.rotary_base = 1_000_000
    config.transformer_layer_spec = import_module(("bebop_megatron.mcore.spec", name))
    model = built(config)
    assert model.mtp.layers[0].mode == WAYS[name]
    assert bool(model.mtp.layers[0].attentions) == (WAYS[name] != "per-depth")


def test_spec_functions_serve_configs_without_a_builder(clean):
    # NeMo calls the function with its own TransformerConfig, and Megatron's MTP function with what comes back
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

    from bebop_megatron.mcore.mtp_layer import DraftStepLayer
    from bebop_megatron.mcore.spec import chain

    config = model_config().transformer
    block = get_gpt_mtp_block_spec(config, chain(config), use_transformer_engine=True)
    assert [layer.module for layer in block.layer_specs] == [DraftStepLayer]


def test_flag_of_a_preset_wins_over_its_default(clean):
    from bebop_megatron.mcore.spec import qwen3, use_mtp_attention

    config = model_config()
    config.rotary_base = 1_000_000
    use_mtp_attention(config, "first-depth")
    config.transformer_layer_spec = qwen3
    assert built(config).mtp.layers[0].mode == "first-depth"


def test_without_being_asked_models_keep_megatrons_layers(clean):
    from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer

    from bebop_megatron.mcore import install
    from bebop_megatron.mcore.spec import use_mtp_attention

    install()
    config = model_config()
    assert type(built(config).mtp.layers[0]) is MultiTokenPredictionLayer
    use_mtp_attention(config, None)
    assert built(config).mtp.layers[0].mode == "per-depth"


def test_uninstall_gives_the_builder_back(clean):
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.training.models import gpt

    from bebop_megatron.mcore import uninstall
    from bebop_megatron.mcore.install import install_builder

    before = gpt.mtp_block_spec, gpt_layer_specs.get_gpt_mtp_block_spec_for_backend
    install_builder()
    install_builder()
    assert gpt.mtp_block_spec.__wrapped__ is before[0]
    uninstall()
    assert (gpt.mtp_block_spec, gpt_layer_specs.get_gpt_mtp_block_spec_for_backend) == before


def test_preset_names_every_setting_that_differs():
    from bebop_megatron.mcore.presets import PRESETS, preset, require_preset

    config = model_config(attention_output_gate=True)
    with pytest.raises(ValueError, match="no --attention-output-gate") as caught:
        require_preset(config, "qwen3")
    assert "--rotary-base 1000000" in str(caught.value)
    with pytest.raises(ValueError, match="--apply-layernorm-1p"):
        require_preset(config, "qwen3.5")
    with pytest.raises(ValueError, match=r"choose one of qwen3, qwen3-next, qwen3\.5"):
        preset("qwen4")
    for name in PRESETS:
        fields = preset(name)
        for field, value in fields.items():
            setattr(config, field, value)
        require_preset(config, name)


REFUSED = {
    "distinct-layers": ({"mtp_use_repeated_layer": False}, "--mtp-use-repeated-layer"),
    "dropout": ({"attention_dropout": 0.1}, "--attention-dropout 0"),
    "window": ({"window_size": (8, 0)}, "sliding-window"),
    "softmax": ({"softmax_type": "off-by-one"}, "softmax_type"),
    "mrope": ({"mrope_section": [1, 1, 2]}, "mrope"),
    "cuda-graphs": ({"cuda_graph_impl": "local"}, "CUDA graphs"),
    "expert-overlap": ({"overlap_moe_expert_parallel_comm": True}, "overlapped expert-parallel"),
    "no-mtp": ({"mtp_num_layers": None}, "--mtp-num-layers"),
    "fp8-full-recompute": ({"fp8": "hybrid", "recompute_granularity": "full"}, "fp8"),
    "latent-fused-rope": ({"multi_latent_attention": True, "apply_rope_fusion": True}, "--no-rope-fusion"),
    "latent-up-projection": (
        {"recompute_granularity": "selective", "recompute_modules": ["mla_up_proj"]},
        "--recompute-modules",
    ),
    "offloading": ({"fine_grained_activation_offloading": True}, "offloading"),
}


@pytest.mark.parametrize("reason", REFUSED)
@pytest.mark.parametrize("mode", ["chain", "first-depth"])
def test_what_cannot_work_is_refused_before_anything_is_built(mode, reason):
    from bebop_megatron.mcore.mtp_attention import mtp_attention, set_mtp_attention

    settings, message = REFUSED[reason]
    config = model_config().transformer
    for name, value in settings.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=message) as caught:
        set_mtp_attention(config, mode)
    assert mode in str(caught.value)
    assert mtp_attention(config) == "per-depth"
    set_mtp_attention(config, "per-depth")


def test_unknown_mode_gets_the_choices():
    from bebop_megatron.mcore.mtp_attention import set_mtp_attention

    with pytest.raises(ValueError, match="choose one of per-depth, chain, first-depth"):
        set_mtp_attention(model_config().transformer, "kv-share")


def hybrid_model(mode, pattern, **overrides):
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel

    from bebop_megatron.mcore.spec import hybrid_spec
    from tests.mcore.weights import same_weights_everywhere

    config = drafting.build("per-depth", num_layers=4, **overrides).config
    model = HybridModel(
        config,
        hybrid_spec(hybrid_stack_spec, mode),
        vocab_size=drafting.VOCAB,
        max_sequence_length=64,
        hybrid_layer_pattern=pattern,
        position_embedding_type="rope",
    )
    same_weights_everywhere(model)
    return model


# four depths of one repeated layer; the second layer's two attentions each keep their own keys
PATTERNS = {"one": "*-*-" + "/*-" * drafting.DEPTHS, "two-attentions": "*-*-" + "/*-*" * drafting.DEPTHS}


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("pattern", PATTERNS)
def test_hybrid_model_equals_the_decoder(mode, pattern):
    model = hybrid_model(mode, PATTERNS[pattern])
    ids = random_ids(1, 10)
    hidden = drafting.hidden_by_depth(model, ids).detach()
    assert len(model.mtp.layers[0].attentions) == PATTERNS[pattern].split("/")[1].count("*")
    assert same_as_decoder(model, ids, hidden, [(0, 10)], mode) == 9 + 8 + 7 + 6


def test_hybrid_model_recomputes_as_a_whole():
    full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ids, results = random_ids(1, 10), []
    for overrides in ({}, full):
        model = hybrid_model("chain", PATTERNS["one"], mtp_detach_heads=True, **overrides)
        hidden = drafting.hidden_by_depth(model, ids)
        results.append(drafting.gradients(model, hidden[1:]))
    close(results[1], results[0], 5e-6)


def test_hybrid_pattern_with_a_recurrent_mtp_layer_is_refused():
    from bebop_megatron.mcore.mtp_attention import require_attention_only, set_mtp_attention

    config = model_config().transformer
    require_attention_only("G-*-/G-/G-/G-/G-", config)
    set_mtp_attention(config, "chain")
    require_attention_only("G-*-/*-/*-/*-/*-", config)
    with pytest.raises(ValueError, match="'G-' has G: use attention"):
        require_attention_only("G-*-/G-/G-/G-/G-", config)


def test_hybrid_specs_of_the_command_line_carry_their_mode():
    from megatron.core.transformer.spec_utils import import_module

    for name, mode in (("hybrid_chain", "chain"), ("hybrid_first_depth", "first-depth")):
        spec = import_module(("bebop_megatron.mcore.spec", name))
        (layer,) = spec.submodules.mtp_block_spec.submodules.layer_specs
        assert layer.params["mode"] == mode


def test_gated_delta_net_decoder_gets_the_gated_attention_layer_as_its_mtp_layer(clean):
    # Megatron's own builder refuses MTP here; Qwen3-Next and Qwen3.5 have it
    from bebop_megatron.mcore.presets import preset
    from bebop_megatron.mcore.spec import per_depth, qwen3_5
    from tests.mcore.weights import same_weights_everywhere

    config = model_config(
        num_layers=4,
        experimental_attention_variant="gated_delta_net",
        linear_attention_freq=4,
        linear_key_head_dim=8,
        linear_value_head_dim=8,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
    )
    for field, value in preset("qwen3.5").items():
        setattr(config, field, value)
    config.transformer_layer_spec = qwen3_5
    model = built(config)
    same_weights_everywhere(model)
    assert not hasattr(model.decoder.layers[0].self_attention, "core_attention")
    (attention,) = model.mtp.layers[0].attentions
    assert attention.config.attention_output_gate
    assert model.mtp.layers[0].mode == "chain"

    config.transformer_layer_spec = per_depth
    plain = built(config)
    same_weights_everywhere(plain)
    ids = random_ids(1, 16)
    hidden = drafting.hidden_by_depth(model, ids)
    reference = drafting.dense(plain, hidden[0].detach(), ids, "chain")
    torch.testing.assert_close(hidden[1:, : -drafting.DEPTHS], reference[:, : -drafting.DEPTHS], rtol=1e-5, atol=1e-5)
