"""The ways to compute the end-to-end objective and its hidden-state gradient that are measured against each other.

Each takes a `Problem` and returns the loss [] and the gradient [k, n, h]. What others do is written as well as we can:
targets are projected once and read as slices, and what may be overwritten is.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.losses import fused_linear_objective
from benchmarks.loss.cases import Case, Problem

Contender = Callable[[Problem], tuple[Tensor, Tensor]]


def ours(problem: Problem, chunk_tokens: int | None = None) -> tuple[Tensor, Tensor]:
    """The fused objective with its default arguments."""
    draft = problem.draft.detach().requires_grad_()
    out = fused_linear_objective(
        draft,
        problem.target,
        problem.weight,
        target_rows=problem.target_rows,
        group=problem.group,
        chunk_tokens=chunk_tokens,
    )
    out.loss.backward()
    assert draft.grad is not None
    return out.loss.detach(), draft.grad


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)


def _per_depth(problem: Problem, acceptance: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, Tensor]:
    """Autograd through a softmax of each depth; `acceptance` maps q, p [n, v] to alpha [n]."""
    draft = problem.draft.detach().requires_grad_()
    n = draft.shape[1]
    with torch.no_grad():
        p = (problem.target[1:] @ problem.weight.t()).softmax(-1, dtype=_wide(draft))
    alphas = []
    for depth, hidden in enumerate(draft.unbind(0)):
        q = (hidden @ problem.weight.t()).softmax(-1, dtype=_wide(draft))
        alphas.append(acceptance(q, p[depth : depth + n]))
    loss = 1 - torch.stack(alphas).cumprod(0).mean()
    loss.backward()
    assert draft.grad is not None
    return loss.detach(), draft.grad


def dense_autograd(problem: Problem) -> tuple[Tensor, Tensor]:
    """What one writes down first."""
    return _per_depth(problem, lambda q, p: torch.minimum(q, p).sum(-1))


def liger(problem: Problem) -> tuple[Tensor, Tensor]:
    """Liger's total variation kernel for each depth, its elements summed to the acceptance of a row."""
    from liger_kernel.ops.tvd import LigerTVDLossFunction

    def acceptance(q: Tensor, p: Tensor) -> Tensor:
        return 1 - LigerTVDLossFunction.apply(q, p, None, "none", -100).sum(-1)

    return _per_depth(problem, acceptance)


def _probabilities(logits: Tensor, group: Any) -> Tensor:
    """Softmax over the vocabulary of all ranks: [n, v/tp] -> the same, fp32."""
    if group is None:
        return logits.softmax(-1, dtype=_wide(logits))
    logits = logits.to(_wide(logits))
    top = logits.amax(-1)
    dist.all_reduce(top, op=dist.ReduceOp.MAX, group=group)
    logits.sub_(top[:, None]).exp_()
    norm = logits.sum(-1)
    dist.all_reduce(norm, group=group)
    return logits.div_(norm[:, None])


class _KeptLogits(torch.autograd.Function):
    """Closed form, vocabulary-parallel; each depth's [n, v/tp] lives from the forward to the backward pass."""

    @staticmethod
    def forward(ctx: Any, draft: Tensor, problem: Problem) -> Tensor:
        n, weight, group = draft.shape[1], problem.weight, problem.group
        p = _probabilities(problem.target[1:] @ weight.t(), group)
        kept = [_probabilities(hidden @ weight.t(), group) for hidden in draft]
        alpha, covered = [], []
        for depth, q in enumerate(kept):
            target = p[depth : depth + n]
            alpha.append(torch.minimum(q, target).sum(-1))
            covered.append((q * (q <= target)).sum(-1))
        sums = torch.stack([torch.stack(alpha), torch.stack(covered)])
        if group is not None:
            dist.all_reduce(sums, group=group)
        ctx.kept, ctx.p, ctx.sums, ctx.problem = kept, p, sums, problem
        return 1 - sums[0].cumprod(0).mean()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        kept, p, (alpha, covered), problem = ctx.kept, ctx.p, ctx.sums, ctx.problem
        k, n = alpha.shape
        # the sum of all chains that contain a depth, without that depth
        weights = alpha.cumprod(0).flip(0).cumsum(0).flip(0) / alpha * (grads[0] / (k * n))
        out = torch.empty_like(problem.draft)
        for depth, q in enumerate(kept):
            # the probabilities become the gradient, as in Megatron's cross entropy
            above = covered[depth][:, None] - (q <= p[depth : depth + n]).to(q.dtype)
            q.mul_(above).mul_(weights[depth][:, None])
            out[depth] = q.to(problem.weight.dtype) @ problem.weight
        if problem.group is not None:
            dist.all_reduce(out, group=problem.group)
        return out, None


def kept_logits(problem: Problem) -> tuple[Tensor, Tensor]:
    """Closed-form gradient with every depth's logits kept: the design of public implementations."""
    draft = problem.draft.detach().requires_grad_()
    loss = _KeptLogits.apply(draft, problem)  # pyright: ignore[reportGeneralTypeIssues]
    loss.backward()
    assert draft.grad is not None
    return loss.detach(), draft.grad


class BareProducts:
    """The floor: the targets to the vocabulary once, the drafts there and back, into memory that is there already.

    `rows` is about how many rows a product has; the parts are of equal size, since a small last one is slow.
    """

    def __init__(self, problem: Problem, rows: int) -> None:
        self.weight, self.group = problem.weight, problem.group
        self.target = self._parts(problem.target[1:], rows)
        self.draft = self._parts(problem.draft.flatten(0, 1), rows)
        self.grad = torch.empty_like(problem.draft)
        self.back = self._parts(self.grad.flatten(0, 1), rows)
        longest = max(len(part) for part in (*self.target, *self.draft))
        self.logits = problem.weight.new_empty(longest, len(problem.weight))

    @staticmethod
    def _parts(table: Tensor, rows: int) -> list[Tensor]:
        return list(table.tensor_split(max(1, round(len(table) / rows))))

    @torch.no_grad()
    def __call__(self) -> Tensor:
        across = self.weight.t()
        for part in self.target:
            torch.mm(part, across, out=self.logits[: len(part)])
        for part, grad in zip(self.draft, self.back, strict=True):
            logits = self.logits[: len(part)]
            torch.mm(part, across, out=logits)
            torch.mm(logits, self.weight, out=grad)
        if self.group is not None:
            dist.all_reduce(self.grad, group=self.group)
        return self.grad


FLOOR = "products"
LABELS = {
    FLOOR: "bare matrix products",
    "ours": "ours",
    "autograd": "(a) autograd, dense softmaxes",
    "kept": "(b) closed form, logits kept",
    "liger": "(c) Liger TVD for each depth",
}
CONTENDERS: dict[str, Contender] = {"ours": ours, "autograd": dense_autograd, "kept": kept_logits, "liger": liger}
# the others see the whole vocabulary or nothing
VOCABULARY_PARALLEL = ("ours", "kept")


def absent(case: Case) -> dict[str, str]:
    """Contenders that cannot run a case, and why."""
    out = {}
    if case.device != "cuda":
        out["liger"] = "needs a GPU"
    elif find_spec("liger_kernel") is None:
        out["liger"] = "liger_kernel is not installed"
    if case.tp > 1:
        out |= {name: "not vocabulary-parallel" for name in CONTENDERS if name not in VOCABULARY_PARALLEL}
    return out
