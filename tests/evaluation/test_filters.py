"""Temperature, top-k, top-p and the draw itself: one definition for draft and target.

Caught here: padding columns that get mass; ties kept or dropped by chance; top-p that keeps one token too
many or none; filters renormalised in the wrong order; overflow at a tiny temperature; draws of impossible
tokens; a draw that distorts the tail of a large vocabulary.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.evaluation.filters import filtered_probs, sample

PROBS = torch.tensor([0.1, 0.4, 0.2, 0.3])


def test_no_filter_is_softmax_at_the_temperature():
    logits = torch.randn(3, 2, 7)
    torch.testing.assert_close(filtered_probs(logits, 0.7), (logits / 0.7).softmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_result_is_at_least_float32(dtype):
    out = filtered_probs(torch.randn(2, 5).to(dtype), 1.0, top_k=3, top_p=0.9)
    assert out.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(out.sum(-1), torch.ones(2, dtype=out.dtype))


def test_temperature_zero_is_one_hot_at_the_first_maximum():
    logits = torch.tensor([[1.0, 5.0, 5.0], [2.0, 2.0, 2.0]])
    assert filtered_probs(logits, 0.0, top_k=2, top_p=0.5).tolist() == [[0, 1, 0], [1, 0, 0]]


@pytest.mark.parametrize("temperature", [1e-6, 1e-30, 1e-44])
def test_a_tiny_temperature_is_greedy_without_overflow(temperature):
    assert filtered_probs(torch.tensor([900.0, 1000.0, -1000.0]), temperature).tolist() == [0, 1, 0]


@pytest.mark.parametrize("settings", [{}, {"top_k": 3}, {"top_p": 0.99}])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padding_columns_get_nothing(settings, temperature):
    logits = torch.randn(4, 6)
    padded = torch.cat([logits, torch.full((4, 2), 50.0)], dim=1)
    out = filtered_probs(padded, temperature, vocab_size=6, **settings)
    assert (out[:, 6:] == 0).all()
    assert torch.equal(out[:, :6], filtered_probs(logits, temperature, **settings))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.05, [1]), (0.4, [1]), (0.41, [1, 3]), (0.69, [1, 3]), (0.71, [1, 2, 3]), (0.95, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    # 0.4 is not exact in binary: a hair less mass in the first token keeps the test on the safe side of the
    # tie
    out = filtered_probs((PROBS + torch.tensor([-1e-6, 1e-6, 0, 0])).log(), 1.0, top_p=top_p)
    assert out.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(out[kept], PROBS[kept] / PROBS[kept].sum(), atol=1e-5, rtol=0)


def test_top_p_counts_the_mass_that_top_k_left():
    # of 0.4 and 0.3 the first holds 4/7 of what is left, so 0.5 needs it alone and 0.6 needs both
    for top_p, kept in ((0.5, [1]), (0.6, [1, 3])):
        assert filtered_probs(PROBS.log(), 1.0, top_k=2, top_p=top_p).nonzero().flatten().tolist() == kept


def test_ties_are_kept_in_the_order_of_their_ids():
    logits = torch.zeros(40_000)
    assert filtered_probs(logits, 1.0, top_k=5).nonzero().flatten().tolist() == [0, 1, 2, 3, 4]
    assert filtered_probs(logits[:8], 1.0, top_p=0.5).nonzero().flatten().tolist() == [0, 1, 2, 3]


def test_filters_of_more_than_the_vocabulary_change_nothing():
    logits = torch.randn(2, 5)
    assert torch.equal(filtered_probs(logits, 1.0, top_k=99), filtered_probs(logits, 1.0))
    assert torch.equal(filtered_probs(logits, 1.0, top_k=99, top_p=1.0, vocab_size=5), filtered_probs(logits, 1.0))


def test_the_logits_are_left_alone():
    logits = torch.randn(2, 5)
    before = logits.clone()
    filtered_probs(logits, 0.5, top_k=2, top_p=0.5, vocab_size=4)
    filtered_probs(logits, 0.0, vocab_size=4)
    assert torch.equal(logits, before)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"top_k": -1}, "top_k"),
        ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"),
        ({"vocab_size": 6}, "vocab_size"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        filtered_probs(torch.zeros(5), **({"temperature": 1.0} | settings))


def test_draws_follow_unnormalised_weights_and_skip_zeros():
    n = 200_000
    weights = torch.tensor([0.0, 3.0, 1.0, 0.0, 4.0])
    counts = torch.bincount(sample(weights.expand(n, 5), torch.Generator().manual_seed(0)), minlength=5)
    share = weights / 8
    assert (abs(counts / n - share) <= 4 * (share * (1 - share) / n) ** 0.5).all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_draws_reach_the_far_tail_as_often_as_they_should():
    """On CUDA, float32 exponentials come in steps of 6e-8: 3e-8 would win half as often."""
    v, rows, rounds = 2**17, 500, 80
    weights = torch.full((v,), 3e-8, device="cuda")
    weights[0] = 1 - 3e-8 * (v - 1)
    generator = torch.Generator("cuda").manual_seed(0)
    tail = sum(int((sample(weights.expand(rows, v), generator) > 0).sum()) for _ in range(rounds))
    share, n = 3e-8 * (v - 1), rows * rounds
    assert abs(tail / n - share) < 4 * (share * (1 - share) / n) ** 0.5


def test_subnormal_weights_are_drawn_in_proportion():
    weights = torch.tensor([0.0, 1e-44, 3e-44]).expand(20_000, 3)
    draws = sample(weights, torch.Generator().manual_seed(0))
    ratio = float(weights[0, 2] / weights[0].double().sum())
    assert draws.min() == 1
    assert abs((draws == 2).double().mean() - ratio) < 4 * (ratio * (1 - ratio) / 20_000) ** 0.5
