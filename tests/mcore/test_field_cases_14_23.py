"""Field cases 14 to 23: faults that users of public MTP trainers reported, each with the value that is right here.

Case 21, and the batches that a training run reads for case 20, need Megatron's own loop: see
`tests/test_pretrain_features.py`.
"""

from __future__ import annotations

import pytest
import torch

from tests.mcore.feature_cases import Case
from tests.mcore.feature_world import run
from tests.mcore.weights import direction

pytestmark = pytest.mark.dist

_FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_SILENT = {"mtp_loss_scaling_factor": 0.0}
_LOUD = {"mtp_loss_scaling_factor": 1000.0}
_CLIP = {"clip_grad": 0.05}
# the last stage holds only MTP layers
_ALONE = "Etttt|mmL"
NUDGE = 2e-3
ONE = {
    **{f"{kind}/loud": Case(kind=kind, overrides=_LOUD) for kind in ("dense", "tied", "hybrid")},
    **{f"{kind}/silent": Case(kind=kind, overrides=_SILENT) for kind in ("dense", "tied", "hybrid")},
    "distinct/plus": Case(kind="distinct", nudge=NUDGE, loss="kl"),
    "distinct/minus": Case(kind="distinct", nudge=-NUDGE, loss="kl"),
    "distinct": Case(kind="distinct", loss="kl"),
    "clipped/loud": Case(steps=1, overrides=_LOUD, optimizer=_CLIP),
    "clipped/silent": Case(steps=1, overrides=_SILENT, optimizer=_CLIP),
    "unclipped/silent": Case(steps=1, overrides=_SILENT),
    "packed": Case(packed=True),
    "packed/recompute": Case(packed=True, overrides=_FULL),
    "packed/hybrid": Case(kind="hybrid", packed=True),
    "packed/hybrid/recompute": Case(kind="hybrid", packed=True, overrides=_FULL),
    "frozen": Case(steps=1, frozen=True),
    "two-steps": Case(steps=2),
    "resumed": Case(steps=2, saved_as=Case()),
    "initial": Case(steps=1, optimizer={"lr": 0.0}),
}
TWO = {
    "frozen/pp2": Case(pp=2, steps=1, frozen=True),
    "frozen/pp2/distributed": Case(pp=2, steps=1, frozen=True, optimizer={"use_distributed_optimizer": True}),
    "alone": Case(pp=2, stages=_ALONE, steps=2),
    "alone/resumed": Case(pp=2, stages=_ALONE, steps=2, saved_as=Case(pp=2, stages=_ALONE)),
}


@pytest.fixture(scope="module")
def results():
    return run({1: ONE, 2: TWO})


def _close(actual: dict, expected: dict) -> None:
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", ["dense", "tied", "hybrid"])
def test_case_14_no_mtp_gradient_in_lm_head_embedding_or_backbone(results, kind):
    loud, silent = results[f"{kind}/loud"]["grads"], results[f"{kind}/silent"]["grads"]
    for name in silent:
        if not name.startswith("mtp."):
            assert torch.equal(loud[name], silent[name]), name


def test_case_15_depth_two_teaches_depth_one(results):
    # the slope of the loss along a direction of the first layer's weights is the gradient's, through both depths
    slope = (results["distinct/plus"]["loss"] - results["distinct/minus"]["loss"]) / (2 * NUDGE)
    grads = results["distinct"]["grads"]
    along = sum(
        float((grad.double() * direction(name, grad.shape)).sum())
        for name, grad in grads.items()
        if name.startswith("mtp.layers.0.")
    )
    assert along / 0.3 == pytest.approx(slope, rel=2e-2)


def test_case_16_mtp_gradients_do_not_shrink_the_clipped_backbone_update(results):
    loud, silent = results["clipped/loud"], results["clipped/silent"]
    for name, value in silent["weights"].items():
        if not name.startswith("mtp."):
            assert torch.equal(loud["weights"][name], value), name
    # and clipping was at work
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert not torch.equal(results["unclipped/silent"]["weights"][name], silent["weights"][name])


def test_case_17_mtp_loss_is_off_at_scale_zero(results):
    grads = results["dense/silent"]["grads"]
    heads = [name for name in grads if name.startswith("mtp.")]
    assert heads
    assert not any(grads[name].any() for name in heads)


@pytest.mark.parametrize("name", ["packed", "packed/hybrid"])
def test_case_18_full_recomputation_of_packed_sequences(results, name):
    plain, recomputed = results[name], results[f"{name}/recompute"]
    assert recomputed["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    _close(recomputed["grads"], plain["grads"])


@pytest.mark.parametrize("name", ["frozen/pp2", "frozen/pp2/distributed"])
def test_case_19_a_stage_where_everything_is_frozen_has_an_optimizer(results, name):
    _close(results[name]["weights"], results["frozen"]["weights"])
    before = results["initial"]["weights"]
    for weight, value in results[name]["weights"].items():
        assert torch.equal(value, before[weight]) != weight.startswith("mtp."), weight


def test_case_20_a_stage_of_mtp_layers_alone_gets_its_batches(results):
    alone, one = results["alone"], results["two-steps"]
    assert alone["loss"] == pytest.approx(one["loss"], rel=1e-5)


def test_case_22_the_mtp_stage_resumes_with_the_embedding_of_the_first(results):
    for name in ("alone", "alone/resumed"):
        assert results[name]["drifted"] == []
        assert results[name]["lm"] == pytest.approx(results["two-steps"]["lm"], rel=1e-5)
        _close(results[name]["weights"], results["two-steps"]["weights"])


def test_case_23_saved_mtp_weights_are_the_trained_ones_under_megatrons_names(results):
    resumed = results["resumed"]
    _close(resumed["weights"], results["two-steps"]["weights"])
    assert "mtp.layers.0.transformer_layer.mlp.linear_fc1.weight" in resumed["keys"]
    assert not [key for key in resumed["keys"] if "mtp_model_layer" in key]
    for name, value in results["initial"]["weights"].items():
        if name.startswith("mtp."):
            assert not torch.equal(resumed["weights"][name], value), name
