"""Training in mode `chain` or `first-depth` computes what an engine computes when it drafts.

The judges are the evaluation decoder, one anchor after another with a key-value cache, and a dense recomputation under
an explicit mask. Catch: a rotary position off by one, keys of the wrong depth, a chain that sees another anchor's chain
or another document, gradients that do not reach the first step's keys, state lost under recompute.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.evaluation import tiny
from tests.mcore import drafting

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with tiny.megatron_world():
        yield


# what Transformer Engine and the local backend name differently, and every kind of attention that differs in its inputs

MODELS = {
    "grouped-queries": {},
    "local-backend": {"engine": False},
    "output-gate": {"attention_output_gate": True},
    "learned-positions": {"position": "learned_absolute"},
    "latent": {"latent": True},
    "latent-yarn": {"latent": True, "rope_type": "yarn"},
}


def random_ids(*shape):
    return torch.randint(0, drafting.VOCAB, shape, generator=torch.Generator().manual_seed(1))


def same_as_decoder(model, ids, hidden, spans, mode):
    """Compare hidden [1 + k, s, b, h] with the decoder's, document by document."""
    compared = 0
    for row, tokens in enumerate(ids.tolist()):
        for start, stop in spans:
            expected = drafting.decoded(model, tokens[start:stop], mode)
            known = ~expected.isnan()
            actual = hidden[1:, start:stop, row]
            torch.testing.assert_close(actual[known], expected[known], rtol=1e-5, atol=1e-5)
            compared += int(known.any(-1).sum())
    return compared


def close(actual, expected, tolerance=1e-5):
    """Every gradient within `tolerance` of its largest entry."""
    assert actual.keys() == expected.keys()
    for name, grad in actual.items():
        scale = expected[name].abs().max()
        assert scale > 0, name
        assert (grad - expected[name]).abs().max() <= tolerance * scale, name


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_step_at_every_anchor_equals_the_decoder(mode, kind):
    model = drafting.build(mode, **MODELS[kind])
    ids = random_ids(2, 14)
    hidden = drafting.hidden_by_depth(model, ids).detach()
    k, n = drafting.DEPTHS, 14
    assert same_as_decoder(model, ids, hidden, [(0, 14)], mode) == 2 * (k * (n - 1) - k * (k - 1) // 2)


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("kind", ["grouped-queries", "learned-positions", "latent"])
@pytest.mark.parametrize("padded", [None, [8, 12, 4, 8]], ids=["packed", "padded"])
def test_packed_documents_equal_the_decoder_on_each(mode, kind, padded):
    lengths = [5, 9, 1, 7]
    model = drafting.build(mode, **MODELS[kind])
    starts = [0, *itertools.accumulate(padded or lengths)][:-1]
    ids = random_ids(1, sum(padded or lengths))
    packed, positions = drafting.packing(lengths, padded), drafting.positions_of(padded or lengths)
    hidden = drafting.hidden_by_depth(model, ids, positions, packed).detach()
    spans = [(start, start + length) for start, length in zip(starts, lengths, strict=True)]
    assert same_as_decoder(model, ids, hidden, spans, mode) == (4 + 3 + 2 + 1) + (8 + 7 + 6 + 5) + (6 + 5 + 4 + 3)


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("kind", ["grouped-queries", "output-gate"])
@pytest.mark.parametrize("joint", [False, True], ids=["detached", "joint"])
def test_gradients_equal_a_dense_recomputation(mode, kind, joint):
    ids = random_ids(2, 12)
    plain, model = (drafting.build(m, mtp_detach_heads=not joint, **MODELS[kind]) for m in ("per-depth", mode))
    hidden = drafting.hidden_by_depth(model, ids)
    backbone = drafting.hidden_by_depth(plain, ids)[0]
    reference = drafting.dense(plain, backbone if joint else backbone.detach(), ids, mode)
    k = drafting.DEPTHS
    torch.testing.assert_close(hidden[1:, :-k], reference[:, :-k], rtol=1e-5, atol=1e-5)
    grads, expected = drafting.gradients(model, hidden[1:]), drafting.gradients(plain, reference)
    if not joint:
        # the recomputation does not detach embeddings
        assert expected.pop("embedding.word_embeddings.weight") is not None
    assert all(name.startswith("mtp.") for name in grads) != joint
    close(grads, expected)


RECOMPUTE = {
    "full": {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    "core-attention": {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
    "norm-and-mlp": {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "mlp"]},
}


@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("kind", ["chain", "packed", "latent", "first-depth"])
def test_recompute_changes_nothing(kind, recompute):
    mode, latent = ("first-depth" if kind == "first-depth" else "chain"), kind == "latent"
    ids = random_ids(1, 16)
    packed = drafting.packing([3, 13]) if kind == "packed" else None
    results = []
    for overrides in ({}, RECOMPUTE[recompute]):
        model = drafting.build(mode, latent=latent, mtp_detach_heads=True, **overrides)
        hidden = drafting.hidden_by_depth(model, ids, packed=packed)
        results.append((hidden.detach(), drafting.gradients(model, hidden[1:])))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=0, atol=1e-6)
    close(results[1][1], results[0][1], 5e-6)


def test_micro_batches_in_flight_do_not_mix():
    model = drafting.build("chain", mtp_detach_heads=True, **RECOMPUTE["full"])
    first, second = random_ids(1, 12), random_ids(2, 9)[1:]
    alone = [drafting.gradients(model, drafting.hidden_by_depth(model, ids)[1:]) for ids in (first, second)]
    both = [drafting.hidden_by_depth(model, ids)[1:] for ids in (first, second)]
    for hidden, expected in reversed(list(zip(both, alone, strict=True))):
        close(drafting.gradients(model, hidden), expected, 1e-6)


def test_without_later_depths_every_mode_is_megatrons():
    ids = random_ids(1, 10)
    hidden = [drafting.hidden_by_depth(drafting.build(m, mtp_num_layers=1), ids) for m in ("per-depth", "chain")]
    torch.testing.assert_close(hidden[0], hidden[1], rtol=0, atol=0)
    hidden = [drafting.hidden_by_depth(drafting.build(m), ids) for m in ("per-depth", "chain", "first-depth")]
    torch.testing.assert_close(hidden[0][:2], hidden[1][:2], rtol=0, atol=0)
    assert (hidden[0][2, :-4] - hidden[1][2, :-4]).abs().max() > 1e-3
    assert (hidden[2][2, :-4] - hidden[1][2, :-4]).abs().max() > 1e-3
