"""Logged acceptance is a ratio of sums, whatever the batches, ranks and masks.

Caught here: means of per-batch means; prefix products that count broken chains; NaN or stale values in rows
that are not valid; 0/0 for a depth without anchors; an acceptance length computed from some of the depths
only; the rules mixed up.
"""

from __future__ import annotations

from dataclasses import fields, replace

import numpy
import pytest
import torch
from torch import Tensor

from bebop_megatron.losses import RowStats
from bebop_megatron.metrics import CURVES, AcceptanceMeter

K, N = 3, 40
RULE_FIELDS = {
    "rejection": "alpha",
    "target-only": "p_argmax_q",
    "greedy-target": "greedy_target",
    "greedy-label": "greedy_label",
}


def make_stats(seed: int = 0, n: int = N) -> RowStats:
    x = torch.rand(len(fields(RowStats)), K, n, generator=torch.Generator().manual_seed(seed))
    stats = RowStats(*x)
    return replace(
        stats,
        target_entropy=3 * stats.target_entropy,
        draft_entropy=3 * stats.draft_entropy,
        greedy_target=stats.greedy_target < 0.6,
        greedy_label=stats.greedy_label < 0.5,
    )


def chains(n: int = N, seed: int = 0) -> Tensor:
    """Validity with complete, broken, late-starting and empty chains."""
    return torch.rand(K, n, generator=torch.Generator().manual_seed(seed)) < 0.7


def by_hand(batches: list[tuple[RowStats, Tensor]], field: str) -> tuple[list[float], list[float]]:
    """Acceptance per depth and prefix products, counted one anchor at a time."""
    single, prefix = [], []
    for depth in range(K):
        alone, product = [], []
        for stats, valid in batches:
            values = getattr(stats, field).double()
            for anchor in range(valid.shape[1]):
                if valid[depth, anchor]:
                    alone.append(float(values[depth, anchor]))
                if valid[: depth + 1, anchor].all():
                    product.append(float(values[: depth + 1, anchor].prod()))
        single.append(sum(alone) / len(alone))
        prefix.append(sum(product) / len(product))
    return single, prefix


def test_every_rule_is_the_ratio_of_sums_over_batches_of_different_size():
    batches = [(make_stats(seed, n), chains(n, seed)) for seed, n in ((0, N), (1, 7), (2, 90))]
    meter = AcceptanceMeter(K)
    for stats, valid in batches:
        meter.update(stats, valid)
    out = meter.compute(per_depth=True)
    for rule, field in RULE_FIELDS.items():
        single, prefix = by_hand(batches, field)
        for depth in range(K):
            assert out[f"mtp accept/{rule}/{depth + 1}"] == pytest.approx(single[depth])
            assert out[f"mtp accept-prefix/{rule}/{depth + 1}"] == pytest.approx(prefix[depth])
        assert out[f"mtp accept-length/{rule}"] == pytest.approx(1 + sum(prefix))
    for name in ("target_entropy", "draft_entropy", "kl"):
        joined = torch.cat([getattr(stats, name)[valid] for stats, valid in batches])
        assert out[f"mtp {name.replace('_', ' ')}"] == pytest.approx(float(joined.double().mean()))


def test_the_default_names_are_few_and_flat():
    meter = AcceptanceMeter(K)
    meter.update(make_stats(), chains())
    assert sorted(meter.compute()) == [
        "mtp accept-length/greedy-label",
        "mtp accept-length/greedy-target",
        "mtp accept-length/rejection",
        "mtp accept-length/target-only",
        "mtp alpha/1",
        "mtp alpha/2",
        "mtp alpha/3",
        "mtp draft entropy",
        "mtp entropy r/rejection",
        "mtp entropy r/target-only",
        "mtp entropy slope/rejection",
        "mtp entropy slope/target-only",
        "mtp kl",
        "mtp target entropy",
        "mtp_1_acceptance_rate",
        "mtp_2_acceptance_rate",
        "mtp_3_acceptance_rate",
    ]


def test_acceptance_over_entropy_is_that_of_all_valid_rows():
    batches = [(make_stats(seed, n), chains(n, seed)) for seed, n in ((0, N), (1, 7))]
    meter = AcceptanceMeter(K)
    for stats, valid in batches:
        meter.update(stats, valid)
    out = meter.compute(per_depth=True)
    entropy = torch.cat([stats.target_entropy[valid] for stats, valid in batches]).double()
    for rule in CURVES:
        accepted = torch.cat([getattr(stats, RULE_FIELDS[rule])[valid] for stats, valid in batches]).double()
        slope, r = numpy.polyfit(entropy, accepted, 1)[0], numpy.corrcoef(entropy, accepted)[0, 1]
        assert out[f"mtp entropy slope/{rule}"] == pytest.approx(slope)
        assert out[f"mtp entropy r/{rule}"] == pytest.approx(r)
        inside = accepted[(entropy >= 1) & (entropy < 1.5)]
        assert out[f"mtp entropy bin/{rule}/1-1.5"] == pytest.approx(float(inside.mean()))
    single, _ = by_hand(batches, "greedy_label")
    assert [out[f"mtp_{depth}_acceptance_rate"] for depth in (1, 2, 3)] == pytest.approx([100 * a for a in single])


def test_states_of_ranks_add_up_to_the_whole():
    whole, ranks = AcceptanceMeter(K), [AcceptanceMeter(K), AcceptanceMeter(K), AcceptanceMeter(K)]
    for seed, rank in ((0, 0), (1, 1), (2, 0)):
        whole.update(make_stats(seed), chains(seed=seed))
        ranks[rank].update(make_stats(seed), chains(seed=seed))
    # the third rank saw no batch at all
    total = torch.stack([rank.state() for rank in ranks]).sum(0)
    assert total.ndim == 1
    assert total.dtype == torch.float64
    assert ranks[2].compute(total) == pytest.approx(whole.compute())


def test_a_rank_without_valid_anchors_changes_nothing():
    meter = AcceptanceMeter(K)
    meter.update(make_stats(), chains())
    before = meter.compute(per_depth=True)
    meter.update(make_stats(1), torch.zeros(K, N, dtype=torch.bool))
    meter.update(make_stats(1, 0), torch.zeros(K, 0, dtype=torch.bool))
    assert meter.compute(per_depth=True) == before


def test_rows_that_are_not_valid_are_never_read():
    stats, valid = make_stats(), chains()
    poison = {}
    for field in fields(RowStats):
        value = getattr(stats, field.name)
        poison[field.name] = value.where(valid, ~value if value.dtype == torch.bool else torch.nan)
    clean, poisoned = AcceptanceMeter(K), AcceptanceMeter(K)
    clean.update(stats, valid)
    poisoned.update(replace(stats, **poison), valid)
    assert torch.equal(clean.state(), poisoned.state())


def test_an_impossible_draft_makes_the_chain_behind_it_worth_zero():
    stats = replace(make_stats(n=1), alpha=torch.tensor([[0.5], [0.0], [1.0]]))
    meter = AcceptanceMeter(K)
    meter.update(stats, torch.ones(K, 1, dtype=torch.bool))
    assert meter.compute()["mtp accept-length/rejection"] == 1.5


def test_what_nothing_was_counted_for_is_left_out():
    assert AcceptanceMeter(K).compute(per_depth=True) == {}
    meter = AcceptanceMeter(K)
    valid = chains()
    valid[2] = False
    meter.update(make_stats(), valid)
    out = meter.compute(per_depth=True)
    assert {"mtp alpha/1", "mtp alpha/2", "mtp accept-prefix/rejection/2", "mtp target entropy"} <= set(out)
    # without its last step the length would look shorter than it is
    absent = ("/3", "_3", "length")
    assert not [name for name in out if any(part in name for part in absent)]


def test_reset_starts_a_new_interval():
    meter = AcceptanceMeter(K)
    meter.update(make_stats(0), chains())
    meter.reset()
    assert meter.compute() == {}
    meter.update(make_stats(1), chains())
    other = AcceptanceMeter(K)
    other.update(make_stats(1), chains())
    assert meter.compute() == other.compute()


def test_a_state_handed_out_does_not_change_later():
    meter = AcceptanceMeter(K)
    meter.update(make_stats(0), chains())
    state = meter.state()
    before = state.clone()
    meter.update(make_stats(1), chains())
    assert torch.equal(state, before)


def test_float32_sums_do_not_saturate():
    """2^24 ones cannot be told from 2^24 + 1 in float32."""
    meter = AcceptanceMeter(1)
    one = torch.ones(1, 1)
    ones, valid = RowStats(*[one] * len(fields(RowStats))), one > 0
    meter.update(ones, valid)
    once = meter.state()
    assert meter._sums is not None
    meter._sums = meter._sums * 2**24
    for curve in meter._curves:
        curve._sums = curve.state() * 2**24
    meter.update(ones, valid)
    assert torch.equal(meter.state(), once * (2**24 + 1))


def test_another_number_of_depths_is_refused():
    with pytest.raises(ValueError, match="counts 2 depths"):
        AcceptanceMeter(2).update(make_stats(), chains())
