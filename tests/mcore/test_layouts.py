"""The same global batch gives the same MTP loss and gradients under every layout.

Micro-batches have no valid anchor, one, and many. Catches: local instead of global counts, a lost gradient on a rank
without targets, a missing or doubled tensor-parallel reduction, gradients that reach the backbone or the LM head.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.config import ObjectiveConfig
from tests.mcore.world import Layout, run

pytestmark = pytest.mark.dist

OBJECTIVES = {
    "tv": ObjectiveConfig(loss="tv"),
    "tv-partial": ObjectiveConfig(loss="tv", horizon="partial"),
    "ce": ObjectiveConfig(loss="ce"),
    "kl": ObjectiveConfig(loss="kl", temperature=0.7),
    "lk": ObjectiveConfig(loss="lk", horizon="per-depth"),
}
TWO = {
    "tp2": Layout(tp=2),
    "tp2-sp": Layout(tp=2, overrides={"sequence_parallel": True}),
    "tp2-sp-batch2": Layout(tp=2, micro_batch=2, overrides={"sequence_parallel": True}),
    "pp2": Layout(pp=2),
    "dp2": Layout(dp=2),
    "dp2-per-token": Layout(dp=2, overrides={"calculate_per_token_loss": True}),
    "dp2-batch2": Layout(dp=2, micro_batch=2),
}
ONE = {
    "micro-batch-2": Layout(micro_batch=2),
    "micro-batch-4": Layout(micro_batch=4),
    "per-token": Layout(overrides={"calculate_per_token_loss": True}),
    "recompute": Layout(
        overrides={"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    ),
}
FOUR = {
    "tp2-sp-pp2": Layout(tp=2, pp=2, overrides={"sequence_parallel": True}),
    "tp2-dp2": Layout(tp=2, dp=2),
    "separate-mtp-stage": Layout(pp=4, stages="Et|t|mmm|L"),
}


@pytest.fixture(scope="module")
def single():
    return run([(name, Layout(), objective) for name, objective in OBJECTIVES.items()])


@pytest.fixture(scope="module", params=[ONE, TWO, FOUR], ids=["one", "two", "four"])
def world(request):
    cases = [(f"{layout}/{kind}", TABLE[layout], OBJECTIVES[kind]) for layout in request.param for kind in OBJECTIVES]
    return run(cases)


TABLE = ONE | TWO | FOUR


def test_loss_and_mtp_gradients_equal_the_single_process(single, world):
    for name, result in world.items():
        expected = single[name.split("/")[1]]
        assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
        assert result["grads"].keys() == expected["grads"].keys(), name
        for key, grad in result["grads"].items():
            scale = expected["grads"][key].abs().max()
            assert scale > 0, (name, key)
            assert (grad - expected["grads"][key]).abs().max() <= 1e-5 * scale + 1e-9, (name, key)


def test_detached_heads_leave_backbone_embedding_and_lm_head_alone(single):
    stock = run([("no-mtp-loss", Layout(overrides={"mtp_loss_scaling_factor": 0.0}), ObjectiveConfig(loss="ce"))])
    for name, result in single.items():
        for key, grad in stock["no-mtp-loss"]["backbone"].items():
            if not key.startswith("mtp."):
                torch.testing.assert_close(result["backbone"][key], grad, rtol=0, atol=0, msg=f"{name} {key}")


def test_joint_mode_reaches_backbone_embedding_and_lm_head():
    results = run(
        [
            ("detached", Layout(), ObjectiveConfig(loss="kl")),
            ("joint", Layout(), ObjectiveConfig(loss="kl", joint=True)),
        ]
    )
    for key in ("decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight", "output_layer.weight"):
        difference = results["joint"]["backbone"][key] - results["detached"]["backbone"][key]
        assert difference.abs().max() > 1e-6, key


def test_ce_equals_stock_megatron_where_every_micro_batch_counts_alike():
    # with one micro-batch of the whole batch, stock's normalisation by the local count is the global one
    layout = Layout(micro_batch=4)
    results = run([("ours", layout, ObjectiveConfig(loss="ce")), ("stock", layout, None)])
    for key, grad in results["stock"]["grads"].items():
        torch.testing.assert_close(results["ours"]["grads"][key], grad, rtol=2e-5, atol=1e-8)
