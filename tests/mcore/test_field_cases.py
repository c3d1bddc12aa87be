"""Faults that users of other MTP trainers reported, each with the right value.

The numbers are those of the project's list: 1 to 7 scale and normalisation, 8 to 13 alignment and masks.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.config import ObjectiveConfig
from bebop_megatron.mcore.rolling import roll
from bebop_megatron.mcore.sharding import pack
from bebop_megatron.mcore.targets import targets_of
from tests.mcore import batch
from tests.mcore.world import DEPTHS, Layout, run

pytestmark = pytest.mark.dist

TV, JOINT = ObjectiveConfig(loss="tv"), ObjectiveConfig(loss="kl", joint=True)
KL, PARTIAL = ObjectiveConfig(loss="kl"), ObjectiveConfig(loss="tv", horizon="partial")
PER_TOKEN = {"calculate_per_token_loss": True}
NO_MTP = {"mtp_loss_scaling_factor": 0.0}
ONE = {
    "plain": (Layout(), TV),
    "twice": (Layout(data="twice"), TV),
    "nothing": (Layout(data="nothing"), TV),
    "one-rank": (Layout(data="one-rank"), TV),
    "minus-hundred": (Layout(data="minus-hundred"), TV),
    "fp16": (Layout(fp16=True), KL),
    "fp16-per-token": (Layout(fp16=True, overrides=PER_TOKEN), KL),
    "ragged-documents": (Layout(data="ragged-documents"), TV),
    "partial": (Layout(data="ragged-documents"), PARTIAL),
    "learned": (Layout(positions="learned_absolute"), TV),
    "learned-documents": (Layout(positions="learned_absolute", data="documents"), TV),
    "learned-packed": (Layout(positions="learned_absolute", data="packed"), TV),
    "labelled-tokens": (Layout(data="labelled-tokens"), TV),
    "tokens": (Layout(data="tokens"), TV),
    "labelled-documents": (Layout(data="labelled-documents"), TV),
    "packed-tokens": (Layout(data="packed-tokens"), TV),
    "whole-micro-batch": (Layout(micro_batch=4), TV),
    "unreadable": (Layout(micro_batch=4, batches="unreadable"), TV),
    "unreadable-per-token": (Layout(micro_batch=4, batches="unreadable", overrides=PER_TOKEN), TV),
    "evaluation": (Layout(evaluate=True), TV),
    "joint-per-token": (Layout(overrides=PER_TOKEN), JOINT),
    "joint": (Layout(), JOINT),
    "detached": (Layout(), KL),
}
TWO = {
    "plain": (Layout(cp=2), TV),
    "no-mtp": (Layout(cp=2, overrides=NO_MTP), TV),
    "per-token-dp2": (Layout(dp=2, overrides=PER_TOKEN), TV),
    "per-token-cp2": (Layout(cp=2, overrides=PER_TOKEN), TV),
    "nothing": (Layout(cp=2, data="nothing"), TV),
    "one-rank": (Layout(cp=2, data="one-rank"), TV),
    "one-rank-unreadable": (Layout(cp=2, data="one-rank", micro_batch=4, batches="unreadable"), TV),
    "one-rank-unreadable-per-token": (
        Layout(cp=2, data="one-rank", micro_batch=4, batches="unreadable", overrides=PER_TOKEN),
        TV,
    ),
    "cut": (Layout(cp=2, micro_batch=4, batches="cut"), TV),
    "minus-hundred": (Layout(cp=2, data="minus-hundred"), TV),
    "fp16": (Layout(cp=2, fp16=True), KL),
    "padded": (Layout(cp=2, data="padded"), TV),
    "partial": (Layout(cp=2, data="padded"), PARTIAL),
    "contiguous": (Layout(cp=2, positions="learned_absolute", cp_layout="contiguous"), TV),
    "learned": (Layout(cp=2, positions="learned_absolute"), TV),
    "learned-packed": (Layout(cp=2, positions="learned_absolute", data="packed"), TV),
    "tokens": (Layout(cp=2, data="tokens"), TV),
    "packed-tokens": (Layout(cp=2, data="packed-tokens"), TV),
    "evaluation": (Layout(cp=2, evaluate=True), TV),
    "joint-per-token": (Layout(cp=2, overrides=PER_TOKEN), JOINT),
    "joint": (Layout(cp=2), JOINT),
    "detached": (Layout(cp=2), KL),
}


@pytest.fixture(scope="module")
def found():
    tables = {"one": ONE, "two": TWO}
    return run([(f"{world} {name}", *case) for world, table in tables.items() for name, case in table.items()])


@pytest.fixture(scope="module")
def one(found):
    return {name: found[f"one {name}"] for name in ONE}


@pytest.fixture(scope="module")
def two(found):
    return {name: found[f"two {name}"] for name in TWO}


def difference(result, expected, part="grads"):
    """Largest difference of any gradient, relative to the largest entry of that gradient."""
    assert result[part].keys() == expected[part].keys()
    return max(
        float((grad - expected[part][key]).abs().max() / expected[part][key].abs().max())
        for key, grad in result[part].items()
    )


def same(result, expected, tolerance=1e-5):
    assert result["loss"] == pytest.approx(expected["loss"], rel=tolerance)
    assert difference(result, expected) <= tolerance


def test_case_01_mtp_gradient_has_the_context_parallel_factor(one, two):
    same(two["plain"], one["plain"])


def test_case_02_unequal_micro_batches_weigh_by_their_anchors_in_per_token_mode(one, two):
    same(two["per-token-dp2"], one["plain"])
    same(two["per-token-cp2"], one["plain"])


def test_case_03_rank_without_targets_keeps_the_gradient_of_the_others(one, two):
    for name in ("one-rank", "one-rank-unreadable", "one-rank-unreadable-per-token"):
        same(two[name], one["one-rank"])


def test_case_03_batch_without_any_target_has_zero_gradient_and_no_nan(one, two):
    for world in (one, two):
        assert world["nothing"]["loss"] == 0
        assert all((grad == 0).all() for grad in world["nothing"]["grads"].values())


def test_case_04_gradient_is_a_mean_that_more_of_the_same_data_does_not_change(one):
    same(one["twice"], one["plain"])


def test_case_05_logged_loss_is_a_ratio_of_sums(one):
    # micro-batches of no, one and many anchors against all of them in one
    assert one["plain"]["loss"] == pytest.approx(one["whole-micro-batch"]["loss"], rel=1e-6)
    for depth in range(1, DEPTHS + 1):
        name = f"mtp alpha/{depth}"
        assert one["plain"]["metrics"][name] == pytest.approx(one["whole-micro-batch"]["metrics"][name], rel=1e-6)


def test_case_06_fp16_loss_scale_multiplies_the_mtp_gradient(one, two):
    # gradients are divided by the scale before they are compared; tv would jump where fp16 turns q <= p around
    for result in (one["fp16"], one["fp16-per-token"], two["fp16"]):
        same(result, one["detached"], tolerance=2e-2)


def test_case_07_loss_under_context_parallelism_is_finite_and_that_of_one_process(one, two):
    for name in ("plain", "one-rank", "minus-hundred"):
        assert two[name]["loss"] == pytest.approx(one[name]["loss"], rel=1e-5)
        assert all(grad.isfinite().all() for grad in two[name]["grads"].values())


def test_case_08_labels_are_shifted_by_the_depth_and_not_once_more():
    # the token at position p is p; Megatron's labels are shifted once already
    tokens = torch.arange(12)[None]
    labels = torch.cat([tokens[:, 1:], torch.tensor([[0]])], dim=1)
    mask = torch.tensor([[1.0] * 11 + [0.0]])
    for given in ((labels, mask, None), (None, None, tokens)):
        targets = targets_of(*given, DEPTHS, None, None, "zigzag")
        for depth in range(1, DEPTHS + 1):
            valid = targets.alignment.valid[depth - 1]
            assert valid.tolist() == [t + depth + 1 < 12 for t in range(12)]
            assert torch.equal(targets.labels[depth - 1][valid], (tokens[0] + depth + 1)[valid])


def test_case_09_depth_counts_by_the_mask_of_its_own_label_and_prompts_are_no_target():
    # labels 4..8 are an answer, the rest is prompt and padding
    mask = torch.zeros(1, 12)
    mask[0, 4:9] = 1
    targets = targets_of(torch.arange(12)[None], mask, None, 3, None, None, "zigzag")
    for depth in (1, 2, 3):
        counted = targets.alignment.valid[depth - 1].nonzero().flatten().tolist()
        assert counted == [t for t in range(12) if 4 <= t + depth <= 8]
    # chains that are valid at every depth: their labels are all in the answer
    assert targets.alignment.valid.all(0).nonzero().flatten().tolist() == [3, 4, 5]


def test_case_10_labels_of_minus_hundred_are_no_positions(one, two):
    same(one["minus-hundred"], one["plain"])
    same(two["minus-hundred"], one["plain"])


def test_case_11_packed_shift_stops_where_padding_starts(one, two):
    same(two["padded"], one["ragged-documents"])
    same(two["partial"], one["partial"])


def test_case_12_rows_ahead_come_from_the_rank_that_holds_them_in_either_layout(one, two):
    same(two["learned"], one["learned"])
    same(two["contiguous"], one["learned"])


def test_case_13_position_ids_move_with_the_ids(one, two):
    flat, packed = pack(batch.packed(batch.EXACT))
    ids, positions = flat["tokens"], flat["position_ids"]
    for _ in range(DEPTHS):
        before = ids, positions
        ids, positions, none = roll([ids, positions, None], packed, None, "zigzag")
        assert none is None
        last = packed.cu_seqlens_q[1:].long() - 1
        inside = torch.ones(ids.shape[1], dtype=torch.bool)
        inside[last] = False
        for new, old in zip((ids, positions), before, strict=True):
            assert torch.equal(new[0][:-1][inside[:-1]], old[0][1:][inside[:-1]])
            assert (new[0][last] == 0).all()
    # learned positions are looked up by these ids: documents alone are the measure
    same(one["learned-packed"], one["learned-documents"])
    same(two["learned-packed"], one["learned-documents"])


def test_halo_comes_once_per_micro_batch_and_every_collective_names_its_group(two):
    for calls in two["plain"]["collectives"]:
        assert all(named for _, named, _ in calls)
        assert not {"isend", "irecv"} & {name for name, _, _ in calls}
        gathers = [fractions for name, _, fractions in calls if name == "all_gather_into_tensor"]
        # in each of four micro-batches the attention of two layers and three drafts gathers keys and values
        assert sum(gathers) == 4 * (2 * (2 + DEPTHS) + 1)
        # ids with positions for each depth, and labels with masks
        assert len(gathers) - sum(gathers) == 4 * (DEPTHS + 1)


def test_labels_absent_means_that_ids_are_the_labels(one, two):
    same(one["tokens"], one["labelled-tokens"])
    same(two["tokens"], one["labelled-tokens"])
    same(one["packed-tokens"], one["labelled-documents"])
    same(two["packed-tokens"], one["labelled-documents"])


def test_batches_that_cannot_be_counted_ahead_are_normalised_by_micro_batch(one, two):
    # the same number where one micro-batch is the whole batch
    same(one["unreadable"], one["plain"])
    same(one["unreadable-per-token"], one["plain"])
    same(two["cut"], one["plain"])


def test_evaluation_computes_no_mtp_loss_and_no_rank_waits(one, two):
    for world in (one, two):
        assert world["evaluation"]["loss"] is None
        assert all((grad == 0).all() for grad in world["evaluation"]["backbone"].values())


def test_detached_heads_leave_the_backbone_alone_under_context_parallelism(two):
    for key, grad in two["no-mtp"]["backbone"].items():
        if not key.startswith("mtp."):
            torch.testing.assert_close(two["plain"]["backbone"][key], grad, rtol=0, atol=0, msg=key)


def test_joint_mode_is_exact_too_because_the_step_is_counted_ahead(one, two):
    assert difference(two["joint-per-token"], one["joint-per-token"], "backbone") <= 2e-5
    # Megatron averages its own loss by rank: what the MTP loss adds to the backbone is still the same
    for key in one["joint"]["backbone"]:
        added = [world["joint"]["backbone"][key] - world["detached"]["backbone"][key] for world in (two, one)]
        scale = one["joint"]["backbone"][key].abs().max()
        assert (added[0] - added[1]).abs().max() <= 2e-5 * scale, key
