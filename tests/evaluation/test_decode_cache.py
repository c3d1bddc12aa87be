"""Cached decoding equals the full forward pass, for every kind of attention, and leaves the model as it was.

Catches: a rotary position taken from the column instead of the row, keys of rejected drafts that stay
visible, a row that reads another's cache, a prefill chunk that misses earlier chunks, unwritten slots that
leak, a model that trains differently after it was decoded.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder
from bebop_megatron.evaluation.cache import make_window
from bebop_megatron.evaluation.cached_model import CachedModel
from tests.evaluation import tiny

pytestmark = pytest.mark.usefixtures("megatron")

LATENT = {
    "latent": True,
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 4,
    "v_head_dim": 8,
    "apply_rope_fusion": False,
}
EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
}
MODELS = {
    "grouped-queries": {},
    "fused-norms": {"fused_norms": True},
    "tied-embeddings": {"tied": True},
    "gated": {"attention_output_gate": True},
    "zero-centred-norms": {"layernorm_zero_centered_gamma": True},
    "learned-positions": {"position": "learned_absolute"},
    "no-positions": {"position": "none"},
    "mrope": {"position": "mrope", "mrope_section": [2, 1, 1]},
    "layer-without-rope": {"no_rope_freq": [0, 1]},
    "softmax-scale": {"softmax_scale": 0.3},
    "mup": {"use_mup": True, "mup_base_hidden_size": 16, "mup_base_head_dim": 4},
    "latent": LATENT | {"rope_type": "rope"},
    "latent-yarn": LATENT | {"rope_type": "yarn", "original_max_position_embeddings": 16},
    "experts": EXPERTS,
    # logits of size one: the delta net's own chunked sum is off by a few units of their last place
    **{kind: settings | {"sharpness": 0.1} for kind, settings in tiny.DELTA_NETS.items()},
}


@pytest.mark.parametrize("kind", MODELS)
def test_chunks_at_ragged_positions_equal_the_full_forward(kind):
    model = tiny.build(**MODELS[kind])
    texts = tiny.prompts(30, 30, 30)
    expected = torch.stack([tiny.full_logits(model, text) for text in texts])
    tokens = torch.tensor(texts)
    cached = CachedModel(model, batch_size=4, capacity=40)
    starts = torch.tensor([3, 9, 1])
    generator = torch.Generator().manual_seed(1)
    rows = torch.arange(3)[:, None]
    with cached.attached():
        for chunk in (slice(0, 4), slice(4, 9)):
            # a row whose prompt ends before the chunk does has padding there, which must leave no trace
            positions = torch.arange(chunk.start, chunk.stop).expand(3, -1)
            kept = (starts - chunk.start).clamp(0, chunk.stop - chunk.start)
            known = starts.clamp(max=chunk.start)
            window = make_window(positions, length=chunk.stop, rows=torch.arange(3), known=known, kept=kept)
            good = positions < starts[:, None]
            padded = torch.where(good, tokens[:, chunk], 0)
            logits = cached.logits(cached.backbone(padded, window))
            torch.testing.assert_close(logits[good], expected[:, chunk][good], atol=1e-5, rtol=1e-5)
        while int(starts.max()) + 4 <= 30:
            # as in decoding: some of the four are right, the others are drafts that get rejected
            right = torch.randint(1, 5, (3,), generator=generator)
            positions = starts[:, None] + torch.arange(4)
            draft = torch.randint(0, tiny.VOCAB, (3, 4), generator=generator)
            good = torch.arange(4) < right[:, None]
            ids = torch.where(good, tokens[rows, positions], draft)
            window = make_window(positions, length=int(starts.max()) + 4)
            logits = cached.logits(cached.backbone(ids, window))
            torch.testing.assert_close(logits[good], expected[rows, positions][good], atol=1e-5, rtol=1e-5)
            starts = starts + right


@pytest.mark.parametrize("kind", MODELS)
def test_log_probs_of_generated_text_equal_those_of_a_full_forward(kind):
    model = tiny.build(**MODELS[kind])
    prompts = tiny.prompts(5, 1, 9, 6)
    config = DecodeConfig(
        max_new_tokens=16, batch_size=3, temperature=0.8, top_k=5, raw_log_probs=True, prefill_chunk=4
    )
    result = SpeculativeDecoder(model, config, vocab_size=tiny.VOCAB).generate(prompts)
    for prompt, sequence in zip(prompts, result.sequences, strict=True):
        assert len(sequence.tokens) == len(sequence.log_probs) == 16
        logits = tiny.full_logits(model, prompt + sequence.tokens)[len(prompt) - 1 : -1]
        token = torch.tensor(sequence.tokens)[:, None]
        raw = logits.log_softmax(-1).gather(1, token)[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.raw_log_probs), raw, atol=1e-5, rtol=1e-4)
        kept, ids = logits.topk(5)
        filtered = torch.full_like(logits, -torch.inf).scatter(1, ids, kept).div(0.8).log_softmax(-1)
        sampled = filtered.gather(1, token)[:, 0]
        torch.testing.assert_close(torch.tensor(sequence.log_probs), sampled, atol=1e-5, rtol=1e-4)


def test_what_a_slot_held_before_is_never_seen():
    model = tiny.build()
    text = tiny.prompts(12)[0]
    cached = CachedModel(model, batch_size=2, capacity=20)
    with cached.attached():
        for cache in cached._caches:
            cache.keys = torch.full((2, 20, 2, 8), 1e4)
            cache.values = torch.full((2, 20, 2, 8), 1e4)
        window = make_window(torch.arange(12)[None], length=20)
        logits = cached.logits(cached.backbone(torch.tensor([text]), window))
    torch.testing.assert_close(logits[0], tiny.full_logits(model, text), atol=1e-5, rtol=1e-5)


def _state(model):
    return [
        (name, type(module), module.training, getattr(module, "sequence_parallel", None))
        for name, module in model.named_modules()
    ], {name: value for name, value in vars(model.config).items() if not callable(value)}


def _gradients(model, text):
    model.zero_grad()
    ids, positions = torch.tensor([text]), torch.arange(len(text))[None]
    model(ids, positions, tiny._causal(len(text)), labels=ids).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kind", ["grouped-queries", "latent", "hybrid"])
def test_model_is_given_back_as_it_was(kind):
    model, twin = tiny.build(**MODELS[kind]), tiny.build(**MODELS[kind])
    text = tiny.prompts(20)[0]
    for each in (model, twin):
        each.train()
        # RL code keeps parts of a training model in evaluation mode
        each.mtp.eval()
    before = _state(model)
    decoder = SpeculativeDecoder(model, DecodeConfig(max_new_tokens=10), vocab_size=tiny.VOCAB)
    decoder.generate([text[:5]])
    assert _state(model) == before
    # Megatron remembers this table, and no backward pass could save one made in inference mode
    owner = model if kind != "latent" else model.decoder.layers[0].self_attention
    assert not owner.rotary_pos_emb(5 + 10 + 3 + 2).is_inference()

    def interrupted(_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decoder.generate([text[:5]], progress=interrupted)
    assert _state(model) == before
    expected, gradients = _gradients(twin, text), _gradients(model, text)
    assert gradients.keys() == expected.keys()
    for name, gradient in expected.items():
        assert torch.equal(gradients[name], gradient), name


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"window_size": (4, 0)}, "window_size=None only"),
        ({"apply_query_key_layer_scaling": True}, "apply_query_key_layer_scaling=False only"),
    ],
)
def test_attention_that_the_cache_does_not_implement_is_refused(overrides, message):
    model = tiny.build(**overrides)
    with pytest.raises(ValueError, match=message):
        SpeculativeDecoder(model, DecodeConfig(), vocab_size=tiny.VOCAB)


def test_recurrent_layers_and_split_models_are_refused():
    model = tiny.build()
    with pytest.raises(ValueError, match="one chunk, got 2"):
        SpeculativeDecoder([model, model], DecodeConfig(), vocab_size=tiny.VOCAB)
    recurrent = tiny.build(**tiny.DELTA_NETS["hybrid"] | {"pattern": "*-/G-/G-/G-", "num_layers": 2})
    with pytest.raises(ValueError, match="the MTP layer has a gated delta net"):
        SpeculativeDecoder(recurrent, DecodeConfig(), vocab_size=tiny.VOCAB)
    model.decoder.layers[1].self_attention = torch.nn.GRU(4, 4)
    with pytest.raises(ValueError, match="GRU keeps a recurrent state"):
        SpeculativeDecoder(model, DecodeConfig(), vocab_size=tiny.VOCAB)
