"""LM head and objective in one pass over token chunks: no tensor of size k x n x v ever exists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_megatron.losses import rows as torch_rows
from bebop_megatron.losses.backend import resolve
from bebop_megatron.losses.budget import row_limit
from bebop_megatron.losses.comparison import Comparison, Target
from bebop_megatron.losses.label_loss import label_nll
from bebop_megatron.losses.objectives import ObjectiveOutput, unit_blend
from bebop_megatron.losses.options import Options, check_labels, check_valid, depth_scale
from bebop_megatron.losses.plan import make_plan, plan_without_target
from bebop_megatron.losses.prefix import anchors, counted
from bebop_megatron.losses.registry import OBJECTIVES, weighted_terms
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.statistics import RowStats


@dataclass(frozen=True)
class _Inputs:
    """Shape: as in `fused_linear_objective`, draft_hidden of the whole sequence; `sequence_parallel`: its gradient is
    wanted for this rank's rows only.
    """

    draft_hidden: Tensor
    target_hidden: Tensor | None
    weight: Tensor
    target_rows: Tensor
    labels: Tensor | None
    valid: Tensor
    row_labels: Tensor | None
    sequence_parallel: bool


def _row_limit(weight: Tensor, options: Options) -> int:
    """Rows of a chunk: by the columns that every rank has, so that all cut alike."""
    triton = resolve(options.backend, weight.device) is not torch_rows
    return row_limit(
        len(weight),
        weight.dtype,
        options,
        device=weight.device.type,
        triton=triton,
        to_weight=weight.requires_grad,
    )


class _Projection:
    """The LM head of chunk after chunk, into the same memory: fresh pages for each would cost a tenth of the time.

    What a call gives is overwritten by the next.
    """

    def __init__(self, weight: Tensor, parts: list[slice]) -> None:
        self.weight = weight
        self._space = weight.new_empty(max((part.stop - part.start for part in parts), default=0), len(weight))

    def of(self, hidden: Tensor) -> Tensor:
        """Shape: [rows, h] -> [rows, columns], of the weight's dtype."""
        return torch.mm(hidden.to(self.weight.dtype), self.weight.t(), out=self._space[: len(hidden)])


class _Chunks:
    """One micro-batch, cut into chunks.

    `row_nll` [n] float32: the language-model loss of the labelled rows, written as their logits come by.
    """

    def __init__(self, inputs: _Inputs, options: Options, shard: VocabShard, limit: int) -> None:
        self.inputs, self.options, self.shard = inputs, options, shard
        self.head = inputs.weight[: shard.columns]
        self.hidden = inputs.draft_hidden.flatten(0, 1)
        self.labels = None if inputs.labels is None else inputs.labels.flatten()
        if inputs.target_hidden is None:
            self.plan = plan_without_target(inputs.valid, limit)
        else:
            looked_at = None if inputs.row_labels is None else (inputs.row_labels >= 0).nonzero()[:, 0]
            self.plan = make_plan(inputs.target_rows, inputs.valid, limit, looked_at)
        # Megatron's language-model loss has the padding columns in its sum
        wanted = self.head if inputs.row_labels is None else inputs.weight
        self._of_targets = _Projection(wanted, [chunk.targets for chunk in self.plan.chunks])
        self._of_drafts = _Projection(self.head, [part for chunk in self.plan.chunks for part in chunk.drafts])
        self.row_nll: Tensor | None = None
        # target rows that have a label or -1; those behind them come from a neighbour
        self._labelled = 0
        if inputs.row_labels is not None:
            self.row_nll = torch.zeros(len(inputs.row_labels), dtype=torch.float32, device=wanted.device)
            self._labelled = int((self.plan.needed < len(inputs.row_labels)).sum())

    def each(self, work: Callable[[Tensor, Comparison], None]) -> None:
        """Call `work` for every part of the plan with its entries, flat indices [e] into [k, n], and their comparison.

        The logits compared are gone when `work` returns.
        """
        for chunk in self.plan.chunks:
            target: Tensor | Target | None = None
            if self.inputs.target_hidden is not None:
                target = self._target_logits(chunk.targets, self.inputs.target_hidden)
            for part in chunk.drafts:
                entries, rows = self.plan.order[part], self.plan.place[part] - chunk.targets.start
                labels = None if self.labels is None else self.labels[entries]
                draft = self._of_drafts.of(self.hidden[entries])
                compared = Comparison.of(draft, target, rows, labels, self.options, self.shard, overwrite=True)
                target = compared.reference
                work(entries, compared)
                # before the next part needs its memory
                del compared

    def _target_logits(self, part: slice, table: Tensor) -> Tensor:
        """Logits of some target rows, and in passing the language-model loss of those that have labels."""
        rows = self.plan.needed[part]
        logits = self._of_targets.of(table[rows])
        if self.inputs.row_labels is None or self.row_nll is None:
            return logits
        rows = rows[: max(self._labelled - part.start, 0)]
        labels = self.inputs.row_labels[rows]
        nll = label_nll(logits[: len(rows)], labels.clamp(min=0), self.options.logit_scale, self.shard.group)
        self.row_nll[rows] = torch.where(labels >= 0, nll, 0)
        return logits[:, : self.shard.columns]


def _first_pass(chunks: _Chunks, collected: RowStats, grads: list[Tensor]) -> None:
    """Statistics of every entry, and its unweighted hidden gradient for each objective."""
    directions = [OBJECTIVES[kind].direction for kind in chunks.options.shares if grads]

    def work(entries: Tensor, compared: Comparison) -> None:
        # in place: nothing else wants the draft's probabilities
        tv = compared.draft.local.values if directions == ["tv"] and compared.can_fuse else None
        stats = compared.stats(tv)
        for name, value in vars(stats).items():
            getattr(collected, name)[entries] = value
        for number, (grad, kind) in enumerate(zip(grads, chunks.options.shares, strict=False)):
            direction = tv
            if direction is None:
                blend = OBJECTIVES[kind].blend(stats.alpha)
                direction = compared.direction(stats, blend, overwrite=number == len(grads) - 1)
            grad[entries] = (direction.to(chunks.head.dtype) @ chunks.head).to(grad.dtype)

    chunks.each(work)


def _add_weight_gradient(chunks: _Chunks, stats: RowStats, weights: list[Tensor], grad: Tensor) -> None:
    """All logits a second time, because only now the weight of each row is known."""

    def work(entries: Tensor, compared: Comparison) -> None:
        own = RowStats(**{name: value[entries] for name, value in vars(stats).items()})
        rows = torch.stack([w[entries] for w in weights])
        # what a row weighs goes with its hidden state: a direction in half precision would underflow
        size = rows.abs().amax(0)
        blend = unit_blend(chunks.options, list(torch.where(size > 0, rows / size, 0)), own.alpha)
        direction = compared.direction(own, blend, overwrite=True)
        hidden = chunks.hidden[entries].to(grad.dtype) * size[:, None]
        grad[: chunks.shard.columns].addmm_(direction.t().to(grad.dtype), hidden)

    chunks.each(work)


@torch.no_grad()
def _run(
    inputs: _Inputs, scale: Tensor, options: Options, shard: VocabShard, limit: int, want: tuple[bool, bool]
) -> tuple[Tensor, RowStats, Tensor | None, Tensor | None, Tensor | None]:
    """Loss, statistics, language-model loss of rows, and the gradients of hidden states and weight that are wanted."""
    k, n, h = inputs.draft_hidden.shape
    weight = inputs.weight
    chunks = _Chunks(inputs, options, shard, limit)
    collected = _no_stats(k * n, weight)
    # an fp16 gradient of a mean over many rows would underflow before the loss scale reaches it
    keep = torch.float32 if inputs.draft_hidden.dtype == torch.float16 else inputs.draft_hidden.dtype
    # one for each objective: a row's weight is known when all depths of its anchor are done
    grads = [torch.zeros(k * n, h, dtype=keep, device=weight.device) for _ in options.shares if want[0]]
    _first_pass(chunks, collected, grads)
    stats = collected.view(k, n)
    loss, weights = weighted_terms(options.shares, stats, counted(inputs.valid, options.horizon), scale)
    weights = [(w * (options.logit_scale / options.draft_temperature)).flatten() for w in weights]
    grad_hidden = grad_weight = None
    if want[0]:
        grad_hidden = grads[0].mul_(weights[0][:, None])
        for grad, own in zip(grads[1:], weights[1:], strict=True):
            grad_hidden.add_(grad.mul_(own[:, None]))
        grad_hidden = grad_hidden.view(k, n, h)
        grad_hidden = shard.sum_of_own_rows(grad_hidden) if inputs.sequence_parallel else shard.sum(grad_hidden)
    if want[1]:
        grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32))
        _add_weight_gradient(chunks, collected, weights, grad_weight)
    return loss, stats, chunks.row_nll, grad_hidden, grad_weight


def _no_stats(rows: int, weight: Tensor) -> RowStats:
    def none() -> Tensor:
        return weight.new_zeros(rows, dtype=torch.promote_types(weight.dtype, torch.float32))

    greedy = {"greedy_target": none().bool(), "greedy_label": none().bool()}
    return RowStats(**{f.name: none() for f in fields(RowStats)} | greedy)


class _FusedObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_hidden: Tensor,
        weight: Tensor,
        target_hidden: Tensor | None,
        target_rows: Tensor,
        labels: Tensor | None,
        valid: Tensor,
        scale: Tensor,
        options: Options,
        shard: VocabShard,
        limit: int,
        row_labels: Tensor | None,
        sequence_parallel: bool,
    ) -> tuple[Tensor | None, ...]:
        hidden = shard.whole_sequence(draft_hidden) if sequence_parallel else draft_hidden
        inputs = _Inputs(hidden, target_hidden, weight, target_rows, labels, valid, row_labels, sequence_parallel)
        want = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        loss, stats, row_nll, grad_hidden, grad_weight = _run(inputs, scale, options, shard, limit, want)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = draft_hidden.dtype, weight.dtype
        values = tuple(vars(stats).values())
        ctx.mark_non_differentiable(*values, *(() if row_nll is None else (row_nll,)))
        return loss, row_nll, *values

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        hidden_dtype, weight_dtype = ctx.dtypes
        to_hidden = None
        if grad_hidden is not None:
            to_hidden = torch.empty_like(grad_hidden, dtype=hidden_dtype)
            wide = torch.promote_types(grad_hidden.dtype, torch.float32)
            # in half precision the factor itself would be rounded; by depth, the wide copy is small
            for depth in range(len(to_hidden)):
                to_hidden[depth] = grad_hidden[depth].to(wide) * grads[0]
        to_weight = None if grad_weight is None else (grad_weight * grads[0].to(grad_weight.dtype)).to(weight_dtype)
        return to_hidden, to_weight, *[None] * 10


def fused_linear_objective(
    draft_hidden: Tensor,
    target_hidden: Tensor | None,
    weight: Tensor,
    *,
    target_rows: Tensor,
    kind: str = "tv",
    chunk_tokens: int | None = None,
    weight_requires_grad: bool = False,
    valid: Tensor | None = None,
    labels: Tensor | None = None,
    group: Any = None,
    vocab_size: int | None = None,
    draft_temperature: float = 1.0,
    target_temperature: float = 1.0,
    target_top_p: float = 1.0,
    target_top_k: int = 0,
    truncate_top_k: int = 0,
    logit_scale: float = 1.0,
    horizon: str = "full",
    reduction: str = "mean",
    mix: tuple[str, float] | None = None,
    row_scale: Tensor | None = None,
    row_labels: Tensor | None = None,
    sequence_parallel: bool = False,
    backend: str = "auto",
) -> ObjectiveOutput:
    """Project to the vocabulary and apply `vocab_parallel_objective`, chunk by chunk, gradient included.

    Shape: draft_hidden [k, n, h], target_hidden [m, h] (None is allowed for `ce`, which then has no acceptance
    statistics), weight [v/tp, h], target_rows [k, n] int64 into target_hidden, row_labels [n] int64 (the labels of
    target_hidden's first n rows, -1 where their loss is not wanted); the rest as in `vocab_parallel_objective`.
    With sequence_parallel, draft_hidden is this rank's [k, n/tp, h] of it (Megatron's order: consecutive rows); all
    else is the whole sequence's. With row_labels the output has `row_nll` [n] float32, the language-model loss of
    those rows: it shares the target's projection, has the padding columns in its sum, and no gradient.
    Gradient: computed in the forward pass and only scaled in the backward pass; to draft_hidden, complete on every
    rank of `group`, and with `weight_requires_grad` to weight (through the drafts, whose logits are computed twice
    then; the target is detached).
    Collectives: over `group`, for each chunk three all-reduces of statistics (two more with row_labels); once, one of
    the hidden gradient, or under sequence_parallel an all-gather of the drafts and a reduce-scatter of their gradient.
    Memory: the gradients of draft_hidden (and weight; with `mix` one more of draft_hidden), and a chunk's logits within
    a byte budget (`budget.py`) that depends neither on k nor on n. `chunk_tokens` overrides it: at most k times as many
    drafts, and no more targets.
    Work: only valid entries; each target row that one of them meets is projected once. The host waits for the device a
    few times per call, to know how many there are.
    Raises:
        ValueError: as `vocab_parallel_objective`, and target_rows that do not fit.
    """
    options = Options(
        kind,
        horizon=horizon,
        reduction=reduction,
        mix=mix,
        draft_temperature=draft_temperature,
        target_temperature=target_temperature,
        target_top_p=target_top_p,
        target_top_k=target_top_k,
        truncate_top_k=truncate_top_k,
        logit_scale=logit_scale,
        backend=backend,
    )
    if draft_hidden.dim() != 3 or draft_hidden.shape[0] == 0:
        raise ValueError(f"draft_hidden must be [k, n, h] with k at least 1, got {list(draft_hidden.shape)}")
    k, n, h = draft_hidden.shape
    if sequence_parallel and group is not None:
        n *= group.size()
    if weight.dim() != 2 or weight.shape[1] != h:
        raise ValueError(
            f"weight must be [v/tp, {h}] for draft_hidden {list(draft_hidden.shape)}, got {list(weight.shape)}"
        )
    if target_hidden is None and options.needs_target:
        raise ValueError(f"objective {kind!r} compares with the target: target_hidden may be None only for 'ce'")
    if target_hidden is not None and (target_hidden.dim() != 2 or target_hidden.shape[1] != h):
        raise ValueError(f"target_hidden must be [m, {h}], got {list(target_hidden.shape)}")
    if target_rows.shape != (k, n) or target_rows.dtype != torch.int64:
        raise ValueError(f"target_rows must be int64 [{k}, {n}], got {target_rows.dtype} {list(target_rows.shape)}")
    if chunk_tokens is not None and chunk_tokens < 1:
        raise ValueError(f"chunk_tokens must be positive, got {chunk_tokens}")
    valid = check_valid(valid, k, n, draft_hidden.device)
    labels = check_labels(labels, options, k, n)
    shard = VocabShard.of_columns(weight.shape[0], vocab_size, group, "weight")
    scale = depth_scale(row_scale, options, valid)
    if row_labels is not None and (target_hidden is None or row_labels.shape != (n,) or len(target_hidden) < n):
        raise ValueError(
            f"row_labels must be [{n}] and target_hidden hold a row for each, got {list(row_labels.shape)}"
        )
    weight = weight if weight_requires_grad else weight.detach()
    loss, row_nll, *values = _FusedObjective.apply(
        draft_hidden,
        weight,
        None if target_hidden is None else target_hidden.detach(),
        target_rows,
        labels,
        valid,
        scale,
        options,
        shard,
        chunk_tokens * k if chunk_tokens else _row_limit(weight, options),
        row_labels,
        sequence_parallel,
    )  # pyright: ignore[reportGeneralTypeIssues]
    stats = RowStats(*values)
    return ObjectiveOutput(loss, stats.alpha, anchors(valid, horizon)[0], stats, row_nll)
