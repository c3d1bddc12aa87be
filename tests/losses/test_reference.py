"""Facts about the objectives that hold for the specification itself, whatever computes it.

Catches: a specification that agrees with a fast path in the same mistake; end-to-end weights 0/0 for a dead chain; `lk`
without a gradient below its floor; probabilities that underflow before their logarithm; a mean over no anchor;
serving filters that cut equal logits apart.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from bebop_megatron.losses.prefix import end_to_end_weights, prefix_products
from bebop_megatron.losses.reference import ALPHA_FLOOR, reference_objective
from tests.losses.problem import COUNTED, KINDS, logits, specify_logits


def gradient(draft: Tensor, target: Tensor | None, kind: str, **options) -> tuple[Tensor, Tensor]:
    draft = draft.double().detach().requires_grad_()
    options.setdefault("valid", torch.ones(draft.shape[:2], dtype=torch.bool))
    loss = reference_objective(draft, target, kind, **options)
    (grad,) = torch.autograd.grad(loss, draft, allow_unused=True, materialize_grads=True)
    return loss.detach(), grad


def one_row(*probabilities: float) -> Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log().view(1, 1, -1)


@pytest.mark.parametrize("seed", range(5))
def test_the_gradient_of_total_variation_has_norm_2s_times_1_minus_s(seed):
    problem = logits(1, 1, 50, seed, holes=False)
    _, grad = gradient(problem.draft, problem.target, "tv-step")
    q, p = problem.draft.softmax(-1), problem.target.softmax(-1)
    s = q[q <= p].sum()
    torch.testing.assert_close(grad.abs().sum(), 2 * s * (1 - s), rtol=1e-12, atol=0)
    assert grad.abs().sum() <= 0.5
    assert (grad.abs() <= q).all()


def test_total_variation_does_not_move_a_cold_head_and_kl_does():
    v = 248_320
    draft, target = torch.zeros(1, 1, v), torch.zeros(1, 1, v)
    # 125 of all tokens hold the target's mass
    target[..., 1000:1125] = 20
    for kind, norm in (("tv-step", 1.006e-3), ("tv", 1.006e-3), ("kl", 1.999), ("lk", 1.983)):
        _, grad = gradient(draft, target, kind)
        assert grad.abs().sum().item() == pytest.approx(norm, rel=1e-3), kind


def test_kl_has_the_gradient_of_soft_cross_entropy():
    problem = logits(2, 3, 11, holes=False)
    draft = problem.draft.clone().requires_grad_()
    soft = -(problem.target.softmax(-1) * draft.log_softmax(-1)).sum(-1).mean()
    (expected,) = torch.autograd.grad(soft, draft)
    torch.testing.assert_close(gradient(problem.draft, problem.target, "kl")[1], expected, rtol=1e-12, atol=1e-15)


def test_a_tie_counts_as_q_at_most_p():
    # the first column is tied; were it counted as q > p, S would be 0.2 instead of 0.7
    draft, target = one_row(0.5, 0.3, 0.2), one_row(0.5, 0.1, 0.4)
    assert torch.equal(draft.softmax(-1)[..., 0], target.softmax(-1)[..., 0])
    _, grad = gradient(draft, target, "tv-step")
    expected = -torch.tensor([0.5 * 0.3, 0.3 * -0.7, 0.2 * 0.3], dtype=torch.float64)
    torch.testing.assert_close(grad[0, 0], expected, rtol=1e-12, atol=0)


def test_equal_distributions_have_no_gradient():
    problem = logits(3, 4, 9, holes=False)
    for kind in ("kl", "reverse-kl", "tv-step", "tv", "lk", "lk-hybrid"):
        loss, grad = gradient(problem.target, problem.target, kind)
        assert loss.abs() < 1e-14, kind
        assert grad.abs().max() < 1e-14, kind


def acceptance(*alphas: float) -> tuple[Tensor, Tensor]:
    """Logits of two tokens [k, 1, 2] whose overlap at depth i is alpha_i: p = (0, 1), q = (1 - alpha, alpha)."""
    a = torch.tensor(alphas, dtype=torch.float64)
    target = torch.tensor([0.0, 1.0], dtype=torch.float64).log().expand(len(alphas), 1, 2)
    return torch.stack([1 - a, a], -1).log()[:, None], target


def test_end_to_end_weights_of_three_depths():
    a1, a2, a3 = 0.9, 0.6, 0.3
    expected = [(1 + a2 + a2 * a3) / 3, a1 * (1 + a3) / 3, a1 * a2 / 3]
    draft, target = acceptance(a1, a2, a3)
    loss, grad = gradient(draft, target, "tv")
    torch.testing.assert_close(loss.item(), 1 - (a1 + a1 * a2 + a1 * a2 * a3) / 3)
    # d alpha_i / dz = alpha_i (1 - alpha_i) for two tokens
    for i, (a, weight) in enumerate(zip((a1, a2, a3), expected, strict=True)):
        torch.testing.assert_close(-grad[i, 0, 1].item() / (a * (1 - a)), weight)
    alpha = torch.tensor([[a1], [a2], [a3]], dtype=torch.float64)
    weights = end_to_end_weights(alpha, torch.full_like(alpha, 1 / 3))
    torch.testing.assert_close(weights[:, 0].tolist(), expected)


@pytest.mark.parametrize("dead", [(), (0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
@pytest.mark.parametrize("k", [1, 2, 3, 7])
def test_end_to_end_weights_are_the_derivative_also_where_alpha_is_0(k, dead):
    alpha = torch.rand(k, 5, generator=torch.Generator().manual_seed(k), dtype=torch.float64)
    for i in dead:
        alpha[i % k] = 0
    alpha.requires_grad_()
    products = torch.stack([alpha[: j + 1].prod(0) for j in range(k)])
    torch.testing.assert_close(prefix_products(alpha), products)
    scale = torch.arange(1.0, k + 1, dtype=torch.float64)[:, None]
    (expected,) = torch.autograd.grad((scale * products).sum(), alpha)
    torch.testing.assert_close(end_to_end_weights(alpha.detach(), scale), expected)


def test_a_dead_depth_is_the_only_one_that_a_dead_chain_trains():
    draft, target = logits(3, 1, 6, holes=False).draft, torch.full((3, 1, 6), -torch.inf)
    target[..., 0], draft[1, 0, 0] = 0.0, -torch.inf
    target[1, 0, :2] = torch.tensor([0.0, -torch.inf])
    loss, grad = gradient(draft, target, "tv")
    assert loss.isfinite()
    assert grad.isfinite().all()
    assert grad[0].abs().sum() > 0
    assert grad[2].abs().sum() == 0


def test_lk_is_a_constant_below_its_floor_and_keeps_its_gradient():
    draft, target = acceptance(ALPHA_FLOOR / 8)
    loss, grad = gradient(draft, target, "lk")
    a = ALPHA_FLOOR / 8
    torch.testing.assert_close(loss.item(), -math.log(ALPHA_FLOOR))
    torch.testing.assert_close(grad[0, 0, 1].item(), -a * (1 - a) / ALPHA_FLOOR)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_without_a_valid_row_loss_and_gradient_are_0(kind, horizon, reduction):
    problem = logits(2, 3, 5)
    draft = torch.full_like(problem.draft, torch.nan)
    loss, grad = gradient(
        draft,
        torch.full_like(draft, torch.inf),
        kind,
        valid=torch.zeros(2, 3, dtype=torch.bool),
        labels=torch.full((2, 3), -100),
        reduction=reduction,
        horizon=horizon,
    )
    assert loss == 0
    assert (grad == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_logits_of_ten_thousand_have_the_loss_of_their_logarithms(kind):
    """Probabilities underflow even in float64; their logarithms do not."""
    draft = torch.tensor([1e4, -1e4, 0.0], dtype=torch.float64).view(1, 1, 3)
    target = torch.tensor([-1e4, 1e4, 0.0], dtype=torch.float64).view(1, 1, 3)
    loss, grad = gradient(draft, target, kind, labels=torch.tensor([[1]]))
    expected = {"ce": 2e4, "kl": 2e4, "reverse-kl": 2e4, "tv-step": 1.0, "tv": 1.0, "lk": -math.log(1e-4)}
    expected["lk-hybrid"] = 2e4
    torch.testing.assert_close(loss.item(), expected[kind])
    slope = torch.tensor([1.0, -1.0, 0.0], dtype=torch.float64)
    torch.testing.assert_close(grad[0, 0], slope if kind in ("ce", "kl", "lk-hybrid") else torch.zeros_like(slope))


def test_tokens_that_neither_side_can_produce_do_not_matter():
    problem = logits(2, 3, 8, holes=False)
    wide = [torch.full((2, 3, 13), -torch.inf, dtype=torch.float64) for _ in range(2)]
    columns = torch.tensor([0, 2, 3, 5, 6, 9, 10, 12])
    wide[0][..., columns], wide[1][..., columns] = problem.draft, problem.target
    for kind in KINDS:
        narrow = gradient(problem.draft, problem.target, kind, labels=problem.labels)
        loss, grad = gradient(wide[0], wide[1], kind, labels=columns[problem.labels])
        torch.testing.assert_close(loss, narrow[0])
        torch.testing.assert_close(grad[..., columns], narrow[1])
        grad[..., columns] = 0
        assert (grad == 0).all(), kind


def test_horizons_differ_in_what_they_count():
    """Depth losses 1, 2, 3 of a whole chain, and of a chain whose second depth is not valid."""
    valid = torch.tensor([[True, True], [True, False], [True, True]])
    v = 4
    labels = torch.zeros(3, 2, dtype=torch.int64)
    draft = torch.zeros(3, 2, v, dtype=torch.float64)
    for i, loss in enumerate((1, 2, 3)):
        draft[i, :, 0] = math.log((v - 1) / (math.exp(loss) - 1))
    expected = {
        ("full", "mean"): 2,
        ("full", "sum"): 2,
        ("partial", "mean"): (2 + 1 / 3) / 2,
        ("partial", "sum"): 2 + 1 / 3,
        ("per-depth", "mean"): 2,
        ("per-depth", "sum"): (2 + 2 + 6) / 3,
    }
    for (horizon, reduction), value in expected.items():
        loss, _ = gradient(draft, None, "ce", valid=valid, labels=labels, horizon=horizon, reduction=reduction)
        torch.testing.assert_close(loss.item(), float(value), msg=f"{horizon}, {reduction}: {loss} for {value}")


def test_the_shared_factors_are_temperature_and_scale():
    problem = logits(2, 3, 7)
    options = {"draft_temperature": 0.5, "target_temperature": 2.0, "logit_scale": 3.0}
    loss, grad = specify_logits(problem, "lk-hybrid", **options)
    plain = logits(2, 3, 7)
    scaled = type(plain)(plain.draft * 6, plain.target * 1.5, plain.valid, plain.labels)
    expected = specify_logits(scaled, "lk-hybrid")
    torch.testing.assert_close(loss, expected[0])
    torch.testing.assert_close(grad, 6 * expected[1])


@pytest.mark.parametrize(
    ("filters", "kept"),
    [
        ({"target_top_k": 1}, [0.4]),
        ({"target_top_k": 2}, [0.4, 0.2, 0.2]),
        ({"target_top_k": 3}, [0.4, 0.2, 0.2]),
        ({"target_top_k": 9}, [0.4, 0.2, 0.2, 0.15, 0.05]),
        ({"target_top_p": 0.3}, [0.4]),
        ({"target_top_p": 0.5}, [0.4, 0.2, 0.2]),
        ({"target_top_p": 0.7}, [0.4, 0.2, 0.2]),
        ({"target_top_p": 0.9}, [0.4, 0.2, 0.2, 0.15]),
        # first the three largest, then 0.6 of what they hold
        ({"target_top_k": 3, "target_top_p": 0.49}, [0.4]),
    ],
)
def test_filters_keep_equal_logits_together(filters, kept):
    probabilities = [0.4, 0.2, 0.2, 0.15, 0.05]
    draft, target = torch.zeros(1, 1, 5), one_row(*probabilities)
    target[..., 2] = target[..., 1]
    loss, _ = gradient(draft, target, "tv-step", **filters)
    expected = 1 - sum(min(0.2, p / sum(kept)) for p in kept)
    torch.testing.assert_close(loss.item(), expected)
