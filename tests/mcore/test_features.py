"""Every Megatron feature gives the loss, acceptance and gradients of one process, and leaves the backbone alone.

Catches: data read by the wrong virtual stage, an embedding copy that drifts, experts named or reduced over the wrong
group, a lost gradient under overlap or recomputation, weights or moments that change places in a checkpoint.
"""

from __future__ import annotations

import pytest
import torch

from tests.mcore.feature_cases import MODELS, Case
from tests.mcore.feature_world import run

pytestmark = pytest.mark.dist

_OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 1500}
_SHARDED = {"use_distributed_optimizer": True}
_GATHER = {"overlap_param_gather": True}
_HYBRID, _EXPERTS = "G-G-|G-*-/*-/*-", "GEGE|GE*E/*E/*E"


def _recompute(*modules: str, kind: str = "dense") -> Case:
    if not modules:
        settings = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    else:
        settings = {"recompute_granularity": "selective", "recompute_modules": list(modules)}
    return Case(kind=kind, overrides=settings)


# one process: what a feature computes must be what the plain model computes
ONE = {
    "micro-batch-4": Case(micro_batch=4),
    "micro-batch-2-per-token": Case(micro_batch=2, overrides={"calculate_per_token_loss": True}),
    "recompute-full": _recompute(),
    "recompute-full-hybrid": _recompute(kind="hybrid"),
    "recompute-full-moe": _recompute(kind="moe"),
    "recompute-selective": _recompute("core_attn", "layernorm", "mlp"),
    "recompute-selective-moe": _recompute("moe", kind="moe"),
    "recompute-selective-mla": _recompute("mla_up_proj", kind="mla"),
    "recompute-selective-hybrid": _recompute("core_attn", "mlp", kind="hybrid"),
}
# four processes; neighbours share their process groups where they can
FOUR = {
    "dp4": Case(),
    "dp4-adam": Case(steps=2),
    "dp4-overlap": Case(steps=2, ddp=_OVERLAP),
    "dp4-distributed-optimizer": Case(steps=2, optimizer=_SHARDED),
    "dp4-distributed-optimizer-overlap": Case(steps=2, optimizer=_SHARDED | _GATHER, ddp=_OVERLAP | _GATHER),
    "tp2": Case(tp=2),
    "tp2-distinct": Case(kind="distinct", tp=2),
    "tp2-mla": Case(kind="mla", tp=2),
    "tp2-hybrid": Case(kind="hybrid", tp=2),
    "tp2-pp2-tied": Case(kind="tied", tp=2, pp=2),
    "tp2-pp2-per-token-adam": Case(tp=2, pp=2, steps=2, overrides={"calculate_per_token_loss": True}),
    "pp2-distinct": Case(kind="distinct", pp=2),
    "pp2-mla": Case(kind="mla", pp=2),
    "pp2-hybrid-distributed-optimizer-overlap": Case(
        kind="hybrid", pp=2, stages=_HYBRID, steps=2, optimizer=_SHARDED, ddp=_OVERLAP
    ),
    "pp2-overlap": Case(pp=2, steps=2, ddp=_OVERLAP),
    "pp2-tied-overlap": Case(kind="tied", pp=2, steps=2, ddp=_OVERLAP),
    "pp2-vpp2": Case(pp=2, vpp=2),
    "pp2-vpp2-layout": Case(pp=2, vpp=2, stages="Ett|t|t|mmL"),
    "pp2-vpp2-distributed-optimizer-overlap": Case(
        pp=2, vpp=2, steps=2, optimizer=_SHARDED | _GATHER, ddp=_OVERLAP | _GATHER
    ),
    "pp4": Case(pp=4),
    "separate-stage": Case(pp=4, stages="Ett|tt|mm|L", steps=2),
    "separate-stage-overlap": Case(pp=4, stages="Ett|tt|mm|L", steps=2, ddp=_OVERLAP),
    "separate-stage-tied": Case(kind="tied", pp=4, stages="Ett|tt|mm|L", steps=2),
    "mtp-with-backbone-layers": Case(pp=4, stages="Et|tt|tmm|L"),
    "ep2-moe": Case(kind="moe", ep=2),
    "ep4-moe": Case(kind="moe", ep=4),
    "tp2-ep2-moe": Case(kind="moe", tp=2, ep=2, steps=2, optimizer=_SHARDED, ddp=_OVERLAP),
    "tp2-ep2-moe-mla": Case(kind="moe-mla", tp=2, ep=2),
    "tp2-ep2-hybrid-moe": Case(kind="hybrid-moe", tp=2, ep=2),
    "pp2-ep2-hybrid-moe": Case(kind="hybrid-moe", pp=2, ep=2, stages=_EXPERTS),
    "pp2-vpp2-ep2-moe": Case(kind="moe", pp=2, vpp=2, ep=2),
    "pp2-vpp2-chain": Case(pp=2, vpp=2, attention="chain"),
    "separate-stage-chain": Case(pp=4, stages="Ett|tt|mm|L", attention="chain"),
    "tp2-ep2-moe-chain": Case(kind="moe", tp=2, ep=2, attention="chain"),
    "pp2-hybrid-chain": Case(kind="hybrid", pp=2, stages=_HYBRID, attention="chain"),
}
# saved under one layout, loaded under another
RESHARDED = {
    "tp2-pp2-to-dp4-distributed-optimizer": Case(
        steps=2, optimizer=_SHARDED, saved_as=Case(tp=2, pp=2, optimizer=_SHARDED)
    ),
    "pp2-to-tp2-adam": Case(tp=2, steps=2, saved_as=Case(pp=2)),
    "vpp-to-separate-stage": Case(pp=4, stages="Ett|tt|mm|L", saved_as=Case(pp=2, vpp=2)),
    "tp2-pp2-to-pp2-tied-adam": Case(kind="tied", pp=2, steps=2, saved_as=Case(kind="tied", tp=2, pp=2)),
    "separate-stage-to-tp2-tied": Case(kind="tied", tp=2, saved_as=Case(kind="tied", pp=4, stages="Ett|tt|mm|L")),
    "pp2-to-tp2-distinct": Case(kind="distinct", tp=2, saved_as=Case(kind="distinct", pp=2)),
    "tp2-ep2-to-ep4-moe-distributed-optimizer": Case(
        kind="moe", ep=4, steps=2, optimizer=_SHARDED, saved_as=Case(kind="moe", tp=2, ep=2, optimizer=_SHARDED)
    ),
    "pp2-to-tp2-ep2-hybrid-moe": Case(
        kind="hybrid-moe", tp=2, ep=2, saved_as=Case(kind="hybrid-moe", pp=2, ep=2, stages=_EXPERTS)
    ),
}
REFERENCES = (
    {f"one/{kind}/0": Case(kind=kind) for kind in MODELS}
    | {f"one/{kind}/2": Case(kind=kind, steps=2) for kind in ("dense", "tied", "moe", "hybrid")}
    | {f"one/{kind}/0/chain": Case(kind=kind, attention="chain") for kind in ("dense", "moe", "hybrid")}
    | {f"no-mtp/{kind}/0": Case(kind=kind, overrides={"mtp_loss_scaling_factor": 0.0}) for kind in MODELS}
)
MODES = {
    "eval": Case(mode="eval"),
    "eval-without-objective": Case(mode="eval", loss=None),
    "no-labels": Case(mode="no-labels", micro_batch=4),
    "last-masked": Case(mode="last-masked", micro_batch=4),
}
LAYOUTS = ONE | FOUR | RESHARDED


@pytest.fixture(scope="module")
def results():
    return run({1: REFERENCES | MODES | ONE, 4: FOUR | RESHARDED})


def _assert_close(actual: dict, expected: dict, names: list[str], tolerance: float) -> None:
    assert names
    for name in names:
        scale = expected[name].abs().max()
        difference = (actual[name] - expected[name]).abs().max()
        assert difference <= tolerance * scale + 1e-9, (name, float(difference / (scale + 1e-12)))


def _parts(tensors: dict) -> tuple[list[str], list[str]]:
    head = [name for name in tensors if name.startswith("mtp.")]
    return head, [name for name in tensors if not name.startswith("mtp.")]


@pytest.mark.parametrize("name", LAYOUTS)
def test_loss_acceptance_and_mtp_gradients_equal_the_single_process(results, name):
    case, result = LAYOUTS[name], results[name]
    expected = results["/".join(["one", case.kind, str(case.steps), *filter(None, [case.attention])])]
    assert result["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    torch.testing.assert_close(result["alpha"], expected["alpha"], rtol=1e-5, atol=1e-5)
    if case.optimizer.get("use_distributed_optimizer"):
        # each rank keeps its own part of a reduced gradient: what the optimizer made of it is compared instead
        assert case.steps
    else:
        assert result["grads"].keys() == expected["grads"].keys()
        head, _ = _parts(expected["grads"])
        _assert_close(result["grads"], expected["grads"], head, 1e-5)
    assert all(expected["grads"][key].abs().max() > 0 for key in _parts(expected["grads"])[0])
    if case.steps:
        # copies on several ranks, such as an MTP stage's embedding, stay what they were
        assert not result["drifted"]
        _assert_close(result["weights"], expected["weights"], list(expected["weights"]), 1e-5)


@pytest.mark.parametrize("name", [name for name, case in LAYOUTS.items() if not case.steps])
def test_backbone_gradients_are_those_without_an_mtp_loss(results, name):
    expected = results[f"no-mtp/{LAYOUTS[name].kind}/0"]["grads"]
    # a leak would be thousands of times larger than the rounding of the sequence-parallel delta net
    _assert_close(results[name]["grads"], expected, _parts(expected)[1], 5e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_backbone_gradients_are_bit_identical_in_one_process(results, kind):
    expected, actual = results[f"no-mtp/{kind}/0"]["grads"], results[f"one/{kind}/0"]["grads"]
    for name in _parts(expected)[1]:
        assert torch.equal(actual[name], expected[name]), name


def test_evaluation_mode_computes_the_language_model_loss_alone(results):
    assert results["eval"]["lm"] == results["eval-without-objective"]["lm"] == results["one/dense/0"]["lm"]
    assert "loss" not in results["eval"]
    assert not any(grad.abs().max() > 0 for grad in results["eval"]["grads"].values())


def test_without_labels_the_ids_are_the_labels(results):
    given, derived = results["last-masked"], results["no-labels"]
    assert derived["loss"] == pytest.approx(given["loss"], rel=1e-6)
    _assert_close(derived["grads"], given["grads"], list(given["grads"]), 1e-5)
