"""Random problems for the objectives, what the specification says about them, and how far a result may be from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.losses import ObjectiveOutput, fused_linear_objective, vocab_parallel_objective
from bebop_megatron.losses.prefix import counted
from bebop_megatron.losses.reference import reference_objective

KINDS = ("ce", "kl", "reverse-kl", "tv-step", "tv", "lk", "lk-hybrid")
HORIZONS = ("full", "partial", "per-depth")
# the end-to-end objective is a product over depths: it has no per-depth horizon
COUNTED = [(kind, horizon) for kind in KINDS for horizon in HORIZONS if (kind, horizon) != ("tv", "per-depth")]

Options = dict[str, Any]


@dataclass(frozen=True)
class Logits:
    """Shape: draft, target [k, n, columns], valid [k, n] bool, labels [k, n]."""

    draft: Tensor
    target: Tensor
    valid: Tensor
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Logits:
        return replace(self, draft=self.draft.to(dtype), target=self.target.to(dtype))


def logits(k: int = 3, n: int = 6, v: int = 17, seed: int = 0, *, holes: bool = True, spread: float = 2) -> Logits:
    """A head that is warm: its logits are the target's and as much noise."""
    g = torch.Generator().manual_seed(seed)
    target = spread * torch.randn(k, n, v, generator=g, dtype=torch.float64)
    draft = target + torch.randn(k, n, v, generator=g, dtype=torch.float64)
    valid = torch.rand(k, n, generator=g) < (0.75 if holes else 2)
    if holes and n > 1:
        # one whole chain, and one that breaks after its first depth
        valid[:, 0] = True
        valid[:, 1] = torch.arange(k) < 1
    labels = torch.randint(0, v, (k, n), generator=g)
    return Logits(draft, target, valid, labels)


@dataclass(frozen=True)
class Hidden:
    """Shape: draft [k, n, h], target [m, h], weight [columns, h], rows, valid, labels [k, n]."""

    draft: Tensor
    target: Tensor
    weight: Tensor
    rows: Tensor
    valid: Tensor
    labels: Tensor

    def to(self, dtype: torch.dtype) -> Hidden:
        return replace(self, draft=self.draft.to(dtype), target=self.target.to(dtype), weight=self.weight.to(dtype))


def hidden(k: int = 3, n: int = 7, v: int = 17, h: int = 5, seed: int = 0, *, holes: bool = True) -> Hidden:
    """Target rows in arbitrary order, some for several depths and some for none."""
    g = torch.Generator().manual_seed(seed)
    m = n + 3
    target = torch.randn(m, h, generator=g, dtype=torch.float64)
    rows = torch.randint(0, m, (k, n), generator=g)
    draft = target[rows] + torch.randn(k, n, h, generator=g, dtype=torch.float64) / 2
    weight = torch.randn(v, h, generator=g, dtype=torch.float64)
    base = logits(k, n, v, seed, holes=holes)
    return Hidden(draft, target, weight, rows, base.valid, base.labels)


def specification(
    draft: Tensor,
    target: Tensor | None,
    kind: str,
    *,
    valid: Tensor,
    mix: tuple[str, float] | None = None,
    row_scale: Tensor | None = None,
    horizon: str = "full",
    **options: Any,
) -> Tensor:
    """`reference_objective`, and what `mix` and `row_scale` mean in its terms."""
    if mix is not None:
        shared: Options = {"valid": valid, "row_scale": row_scale, "horizon": horizon, **options}
        own = specification(draft, target, kind, **shared)
        return (1 - mix[1]) * own + mix[1] * specification(draft, target, mix[0], **shared)
    if row_scale is None:
        return reference_objective(draft, target, kind, valid=valid, horizon=horizon, **options)
    entries = counted(valid, horizon)
    if kind == "tv":
        return _end_to_end_by_depth(draft, target, entries, row_scale, **options)
    depth = torch.arange(len(valid))[:, None]
    return torch.stack(
        [
            row_scale[i]
            * reference_objective(draft, target, kind, valid=entries & (depth == i), horizon="per-depth", **options)
            for i in range(len(valid))
        ]
    ).sum()


def _end_to_end_by_depth(
    draft: Tensor, target: Tensor | None, entries: Tensor, row_scale: Tensor, **options: Any
) -> Tensor:
    """The term of depth i is what the first i depths have more than the first i - 1."""
    assert target is not None
    options |= {"horizon": "partial", "reduction": "sum"}
    total, before = torch.zeros((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    for i in range(1, len(entries) + 1):
        upto = i * reference_objective(draft[:i], target[:i], "tv", valid=entries[:i], **options)
        total, before = total + row_scale[i - 1] * (upto - before) / len(entries), upto
    return total


def specify_logits(problem: Logits, kind: str, **options: Any) -> tuple[Tensor, Tensor]:
    """Loss and gradient of the draft logits by the specification."""
    draft = problem.draft.double().detach().requires_grad_()
    loss = specification(draft, problem.target, kind, valid=problem.valid, labels=problem.labels, **options)
    (gradient,) = torch.autograd.grad(loss, draft, allow_unused=True, materialize_grads=True)
    return loss.detach(), gradient


def specify_hidden(problem: Hidden, kind: str, **options: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Loss and gradients of draft hidden states and LM head (through the drafts) by the specification."""
    draft = problem.draft.double().detach().requires_grad_()
    weight = problem.weight.double().detach().requires_grad_()
    target = (problem.target.double() @ problem.weight.double().t())[problem.rows]
    loss = specification(draft @ weight.t(), target, kind, valid=problem.valid, labels=problem.labels, **options)
    return loss.detach(), *torch.autograd.grad(loss, (draft, weight), allow_unused=True, materialize_grads=True)


def run_logits(problem: Logits, kind: str, **options: Any) -> tuple[ObjectiveOutput, Tensor]:
    """The output and the gradient of the draft logits."""
    draft = problem.draft.detach().requires_grad_()
    out = vocab_parallel_objective(draft, problem.target, kind, valid=problem.valid, labels=problem.labels, **options)
    return out, torch.autograd.grad(out.loss, draft)[0]


def run_hidden(problem: Hidden, kind: str, **options: Any) -> tuple[ObjectiveOutput, Tensor]:
    """The output and the gradient of the draft hidden states."""
    draft = problem.draft.detach().requires_grad_()
    out = fused_linear_objective(
        draft,
        problem.target,
        problem.weight,
        target_rows=problem.rows,
        kind=kind,
        valid=problem.valid,
        labels=problem.labels,
        **options,
    )
    return out, torch.autograd.grad(out.loss, draft)[0]


def run_head(problem: Hidden, kind: str, **options: Any) -> tuple[ObjectiveOutput, Tensor, Tensor]:
    """The output and the gradients of the draft hidden states and of the LM head."""
    draft, weight = problem.draft.clone().requires_grad_(), problem.weight.clone().requires_grad_()
    out = fused_linear_objective(
        draft,
        problem.target,
        weight,
        target_rows=problem.rows,
        kind=kind,
        weight_requires_grad=True,
        valid=problem.valid,
        labels=problem.labels,
        **options,
    )
    return out, *torch.autograd.grad(out.loss, (draft, weight))


def check_second_backward(problem: Logits, kind: str, **options: Any) -> None:
    """It gives the same as the first, and nothing is written to."""
    before = replace(problem, draft=problem.draft.clone(), target=problem.target.clone())
    draft = problem.draft.requires_grad_()
    out = vocab_parallel_objective(draft, problem.target, kind, valid=problem.valid, labels=problem.labels, **options)
    (first,) = torch.autograd.grad(out.loss, draft, retain_graph=True)
    kept = first.clone()
    (second,) = torch.autograd.grad(0.3 * out.loss, draft)
    assert torch.equal(first, kept)
    torch.testing.assert_close(second, 0.3 * first, rtol=1e-14, atol=0)
    assert torch.equal(problem.draft, before.draft)
    assert torch.equal(problem.target, before.target)


def distance(result: Tensor, expected: Tensor) -> float:
    """Euclidean error relative to the size of what was expected; infinite where a result is not finite."""
    if not bool(result.isfinite().all()):
        return float("inf")
    size = float(expected.double().norm())
    return float((result.double() - expected.double()).norm()) / (size or 1)


def assert_near(result: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    assert result.shape == expected.shape, f"{what}: {list(result.shape)} instead of {list(expected.shape)}"
    error = distance(result, expected)
    assert error <= tolerance, f"{what} is off by {error:.3g} of its size, allowed {tolerance:.3g}"


def dense(draft: Tensor, target: Tensor, kind: str, labels: Tensor) -> Tensor:
    """What one would write without this package, in the type of its input; every entry is valid."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(-1)
    if kind == "ce":
        return -log_q.gather(-1, labels[..., None]).mean()
    if kind == "kl":
        return (p * (log_p - log_q)).sum(-1).mean()
    if kind == "reverse-kl":
        return (q * (log_q - log_p)).sum(-1).mean()
    if kind == "tv-step":
        return (1 - alpha).mean()
    if kind == "tv":
        return (1 - alpha.cumprod(0)).mean()
    if kind == "lk":
        return -alpha.log().mean()
    share = torch.exp(-3 * alpha.detach())
    return (share * (p * (log_p - log_q)).sum(-1) + (1 - share) * (1 - alpha)).mean()
