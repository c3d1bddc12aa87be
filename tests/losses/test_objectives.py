"""The objective over logits equals the specification, in value and gradient, whatever the inputs look like.

Catches: wrong end-to-end weights and horizons, NaN out of rows or columns that do not count, 0 * inf, labels of -100
counted as positions, gradients in padding columns, half-precision intermediates, inputs or saved tensors written to, a
second backward that differs, a second derivative that is silently wrong, buffers read before they are written.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bebop_megatron.losses import OBJECTIVES, vocab_parallel_objective
from bebop_megatron.losses.prefix import counted
from tests.losses.problem import (
    COUNTED,
    HORIZONS,
    KINDS,
    Logits,
    assert_near,
    check_second_backward,
    dense,
    distance,
    logits,
    run_logits,
    specify_logits,
)

ALL_OPTIONS = [
    {"draft_temperature": 0.7},
    {"target_temperature": 0.6},
    {"draft_temperature": 1.3, "target_temperature": 0.8, "logit_scale": 0.25},
    {"logit_scale": 3.0, "reduction": "sum"},
    {"target_top_k": 4},
    {"target_top_p": 0.8},
    {"target_top_k": 6, "target_top_p": 0.5, "target_temperature": 0.8, "logit_scale": 1.5},
    {"truncate_top_k": 5},
    {"truncate_top_k": 9, "target_top_k": 4, "target_temperature": 0.8},
    {"truncate_top_k": 40},
    {"mix": ("kl", 0.3)},
    {"mix": ("ce", 0.6), "reduction": "sum"},
    {"mix": ("tv", 0.75)},
    {"mix": ("tv-step", 0.0)},
    {"mix": ("lk", 1.0)},
    {"mix": ("lk-hybrid", 0.5), "horizon": "partial"},
    {"row_scale": torch.full((3,), 0.125), "reduction": "sum"},
    {"row_scale": torch.full((3,), 0.125), "reduction": "sum", "mix": ("tv", 0.5), "horizon": "partial"},
]


def check(problem: Logits, kind: str, tolerance: float = 1e-10, **options):
    loss, expected = specify_logits(problem, kind, **options)
    out, grad = run_logits(problem, kind, **options)
    assert_near(out.loss.detach(), loss, tolerance, f"{kind}: the loss")
    assert_near(grad, expected, tolerance, f"{kind}: the gradient")
    return out, grad


def takes_filters(kind: str, options: dict) -> bool:
    """KL(q||p) is infinite where the target is filtered, and a label may be outside of what truncation keeps."""
    refused = {"reverse-kl": {"target_top_k", "target_top_p"}, "ce": {"truncate_top_k"}}
    return not refused.get(kind, set()) & options.keys()


def test_the_kinds_tested_are_those_that_exist():
    assert set(KINDS) == set(OBJECTIVES), "name the objective in KINDS, tests/losses/problem.py"


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_every_horizon_and_reduction(kind, horizon, reduction):
    for k in range(1, 8):
        check(logits(k, 6, 17, seed=k), kind, horizon=horizon, reduction=reduction)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind):
    for options in ALL_OPTIONS:
        if takes_filters(kind, options):
            check(logits(), kind, **options)
            check(logits().to(torch.float32), kind, 2e-6, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_depth_has_its_own_row_scale(kind):
    scale = torch.tensor([0.5, 0.0, 3.0])
    for horizon in HORIZONS[: 2 if kind == "tv" else 3]:
        check(logits(), kind, row_scale=scale, reduction="sum", horizon=horizon)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_that_of_the_input_type_and_no_larger(kind, dtype):
    for seed in range(3):
        problem = logits(3, 16, 64, seed, holes=False).to(dtype)
        loss, expected = specify_logits(problem, kind)
        out, grad = run_logits(problem, kind)
        assert out.loss.dtype == out.alpha.dtype == torch.float32
        assert grad.dtype == dtype
        assert_near(out.loss.detach(), loss, 1e-6, "the loss")
        draft = problem.draft.clone().requires_grad_()
        (plain,) = torch.autograd.grad(dense(draft, problem.target, kind, problem.labels), draft)
        assert distance(grad, expected) <= 2 * distance(plain, expected)
        assert distance(grad, expected) <= 2 * torch.finfo(dtype).eps


@pytest.mark.parametrize("kind", ["kl", "tv-step", "tv", "lk", "lk-hybrid"])
def test_bfloat16_is_enough_where_nearly_everything_is_accepted(kind):
    target = logits(2, 32, 128, holes=False)
    draft = target.target + 0.02 * (target.draft - target.target)
    problem = replace(target, draft=draft).to(torch.bfloat16)
    _, expected = specify_logits(problem, kind)
    out, grad = run_logits(problem, kind)
    draft = problem.draft.clone().requires_grad_()
    (plain,) = torch.autograd.grad(dense(draft, problem.target, kind, problem.labels), draft)
    assert out.alpha.min() > 0.98
    assert distance(plain, expected) > 0.05, "the case is too easy to show anything"
    assert distance(grad, expected) < 0.01


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, -torch.inf, 6e4])
def test_padding_columns_have_no_effect_and_no_gradient(kind, padding):
    narrow = logits()
    wide = torch.full((3, 6, 23), padding, dtype=torch.float64)
    draft, target = wide.clone(), wide.clone()
    draft[..., :17], target[..., :17] = narrow.draft, narrow.target
    expected, expected_grad = run_logits(narrow, kind)
    for dtype in (torch.float64, torch.float16):
        problem = replace(narrow, draft=draft, target=target).to(dtype)
        expected, expected_grad = run_logits(narrow.to(dtype), kind)
        out, grad = run_logits(problem, kind, vocab_size=17)
        assert torch.equal(out.loss, expected.loss)
        assert torch.equal(grad[..., :17], expected_grad)
        assert (grad[..., 17:] == 0).all()


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_rows_that_are_not_valid_may_hold_anything(kind, horizon, poison):
    problem = logits()
    loss, expected = specify_logits(problem, kind, horizon=horizon)
    drop = ~problem.valid[..., None]
    poisoned = Logits(
        problem.draft.masked_fill(drop, poison),
        problem.target.masked_fill(drop, poison),
        problem.valid,
        torch.where(problem.valid, problem.labels, torch.tensor([[-100], [10**12], [-1]])),
    )
    out, grad = run_logits(poisoned, kind, horizon=horizon)
    assert_near(out.loss.detach(), loss, 1e-10, "the loss")
    assert_near(grad, expected, 1e-10, "the gradient")
    assert (grad[~counted(problem.valid, horizon)] == 0).all()
    for name, value in vars(out.stats).items():
        assert (value[~problem.valid] == 0).all(), name


@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_without_a_valid_row_loss_and_gradient_are_0(kind, horizon):
    for reduction in ("mean", "sum"):
        problem = replace(logits(), valid=torch.zeros(3, 6, dtype=torch.bool))
        problem = replace(problem, draft=problem.draft * torch.nan, labels=problem.labels * 0 - 100)
        out, grad = run_logits(problem, kind, horizon=horizon, reduction=reduction)
        assert out.loss == 0
        assert (grad == 0).all()
        assert out.num_valid == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3])
def test_disjoint_distributions(k, kind):
    """alpha is 0 everywhere, or at one depth only: a product over depths must not be divided by it."""
    problem = logits(k, 4, 8, holes=False)
    here, there = torch.zeros(8), torch.zeros(8)
    here[4:], there[:4] = -1e3, -1e3
    for depths in (range(k), (0,), (k - 1,)):
        draft, target = problem.draft.clone(), problem.target.clone()
        for i in depths:
            draft[i] += here
            target[i] += there
        case = replace(problem, draft=draft, target=target)
        out, _ = check(case, kind)
        assert (out.alpha[list(depths)] == 0).all()
        # the gradient of KL(q||p) is a difference of ratios of a thousand nats
        check(case.to(torch.float32), kind, 1e-3 if kind == "reverse-kl" else 2e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_almost_disjoint_distributions(kind):
    """alpha is below the floor of `lk`, whose value is a constant there and whose gradient is not."""
    problem = logits(3, 4, 8, holes=False)
    far = torch.arange(8) * 3.0
    case = replace(problem, draft=problem.draft / 4 + far, target=problem.target / 4 - far)
    out, grad = check(case, kind)
    assert (out.alpha > 0).all()
    assert (out.alpha < 1e-4).all()
    assert grad.abs().sum() > 0
    check(case.to(torch.float32), kind, 2e-5)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ce"])
def test_equal_distributions_are_accepted_and_leave_no_gradient(kind, dtype):
    problem = logits(holes=False).to(dtype)
    out, grad = run_logits(replace(problem, draft=problem.target.clone()), kind)
    torch.testing.assert_close(out.alpha, torch.ones_like(out.alpha))
    assert out.alpha.max() <= 1
    assert out.loss.abs() < 1e-6
    assert grad.abs().max() < 1e-6


@pytest.mark.parametrize("kind", KINDS)
def test_logits_may_be_minus_infinity(kind):
    problem = logits(holes=False)
    closed = torch.arange(17) >= 12
    labels = problem.labels % 12
    both = replace(
        problem,
        draft=problem.draft.masked_fill(closed, -torch.inf),
        target=problem.target.masked_fill(closed, -torch.inf),
        labels=labels,
    )
    check(both, kind)
    check(both.to(torch.float32), kind, 2e-6)
    if kind != "reverse-kl":
        check(replace(both, draft=problem.draft), kind)
    if kind not in ("kl", "lk-hybrid"):
        check(replace(both, target=problem.target), kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16], ids=str)
def test_logits_of_ten_thousand(kind, dtype):
    g = torch.Generator().manual_seed(0)
    sides = torch.randint(-1, 2, (2, 2, 40, 5), generator=g) * 1e4
    problem = replace(logits(2, 40, 5, holes=False), draft=sides[0], target=sides[1]).to(dtype)
    check(problem, kind, 1e-10 if dtype == torch.float64 else 1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_without_a_neighbour_and_no_row_at_all(kind):
    check(logits(2, 1, 5, holes=False), kind)
    empty = logits(2, 0, 5)
    out, grad = run_logits(empty, kind)
    assert out.loss == 0
    assert out.alpha.shape == (2, 0)
    assert grad.shape == (2, 0, 5)


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_need_not_be_contiguous(kind):
    problem = logits()
    expected, expected_grad = run_logits(problem, kind)
    for order in ((2, 1, 0), (1, 0, 2), (0, 2, 1)):
        back = [order.index(i) for i in range(3)]
        odd = Logits(
            problem.draft.permute(order).contiguous().permute(back),
            problem.target.permute(order).contiguous().permute(back),
            problem.valid.t().contiguous().t(),
            problem.labels.t().contiguous().t(),
        )
        assert not odd.draft.is_contiguous()
        out, grad = run_logits(odd, kind)
        torch.testing.assert_close(out.loss, expected.loss, rtol=1e-14, atol=0)
        torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-16)
    check(replace(problem, target=problem.target[:1].expand(3, -1, -1)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_gives_the_same_and_nothing_is_written_to(kind):
    check_second_backward(logits(), kind)


def test_a_second_derivative_is_refused():
    problem = logits()
    draft = problem.draft.requires_grad_()
    out = vocab_parallel_objective(draft, problem.target, "kl", valid=problem.valid)
    (grad,) = torch.autograd.grad(out.loss * draft.sum(), draft, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_only_the_draft_gets_a_gradient():
    problem = logits()
    target = problem.target.clone().requires_grad_()
    out = vocab_parallel_objective(problem.draft.clone().requires_grad_(), target, "lk-hybrid")
    out.loss.backward()
    assert target.grad is None
    assert not any(value.requires_grad for value in vars(out.stats).values())


def test_cross_entropy_needs_no_target():
    problem = logits()
    expected, expected_grad = run_logits(problem, "ce")
    draft = problem.draft.clone().requires_grad_()
    out = vocab_parallel_objective(draft, None, "ce", valid=problem.valid, labels=problem.labels)
    assert torch.equal(out.loss, expected.loss)
    assert torch.equal(torch.autograd.grad(out.loss, draft)[0], expected_grad)
    assert (out.alpha == 0).all()


def test_all_rows_count_unless_told_otherwise():
    problem = logits(holes=False)
    out = vocab_parallel_objective(problem.draft, problem.target)
    assert torch.equal(out.loss, run_logits(problem, "tv")[0].loss.detach())
    assert out.num_valid == 6


def test_the_number_of_anchors():
    problem = logits(4, 32)
    first = int(problem.valid[0].sum())
    expected = {"full": int(problem.valid.all(0).sum()), "partial": first, "per-depth": first}
    for horizon, count in expected.items():
        assert run_logits(problem, "kl", horizon=horizon)[0].num_valid == count


def nats(a: torch.Tensor, log_b: torch.Tensor) -> torch.Tensor:
    """Sum of a log b, where 0 log 0 is 0."""
    return torch.where(a > 0, a * log_b, 0).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_statistics_are_what_they_are_called(dtype):
    warm = logits(2, 20, 30)
    # few values on a coarse grid: many ties for the largest
    coarse = replace(logits(2, 40, 9), draft=logits(2, 40, 9).draft.round(), target=logits(2, 40, 9).target.round())
    shut = torch.arange(30) % 3 == 1
    closed = replace(
        warm,
        draft=warm.draft.masked_fill(shut, -torch.inf),
        target=warm.target.masked_fill(shut, -torch.inf),
        labels=warm.labels // 3 * 3,
    )
    for problem in (warm.to(dtype), coarse.to(dtype), closed.to(dtype)):
        valid = problem.valid
        log_q, log_p = problem.draft.double().log_softmax(-1), problem.target.double().log_softmax(-1)
        q, p = log_q.exp(), log_p.exp()
        drafted = problem.draft.argmax(-1, keepdim=True)
        expected = {
            "alpha": torch.minimum(p, q).sum(-1),
            "covered": (q * (q <= p)).sum(-1),
            "rejected": (q * (q > p)).sum(-1),
            "kl": nats(p, log_p) - nats(p, log_q),
            "reverse_kl": nats(q, log_q) - nats(q, log_p),
            "target_entropy": -nats(p, log_p),
            "draft_entropy": -nats(q, log_q),
            "p_argmax_q": p.gather(-1, drafted)[..., 0],
            "greedy_target": drafted[..., 0] == problem.target.argmax(-1),
            "greedy_label": drafted[..., 0] == problem.labels,
            "log_q_label": log_q.gather(-1, problem.labels[..., None])[..., 0],
        }
        stats = run_logits(problem, "reverse-kl")[0].stats
        assert vars(stats).keys() == expected.keys()
        for name, value in vars(run_logits(problem, "tv")[0].stats).items():
            # only the objective that needs it pays for the reverse direction
            same = torch.zeros_like(value) if name == "reverse_kl" else getattr(stats, name)
            torch.testing.assert_close(value, same, msg=name)
        for name, value in vars(stats).items():
            wanted = torch.where(valid, expected[name], torch.zeros_like(expected[name]))
            tolerance = 1e-12 if dtype == torch.float64 else 2e-5
            torch.testing.assert_close(value.double(), wanted.double(), rtol=tolerance, atol=tolerance, msg=name)


@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_buffers_are_written_before_they_are_read(kind, horizon, nan_in_new_memory):
    check(logits(), kind, horizon=horizon)


def test_the_table_says_what_it_needs():
    for kind, objective in OBJECTIVES.items():
        assert objective.needs_labels == (kind == "ce")
        assert objective.needs_target == (kind != "ce")
