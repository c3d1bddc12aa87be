"""The same global batch gives the same MTP loss and gradients under every layout.

Micro-batches have no valid anchor, one, and many. Catches: local instead of global counts, a lost gradient on a rank
without targets, a missing or doubled tensor-parallel reduction, gradients that reach the backbone or the LM head.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bebop_megatron.config import ObjectiveConfig
from tests.mcore.world import DEPTHS, Layout, run

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


# one process, documents one by one: what layouts of the same data are compared with
REFERENCES = {
    "learned": Layout(positions="learned_absolute"),
    "packed": Layout(data="documents"),
    "padded": Layout(data="ragged-documents"),
}
SP = {"sequence_parallel": True}
PER_TOKEN = {"calculate_per_token_loss": True}
CONTEXT_ONE = {
    "packed-thd": Layout(data="packed"),
    "packed-batch2": Layout(data="packed", micro_batch=2),
    "padded-thd": Layout(data="padded"),
    "padded-per-token": Layout(data="padded", overrides=PER_TOKEN),
}
CONTEXT_TWO = {
    "plain-cp2": Layout(cp=2),
    "plain-cp2-batch2": Layout(cp=2, micro_batch=2),
    "plain-cp2-per-token": Layout(cp=2, overrides=PER_TOKEN),
    "learned-cp2": Layout(cp=2, positions="learned_absolute"),
    "learned-cp2-contiguous": Layout(cp=2, positions="learned_absolute", cp_layout="contiguous"),
    "packed-cp2": Layout(cp=2, data="packed"),
    "packed-cp2-batch2": Layout(cp=2, data="packed", micro_batch=2),
    "padded-cp2": Layout(cp=2, data="padded"),
    "padded-cp2-per-token": Layout(cp=2, data="padded", overrides=PER_TOKEN),
    "padded-dp2": Layout(dp=2, data="padded"),
    "packed-tp2-sp": Layout(tp=2, data="packed", overrides=SP),
    "packed-pp2": Layout(pp=2, data="packed"),
}
CONTEXT_FOUR = {
    "plain-cp4": Layout(cp=4),
    "plain-cp4-per-token": Layout(cp=4, overrides=PER_TOKEN),
    "learned-cp4-contiguous": Layout(cp=4, positions="learned_absolute", cp_layout="contiguous"),
    "plain-tp2-sp-cp2": Layout(tp=2, cp=2, overrides=SP),
    "plain-pp2-cp2": Layout(pp=2, cp=2),
    "plain-dp2-cp2": Layout(dp=2, cp=2),
    "plain-dp2-cp2-per-token": Layout(dp=2, cp=2, overrides=PER_TOKEN),
    "padded-tp2-sp-cp2": Layout(tp=2, cp=2, data="padded", overrides=SP),
    "padded-pp2-cp2": Layout(pp=2, cp=2, data="padded"),
    "padded-dp2-cp2": Layout(dp=2, cp=2, data="padded"),
}


# measured on a validation pass as well
VALIDATED = ("tv", "ce")


def cases(table, kinds):
    return [
        (f"{name}/{kind}", replace(layout, validate=kind in VALIDATED), OBJECTIVES[kind])
        for name, layout in table.items()
        for kind in kinds
    ]


def reference(name):
    """The case that computes the same data on one process."""
    layout, kind = name.split("/")
    data = layout.split("-")[0]
    return f"{data if data in REFERENCES else 'plain'}/{kind}"


SINGLE = cases({"plain": Layout()}, OBJECTIVES) + cases(REFERENCES, ("tv", "lk"))
# with one micro-batch of the whole batch, stock's normalisation by the local count is the global one
WHOLE = Layout(micro_batch=4)
OTHERS = [
    ("no-mtp-loss", Layout(overrides={"mtp_loss_scaling_factor": 0.0}), ObjectiveConfig(loss="ce")),
    ("detached", Layout(), ObjectiveConfig(loss="kl")),
    ("joint", Layout(), ObjectiveConfig(loss="kl", joint=True)),
    ("ours", WHOLE, ObjectiveConfig(loss="ce")),
    ("stock", WHOLE, None),
]
WORLDS = {
    "one": cases(ONE, OBJECTIVES) + cases(CONTEXT_ONE, ("tv", "lk")),
    # one objective for each horizon, and the labels' own
    "two": cases(TWO, ("tv", "tv-partial", "ce", "lk")) + cases(CONTEXT_TWO, ("tv", "lk")),
    "four": cases(FOUR, ("tv", "lk")) + cases(CONTEXT_FOUR, ("tv",)),
}


@pytest.fixture(scope="module")
def found():
    return run(SINGLE + OTHERS + [case for world in WORLDS.values() for case in world])


def same_numbers(name, result, expected):
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5), name
    for depth in range(1, DEPTHS + 1):
        alpha = f"mtp alpha/{depth}"
        assert result["metrics"][alpha] == pytest.approx(expected["metrics"][alpha], rel=1e-5), (name, depth)
    if name.split("/")[1] in VALIDATED:
        assert result["validation"] == pytest.approx(expected["validation"], rel=1e-4, abs=1e-6), name
    assert result["grads"].keys() == expected["grads"].keys(), name
    for key, grad in result["grads"].items():
        scale = expected["grads"][key].abs().max()
        assert scale > 0, (name, key)
        assert (grad - expected["grads"][key]).abs().max() <= 1e-5 * scale + 1e-9, (name, key)


@pytest.mark.parametrize("world", WORLDS)
def test_loss_alpha_and_mtp_gradients_equal_the_single_process(found, world):
    for name, _, _ in WORLDS[world]:
        same_numbers(name, found[name], found[reference(name)])


def test_validation_metrics_are_what_is_counted_by_hand(found):
    for kind in VALIDATED:
        result = found[f"plain/{kind}"]
        validation, expected = result["validation"], result["direct"]
        for name, value in validation.items():
            if "bin" not in name:
                assert value == pytest.approx(expected[name], rel=1e-4, abs=1e-6), (kind, name)
        assert {f"mtp {kind} loss", "mtp accept-length/rejection", "mtp entropy slope/rejection"} <= validation.keys()
        # training on the same batch says the same: no weight has changed yet
        for name, value in result["metrics"].items():
            assert value == pytest.approx(validation[name], rel=1e-4, abs=1e-6), (kind, name)


def test_detached_heads_leave_backbone_embedding_and_lm_head_alone(found):
    for name in (f"plain/{kind}" for kind in OBJECTIVES):
        result = found[name]
        for key, grad in found["no-mtp-loss"]["backbone"].items():
            if not key.startswith("mtp."):
                torch.testing.assert_close(result["backbone"][key], grad, rtol=0, atol=0, msg=f"{name} {key}")


def test_joint_mode_reaches_backbone_embedding_and_lm_head(found):
    for key in ("decoder.layers.0.mlp.linear_fc1.weight", "embedding.word_embeddings.weight", "output_layer.weight"):
        difference = found["joint"]["backbone"][key] - found["detached"]["backbone"][key]
        assert difference.abs().max() > 1e-6, key


def test_ce_equals_stock_megatron_where_every_micro_batch_counts_alike(found):
    for key, grad in found["stock"]["grads"].items():
        torch.testing.assert_close(found["ours"]["grads"][key], grad, rtol=2e-5, atol=1e-8)
