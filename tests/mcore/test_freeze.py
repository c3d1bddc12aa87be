"""Freeze phases over three cycles, for every optimizer and layout: a frozen part does not change by one bit.

Catches: Adam's momentum or decay on a frozen part, its step counted on, a stale master copied back, load balancing that
goes on, a gather or reduction that a frozen bucket still waits for, a backward pass through a frozen backbone, an MTP
layer that still runs, and a first step after a switch that differs from training that was never interrupted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.mcore.freeze_world import Case, run

pytestmark = pytest.mark.dist

PHASES = ("backbone", "mtp", "none")

ONE = {
    "adam": Case(),
    "bf16": Case(bf16=True),
    "moe-distributed-bf16": Case(experts=4, distributed=True, bf16=True),
}
TWO = {
    "dp2": Case(overlap=True),
    "dp2-distributed": Case(distributed=True),
    "dp2-distributed-overlap": Case(distributed=True, overlap=True),
    # experts have an optimizer of their own in the chain
    "ep2-distributed-overlap": Case(ep=2, experts=4, distributed=True, overlap=True),
    "pp2-tied-overlap": Case(pp=2, tied=True, overlap=True),
    "tp2-sp": Case(tp=2),
    # two stages on each rank
    "pp2-vpp2": Case(pp=2, vpp=2, stages="E|t|t|mmL", iterations=5),
    "pp2-vpp2-overlap": Case(pp=2, vpp=2, stages="E|t|t|mmL", overlap=True),
}
THREE = {"separate-mtp-stage": Case(pp=3, stages="Ett|mm|L")}
WORLDS = {1: ONE, 2: TWO, 3: THREE}
CYCLE = 5
# iterations in which the backbone trains
ACTIVE = tuple(i for i in range(15) if i % CYCLE >= 2)


def stock(case, only):
    """The same training by Megatron alone, on the batches of these iterations."""
    return replace(case, schedule=None, only=only)


EXTRA = (
    {"joint": Case(joint=True, iterations=10)}
    | {f"stock {name}": stock(case, ACTIVE) for name, case in ONE.items()}
    | {
        "never frozen": Case(schedule="none", iterations=6),
        "stock never frozen": stock(Case(), tuple(range(6))),
        "reset": Case(schedule="backbone:2,mtp:1", iterations=6, options={"phase_reset_moments": True}),
        "clipped": Case(schedule="mtp:1,none:1", iterations=2, options={"clip_grad": 1e-3}),
        "objective": Case(schedule="backbone:1@kl,none:1", iterations=4),
    }
)


@pytest.fixture(scope="module")
def found():
    """Every case of every world."""
    return run({size: cases | (EXTRA if size == 1 else {}) for size, cases in WORLDS.items()})


@pytest.fixture(params=sorted(WORLDS))
def world(request, found):
    """Every case of one world size that goes through phases."""
    return {name: found[request.param][name] for name in WORLDS[request.param]}


def test_frozen_parts_are_bit_identical_and_active_ones_move(world):
    for name, ranks in world.items():
        for rank in ranks:
            assert rank["changed while frozen"] == [], name
            assert rank["still while active"] == [], name


def test_frozen_backbone_keeps_no_graph_and_frozen_head_does_not_run(world):
    for name, ranks in world.items():
        of = {phase: sum((Counter(rank["counts"].get(phase, {})) for rank in ranks), Counter()) for phase in PHASES}
        assert of["backbone"]["backward backbone"] == of["backbone"]["graph backbone"] == 0, name
        assert of["mtp"]["forward mtp"] == of["mtp"]["backward mtp"] == 0, name
        for phase, part in (("backbone", "mtp"), ("mtp", "backbone"), ("none", "mtp"), ("none", "backbone")):
            assert of[phase][f"forward {part}"] > 0, (name, phase)
            assert of[phase][f"backward {part}"] > 0, (name, phase)


def test_only_gradients_of_what_trains_are_reduced(found):
    (rank, _) = found[2]["dp2"]
    steps = {"backbone": 6, "mtp": 6, "none": 3}
    size = rank["numel"]
    trains = {"backbone": size["mtp"], "mtp": size["backbone"], "none": size["backbone"] + size["mtp"]}
    for phase, values in trains.items():
        assert rank["counts"][phase]["reduced"] == steps[phase] * values


def test_language_model_loss_is_the_same_under_a_frozen_backbone(found):
    # without logits of its own: from the rows that the MTP objective projects, also where the vocabulary is sharded
    expected = found[1]["never frozen"][0]["lm losses"][0]
    assert expected > 100
    assert found[1]["adam"][0]["lm losses"][0] == pytest.approx(expected, rel=1e-6)
    assert found[2]["tp2-sp"][0]["lm losses"][0] == pytest.approx(expected, rel=1e-6)
    assert found[3]["separate-mtp-stage"][2]["lm losses"][0] == pytest.approx(expected, rel=1e-6)
    assert sum(rank["lm losses"][0] for rank in found[2]["dp2"]) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["pp2-vpp2", "pp2-vpp2-overlap"])
def test_interleaved_stages_have_the_losses_of_one_process_in_every_phase(found, name):
    (one,), (_, last) = found[1]["adam"], found[2][name]
    # later cycles add up what rounding does to Adam
    assert last["lm losses"][:CYCLE] == pytest.approx(one["lm losses"][:CYCLE], rel=1e-5)
    # none while the head is frozen
    assert [loss is None for loss in last["mtp losses"][:CYCLE]] == [False, False, True, True, False]
    trained = [[loss for loss in side["mtp losses"][:CYCLE] if loss is not None] for side in (last, one)]
    assert trained[0] == pytest.approx(trained[1], rel=1e-5)


def test_stages_below_the_head_exchange_no_gradients_under_a_frozen_backbone(found):
    def exchanged(name, size, phase):
        counts = [Counter(rank["counts"][phase]) for rank in found[size][name]]
        return [(c["gradients sent"], c["gradients awaited"]) for c in counts]

    # four micro-batches in each of the phase's iterations
    assert exchanged("pp2-tied-overlap", 2, "backbone") == [(0, 0), (0, 0)]
    assert exchanged("pp2-tied-overlap", 2, "none") == [(0, 12), (12, 0)]
    # the head on a stage of its own still hears from the loss behind it
    assert exchanged("separate-mtp-stage", 3, "backbone") == [(0, 0), (0, 24), (24, 0)]


@pytest.mark.parametrize("name", sorted(ONE))
def test_backbone_trains_as_if_it_had_never_been_frozen(found, name):
    ours, alone = found[1][name][0]["bits"], found[1][f"stock {name}"][0]["bits"]
    compared = [key for key in alone if key.startswith("backbone model ")]
    assert len(compared) > 10
    for key in compared:
        assert torch.equal(ours[key], alone[key]), key


def test_coupled_heads_keep_a_frozen_backbone_as_it_is(found):
    (rank,) = found[1]["joint"]
    assert rank["changed while frozen"] == rank["still while active"] == []
    assert "backward backbone" not in rank["counts"]["backbone"]


def test_schedule_without_frozen_parts_is_megatron_bit_for_bit(found):
    ours, alone = found[1]["never frozen"][0]["bits"], found[1]["stock never frozen"][0]["bits"]
    for key in alone:
        assert " model " not in key or torch.equal(ours[key], alone[key]), key


def test_overlap_gives_the_same_weights(found):
    # the objective reads the LM head without its forward pass, whose hook would have waited for the gather
    for rank in found[2]["dp2-distributed-overlap"]:
        for counts in rank["counts"].values():
            assert counts.get("weight on its way", 0) == 0
    plain, overlapped = (found[2][name][0]["bits"] for name in ("dp2-distributed", "dp2-distributed-overlap"))
    for key, value in plain.items():
        if " model " in key:
            # shards are cut elsewhere, so the clipping norm is added up in another order
            torch.testing.assert_close(overlapped[key], value, rtol=1e-4, atol=1e-5, msg=key)


def test_each_part_counts_its_own_steps(found):
    bits = found[1]["adam"][0]["bits"]
    steps = {key: int(value) for key, value in bits.items() if key.endswith((" step", " steps"))}
    assert {value for key, value in steps.items() if key.startswith("backbone")} == {9}
    assert {value for key, value in steps.items() if key.startswith("mtp")} == {9}
    # mtp trains in iterations 0, 1, [3, 4], each time from zero
    reset = found[1]["reset"][0]["bits"]
    assert {int(v) for k, v in reset.items() if k.startswith("mtp") and k.endswith((" step", " steps"))} == {2}
    assert {int(v) for k, v in reset.items() if k.startswith("backbone") and k.endswith(" steps")} == {2}


def test_head_is_clipped_by_its_own_norm_also_if_it_was_frozen_first(found):
    bits = found[1]["clipped"][0]["bits"]
    gradient = torch.cat([v.flatten() for key, v in bits.items() if key.startswith("mtp") and key.endswith(" exp_avg")])
    # the first moment after one step is a tenth of the gradient
    assert float(gradient.norm()) == pytest.approx(0.1 * 1e-3, rel=1e-3)


def test_phase_objective_holds_for_its_phase(found):
    assert found[1]["objective"][0]["losses"] == ["kl", "tv", "kl", "tv"]
