"""LM head and objective in one pass: equals the specification for any chunking, and never holds all logits.

Catches: a chunk that normalises by itself, duplicate or unordered target rows, gradients scaled in half precision, NaN
out of a row that nothing needs, padding rows of the LM head trained, buffers read before they are written, and memory
that grows with the number of depths, tokens and columns.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from bebop_megatron.losses import budget, fused_linear_objective, rows
from tests.losses.problem import (
    COUNTED,
    HORIZONS,
    KINDS,
    Hidden,
    Logits,
    assert_near,
    dense,
    distance,
    hidden,
    run_head,
    run_hidden,
    run_logits,
    specify_hidden,
)
from tests.losses.test_objectives import ALL_OPTIONS, takes_filters


def check(problem: Hidden, kind: str, tolerance: float = 1e-10, *, chunk_tokens: int | None = 3, **options):
    loss, to_draft, to_weight = specify_hidden(problem, kind, **options)
    out, *grads = run_head(problem, kind, chunk_tokens=chunk_tokens, **options)
    assert_near(out.loss.detach(), loss, tolerance, f"{kind}: the loss")
    assert_near(grads[0], to_draft, tolerance, f"{kind}: the gradient of the hidden states")
    assert_near(grads[1], to_weight, tolerance, f"{kind}: the gradient of the weight")
    return out, grads


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_every_horizon_and_reduction(kind, horizon, reduction):
    for k in range(1, 8):
        check(hidden(k, seed=k), kind, horizon=horizon, reduction=reduction)


@pytest.mark.parametrize("kind", KINDS)
def test_every_option(kind):
    for options in ALL_OPTIONS:
        if takes_filters(kind, options):
            check(hidden(), kind, **options)
            check(hidden().to(torch.float32), kind, 2e-5, **options)


@pytest.mark.parametrize("kind", KINDS)
def test_every_depth_has_its_own_row_scale(kind):
    scale = torch.tensor([0.5, 0.0, 3.0])
    for horizon in HORIZONS[: 2 if kind == "tv" else 3]:
        check(hidden(), kind, row_scale=scale, reduction="sum", horizon=horizon)


@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_size_gives_the_same(kind):
    problem = hidden(n=7)
    whole, grad = run_hidden(problem, kind, chunk_tokens=7, horizon="partial")
    for chunk_tokens in (None, 1, 2, 3, 4, 5, 6, 8, 100):
        out, other = run_hidden(problem, kind, chunk_tokens=chunk_tokens, horizon="partial")
        torch.testing.assert_close(out.loss, whole.loss, rtol=1e-13, atol=0)
        torch.testing.assert_close(other, grad, rtol=1e-10, atol=1e-15)
        for name, value in vars(out.stats).items():
            torch.testing.assert_close(value, getattr(whole.stats, name), rtol=1e-12, atol=1e-14, msg=name)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_the_objective_over_the_projected_logits(kind):
    problem = hidden()
    target = (problem.target @ problem.weight.t())[problem.rows]
    projected = Logits(problem.draft @ problem.weight.t(), target, problem.valid, problem.labels)
    expected, to_logits = run_logits(projected, kind, horizon="partial")
    out, grad = run_hidden(problem, kind, chunk_tokens=2, horizon="partial")
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(grad, to_logits @ problem.weight)
    assert out.num_valid == expected.num_valid
    for name, value in vars(out.stats).items():
        torch.testing.assert_close(value, getattr(expected.stats, name), msg=name)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_the_error_is_at_most_twice_that_of_the_input_type(kind, dtype):
    errors, loss_errors = torch.zeros(2), torch.zeros(2)
    for seed in range(4):
        problem = hidden(2, 24, 64, 8, seed, holes=False).to(dtype)
        loss, expected, _ = specify_hidden(problem, kind)
        out, grad = run_hidden(problem, kind, chunk_tokens=10)
        assert out.loss.dtype == torch.float32
        assert grad.dtype == dtype
        draft = problem.draft.clone().requires_grad_()
        target = (problem.target @ problem.weight.t())[problem.rows]
        plain = dense(draft @ problem.weight.t(), target, kind, problem.labels)
        (plain_grad,) = torch.autograd.grad(plain, draft)
        errors += torch.tensor([distance(grad, expected), distance(plain_grad, expected)])
        loss_errors += torch.tensor([distance(out.loss.detach(), loss), distance(plain.detach(), loss)])
    assert errors[0] <= 2 * errors[1]
    assert loss_errors[0] <= 2 * loss_errors[1]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_factor_on_the_loss_is_not_rounded_to_the_type_of_the_hidden_states(dtype):
    problem = hidden(2, 24, 64, 8, holes=False).to(dtype)
    draft = problem.draft.clone().requires_grad_()
    out = fused_linear_objective(draft, problem.target, problem.weight, target_rows=problem.rows)
    # rounded to bfloat16 this factor is 0.3% larger
    (scaled,) = torch.autograd.grad(out.loss * 1.00585, draft, retain_graph=True)
    (plain,) = torch.autograd.grad(out.loss, draft)
    mean = (scaled.double() * plain.double()).sum() / plain.double().square().sum()
    assert mean.item() == pytest.approx(1.00585, abs=6e-4)


def test_a_mean_over_many_rows_does_not_underflow_before_the_loss_scale():
    problem = hidden(2, 8, 17).to(torch.float16)
    _, expected, _ = specify_hidden(problem, "kl", row_scale=torch.full((2,), 2.0**-24), reduction="sum")
    draft = problem.draft.clone().requires_grad_()
    out = fused_linear_objective(
        draft,
        problem.target,
        problem.weight,
        target_rows=problem.rows,
        kind="kl",
        valid=problem.valid,
        reduction="sum",
        row_scale=torch.full((2,), 2.0**-24),
    )
    (grad,) = torch.autograd.grad(out.loss * 2.0**24, draft)
    assert_near(grad.double() / 2**24, expected, 5e-3, "the gradient")


@pytest.mark.parametrize("chunk_tokens", [1, 4, None])
@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_what_is_not_valid_may_hold_anything(kind, horizon, chunk_tokens):
    problem = hidden(3, 8)
    valid = problem.valid.clone()
    valid[:, 4:7] = False
    # a chunk of which nothing counts asks for row 0, and that holds NaN too
    rows = torch.where(problem.rows == 0, 1, problem.rows)
    problem = replace(problem, valid=valid, rows=rows)
    loss, to_draft, to_weight = specify_hidden(problem, kind, horizon=horizon)
    for poison in (torch.nan, torch.inf):
        needed = torch.zeros(len(problem.target), dtype=torch.bool)
        needed[rows[valid]] = True
        assert not needed.all()
        assert not needed[0]
        poisoned = replace(
            problem,
            draft=problem.draft.masked_fill(~valid[..., None], poison),
            target=problem.target.masked_fill(~needed[:, None], poison),
            rows=torch.where(valid, rows, torch.tensor([[0], [-100], [10**12]])),
            labels=torch.where(valid, problem.labels, -100),
        )
        out, *grads = run_head(poisoned, kind, chunk_tokens=chunk_tokens, horizon=horizon)
        assert_near(out.loss.detach(), loss, 1e-10, "the loss")
        assert_near(grads[0], to_draft, 1e-10, "the gradient of the hidden states")
        assert_near(grads[1], to_weight, 1e-10, "the gradient of the weight")
        assert (grads[0][~valid] == 0).all()
        for name, value in vars(out.stats).items():
            assert (value[~valid] == 0).all(), name


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_valid_row_loss_and_gradient_are_0(kind):
    problem = hidden()
    nothing = replace(
        problem,
        draft=problem.draft * torch.nan,
        target=problem.target * torch.nan,
        valid=torch.zeros_like(problem.valid),
        labels=problem.labels * 0 - 100,
    )
    for chunk_tokens in (2, None):
        out, grad = run_hidden(nothing, kind, chunk_tokens=chunk_tokens)
        assert out.loss == 0
        assert (grad == 0).all()
        assert out.num_valid == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("padding", [torch.nan, torch.inf, 1e30])
def test_padding_rows_of_the_head_have_no_effect_and_no_gradient(kind, padding):
    narrow = hidden()
    wide = replace(narrow, weight=torch.cat([narrow.weight, torch.full((6, 5), padding, dtype=torch.float64)]))
    out, *grads = run_head(wide, kind, vocab_size=17)
    loss, to_draft, to_weight = specify_hidden(narrow, kind)
    assert_near(out.loss.detach(), loss, 1e-10, "the loss")
    assert_near(grads[0], to_draft, 1e-10, "the gradient of the hidden states")
    assert_near(grads[1][:17], to_weight, 1e-10, "the gradient of the weight")
    assert (grads[1][17:] == 0).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_token_and_none(kind):
    check(hidden(2, 1, holes=False), kind)
    empty = hidden(2, 0)
    out, (to_draft, to_weight) = check(empty, kind)
    assert to_draft.shape == (2, 0, 5)
    assert (to_weight == 0).all()
    assert out.loss.dtype == torch.float64
    some = run_hidden(hidden(2, 1), kind)[0].stats
    for name, value in vars(out.stats).items():
        assert value.shape == (2, 0)
        assert value.dtype == getattr(some, name).dtype, name


@pytest.mark.parametrize("kind", KINDS)
def test_inputs_need_not_be_contiguous(kind):
    problem = hidden()
    odd = Hidden(
        problem.draft.permute(2, 0, 1).contiguous().permute(1, 2, 0),
        problem.target.t().contiguous().t(),
        problem.weight.t().contiguous().t(),
        problem.rows.t().contiguous().t(),
        problem.valid.t().contiguous().t(),
        problem.labels.t().contiguous().t(),
    )
    check(odd, kind)
    check(replace(problem, draft=problem.draft[:1].expand(3, -1, -1)), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_backward_gives_the_same_and_nothing_is_written_to(kind):
    problem = hidden()
    kept = [t.clone() for t in vars(problem).values()]
    draft, weight = problem.draft.requires_grad_(), problem.weight.requires_grad_()
    out = fused_linear_objective(
        draft,
        problem.target,
        weight,
        target_rows=problem.rows,
        kind=kind,
        weight_requires_grad=True,
        labels=problem.labels,
    )
    first = torch.autograd.grad(out.loss, (draft, weight), retain_graph=True)
    before = [g.clone() for g in first]
    second = torch.autograd.grad(0.3 * out.loss, (draft, weight))
    for a, b, c in zip(first, before, second, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(c, 0.3 * a, rtol=1e-14, atol=0)
    for now, then in zip(vars(problem).values(), kept, strict=True):
        assert torch.equal(now, then)


def test_a_second_derivative_is_refused():
    problem = hidden()
    draft = problem.draft.requires_grad_()
    out = fused_linear_objective(draft, problem.target, problem.weight, target_rows=problem.rows)
    (grad,) = torch.autograd.grad(out.loss * draft.sum(), draft, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_and_the_target_are_isolated_unless_told_otherwise(kind):
    """Field case: the gradient of the heads leaks into the LM head or the backbone."""
    problem = hidden()
    for to_weight in (False, True):
        leaves = [t.clone().requires_grad_() for t in (problem.draft, problem.target, problem.weight)]
        out = fused_linear_objective(
            *leaves,
            target_rows=problem.rows,
            kind=kind,
            labels=problem.labels,
            weight_requires_grad=to_weight,
        )
        out.loss.backward()
        assert leaves[0].grad is not None
        assert leaves[1].grad is None
        assert (leaves[2].grad is not None) == to_weight
        assert not any(value.requires_grad for value in vars(out.stats).values())


def test_cross_entropy_needs_no_target():
    problem = hidden()
    expected, expected_grad = run_hidden(problem, "ce")
    draft = problem.draft.clone().requires_grad_()
    out = fused_linear_objective(
        draft,
        None,
        problem.weight,
        target_rows=torch.full_like(problem.rows, -1),
        kind="ce",
        valid=problem.valid,
        labels=problem.labels,
    )
    torch.testing.assert_close(out.loss, expected.loss)
    torch.testing.assert_close(torch.autograd.grad(out.loss, draft)[0], expected_grad)
    assert (out.alpha == 0).all()


class LargestOutput(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation returns."""

    numel = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return result


@pytest.mark.parametrize("kind", KINDS)
def test_no_tensor_holds_the_logits_of_all_tokens(kind):
    k, n, v, chunk = 3, 40, 301, 4
    problem = hidden(k, n, v)
    with LargestOutput() as largest:
        out = fused_linear_objective(
            problem.draft.clone().requires_grad_(),
            problem.target,
            problem.weight,
            target_rows=problem.rows,
            kind=kind,
            labels=problem.labels,
            valid=problem.valid,
            chunk_tokens=chunk,
        )
        out.loss.backward()
    # drafts and targets share the chunk
    assert largest.numel <= k * chunk * v
    assert largest.numel >= k * chunk * v / 2


class Products(TorchDispatchMode):
    """Adds up the multiplications of all matrix products."""

    multiplications = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is torch.ops.aten.mm:
            self.multiplications += args[0].shape[0] * args[0].shape[1] * args[1].shape[1]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_target_is_projected_once_and_each_draft_twice(k, kind):
    n, h, v = 40, 5, 31
    problem = hidden(k, n, v, h, holes=False)
    following = torch.arange(n) + torch.arange(k)[:, None]
    target = torch.randn(n + k, h, dtype=torch.float64)
    with Products() as products:
        run_hidden(replace(problem, target=target, rows=following), kind, chunk_tokens=4)
    assert products.multiplications == (n + k - 1 + 2 * k * n) * h * v


def peak_bytes(problem: Hidden, kind: str, **options) -> int:
    """Most memory that was held at once above what was held before, as the allocator reports it."""
    draft = problem.draft.clone().requires_grad_()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        fused_linear_objective(
            draft, problem.target, problem.weight, target_rows=problem.rows, kind=kind, labels=problem.labels, **options
        ).loss.backward()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        *((kind, torch.float32, {}) for kind in KINDS),
        ("tv", torch.bfloat16, {}),
        ("tv", torch.float32, {"mix": ("kl", 0.5)}),
        ("tv", torch.float32, {"truncate_top_k": 3}),
        ("tv", torch.float32, {"target_top_k": 3}),
        ("tv", torch.bfloat16, {"target_top_k": 900, "target_top_p": 0.9}),
        ("tv", torch.float32, {"row_labels": True}),
    ],
)
def test_working_memory_stays_in_its_budget(kind, dtype, options, monkeypatch):
    bytes_of_chunk = 3 * 2**20
    monkeypatch.setitem(budget.CHUNK_BYTES, "cpu", bytes_of_chunk)
    # a block's scratch comes on top
    block = 2**14
    monkeypatch.setattr(rows, "_BLOCK", block)
    # that it depends on neither depths nor tokens is no matter of the options
    for k, n in ((1, 512),) if options else ((1, 512), (7, 128), (7, 256)):
        problem = hidden(k, n, 997, 2).to(dtype)
        # as in training: the target of a depth is the next row
        following = torch.arange(n) + torch.arange(k)[:, None]
        target = torch.randn(n + k, 2, generator=torch.Generator().manual_seed(0)).to(dtype)
        asked = options | ({"row_labels": problem.labels[0]} if "row_labels" in options else {})
        peak = peak_bytes(replace(problem, target=target, rows=following), kind, **asked)
        gradients_and_statistics = k * n * 4 * (3 * 2 + 4 * 11)
        scratch = 5 * 4 * block * torch.get_num_threads()
        say = f"k={k} n={n}: {peak / bytes_of_chunk:.2f} of the budget"
        assert peak < bytes_of_chunk + scratch + gradients_and_statistics, say
        # filters hold their copies before the drafts' probabilities are there
        assert peak > bytes_of_chunk / (4 if options else 2), say


@pytest.mark.parametrize(("kind", "horizon"), COUNTED)
def test_buffers_are_written_before_they_are_read(kind, horizon, nan_in_new_memory):
    check(hidden(), kind, horizon=horizon)
