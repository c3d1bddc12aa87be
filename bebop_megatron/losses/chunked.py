"""LM head and objective in one pass over token chunks: no tensor of size k x n x v ever exists."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_megatron.losses.label_loss import label_nll
from bebop_megatron.losses.objectives import (
    ObjectiveOutput,
    only_valid,
    target_logits_to_rows,
    working_logits,
)
from bebop_megatron.losses.options import Options, check_labels, check_valid, depth_scale
from bebop_megatron.losses.prefix import anchors, counted
from bebop_megatron.losses.registry import combined_terms
from bebop_megatron.losses.rows import RowStats, gradient_direction, row_stats, softmaxes
from bebop_megatron.losses.shard import VocabShard

# working memory of one chunk: at its peak five fp32 blocks of logits, for the drafts of all depths and their targets
_CHUNK_BYTES = 192 * 2**20
_BLOCKS = 5
_MIN_CHUNK = 16


@dataclass(frozen=True)
class _Inputs:
    draft_hidden: Tensor
    target_hidden: Tensor | None
    weight: Tensor
    target_rows: Tensor
    labels: Tensor | None
    valid: Tensor
    row_labels: Tensor | None = None
    # [rows that have labels], written chunk by chunk
    row_nll: Tensor | None = None


def _chunk_tokens(k: int, columns: int) -> int:
    return max(_MIN_CHUNK, _CHUNK_BYTES // (4 * _BLOCKS * (k + 1) * max(columns, 1)))


def _needed_rows(rows: Tensor, valid: Tensor) -> tuple[Tensor, Tensor]:
    """Rows that one chunk needs, each once, and every entry's place among them."""
    # an entry that is not valid borrows a row that is needed anyway
    some = torch.where(valid, rows, rows.new_tensor(torch.iinfo(rows.dtype).max)).min()
    some = torch.where(valid.any(), some, 0)
    return torch.unique(torch.where(valid, rows, some), return_inverse=True)


def _project(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden.to(weight.dtype) @ weight.t()


@torch.no_grad()
def _run(
    inputs: _Inputs, scale: Tensor, options: Options, shard: VocabShard, chunk: int, want: tuple[bool, bool]
) -> tuple[Tensor, RowStats, Tensor | None, Tensor | None]:
    """Loss, statistics, and the gradients of hidden states and weight that `want` asks for, scaled by `scale`."""
    k, n, h = inputs.draft_hidden.shape
    weight = inputs.weight
    # an fp16 gradient of a mean over many rows would underflow before the loss scale reaches it
    keep = torch.float32 if inputs.draft_hidden.dtype == torch.float16 else inputs.draft_hidden.dtype
    grad_hidden = torch.empty(k, n, h, dtype=keep, device=weight.device) if want[0] else None
    grad_weight = torch.zeros_like(weight, dtype=torch.promote_types(weight.dtype, torch.float32)) if want[1] else None
    none = _no_stats(k, weight)
    total, collected = none.kl.sum(), [none]
    for begin in range(0, n, chunk):
        part = slice(begin, min(begin + chunk, n))
        loss, stats = _chunk(inputs, part, scale, options, shard, grad_hidden, grad_weight)
        total = total + loss
        collected.append(stats)
    stats = RowStats(*(torch.cat(parts, 1) for parts in zip(*(vars(s).values() for s in collected), strict=True)))
    if grad_hidden is not None:
        shard.sum(grad_hidden)
    return total, stats, grad_hidden, grad_weight


def _target_logits(inputs: _Inputs, part: slice, options: Options, shard: VocabShard) -> tuple[Tensor, Tensor]:
    """Logits [rows, columns] of the target rows that some tokens need, and each entry's place [k * size] among them.

    The tokens' own rows come from the same product, if the loss of their labels is wanted.
    """
    assert inputs.target_hidden is not None
    targets, valid = inputs.target_rows[:, part], inputs.valid[:, part]
    own = None
    if inputs.row_labels is not None:
        own = torch.arange(part.start, part.stop, device=targets.device)
        wanted = inputs.row_labels[part] >= 0
        targets, valid = torch.cat([targets, own[None]]), torch.cat([valid, wanted[None]])
    needed, place = _needed_rows(targets, valid)
    # where nothing is valid, the row that all entries borrow may hold NaN
    table = inputs.target_hidden[needed].masked_fill(~valid.any(), 0)
    if own is None:
        return _project(table, inputs.weight[: shard.columns]), place.reshape(-1)
    assert inputs.row_labels is not None
    assert inputs.row_nll is not None
    # the language-model loss has the padding columns in its sum
    logits = _project(table, inputs.weight)
    labels = inputs.row_labels[part]
    nll = label_nll(logits[place[-1]] * options.logit_scale, labels.clamp(min=0), shard.group)
    inputs.row_nll[part] = torch.where(labels >= 0, nll, 0)
    return logits[:, : shard.columns], place[:-1].reshape(-1)


def _chunk(
    inputs: _Inputs,
    part: slice,
    scale: Tensor,
    options: Options,
    shard: VocabShard,
    grad_hidden: Tensor | None,
    grad_weight: Tensor | None,
) -> tuple[Tensor, RowStats]:
    """Loss and statistics of some tokens; their gradients are written to and added to the buffers given."""
    hidden = inputs.draft_hidden[:, part]
    valid = inputs.valid[:, part]
    k, size, h = hidden.shape
    head = inputs.weight[: shard.columns]
    hidden = hidden.reshape(k * size, h).masked_fill(~valid.reshape(-1, 1), 0)
    blocks = [working_logits(_project(hidden, head), options.draft_temperature, options.logit_scale, shard)]
    rows = torch.zeros(k * size, dtype=torch.int64, device=head.device)
    if inputs.target_hidden is not None:
        logits, rows = _target_logits(inputs, part, options, shard)
        blocks.append(target_logits_to_rows(logits, options, shard))
    draft, *rest = softmaxes(blocks, shard)
    target = rest[0] if rest else None
    labels = None if inputs.labels is None else inputs.labels[:, part].reshape(-1)
    stats = row_stats(draft, target, rows, labels, shard)
    square = only_valid(stats.view(k, size), valid)
    value, coefficients = combined_terms(options.kind, options.mix, square, counted(valid, options.horizon))
    loss = (value * scale[:, None].to(value.dtype)).sum()
    if grad_hidden is None and grad_weight is None:
        return loss, square
    # the direction stays of order 1 while it is projected; the row's own factor comes after
    size_of = torch.stack(list(coefficients.values())).sum(0).reshape(-1)
    unit = {name: w.reshape(-1) / size_of.clamp(min=1e-30) for name, w in coefficients.items()}
    direction = gradient_direction(draft, target, rows, labels, stats, unit, shard)
    per_row = (size_of.view(k, size) * scale[:, None].to(size_of.dtype)).reshape(-1, 1)
    per_row = per_row * (options.logit_scale / options.draft_temperature)
    if grad_hidden is not None:
        projected = direction.to(head.dtype) @ head
        grad_hidden[:, part] = (projected.to(per_row.dtype) * per_row).view(k, size, h).to(grad_hidden.dtype)
    if grad_weight is not None:
        scaled = direction.mul_(per_row.to(direction.dtype))
        grad_weight[: shard.columns].addmm_(scaled.t(), hidden.to(scaled.dtype))
    return loss, square


def _no_stats(k: int, weight: Tensor) -> RowStats:
    none = weight.new_zeros(k, 0, dtype=torch.promote_types(weight.dtype, torch.float32))
    greedy = {"greedy_target": none.bool(), "greedy_label": none.bool()}
    return RowStats(**{f.name: none for f in fields(RowStats)} | greedy)


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
        chunk: int,
        row_labels: Tensor | None,
        row_nll: Tensor | None,
    ) -> tuple[Tensor, ...]:
        inputs = _Inputs(draft_hidden, target_hidden, weight, target_rows, labels, valid, row_labels, row_nll)
        want = (ctx.needs_input_grad[0], ctx.needs_input_grad[1])
        loss, stats, grad_hidden, grad_weight = _run(inputs, scale, options, shard, chunk, want)
        ctx.save_for_backward(grad_hidden, grad_weight)
        ctx.dtypes = draft_hidden.dtype, weight.dtype
        values = tuple(vars(stats).values())
        ctx.mark_non_differentiable(*values)
        return loss, *values

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
    logit_scale: float = 1.0,
    horizon: str = "full",
    reduction: str = "mean",
    mix: tuple[str, float] | None = None,
    row_scale: Tensor | None = None,
    row_labels: Tensor | None = None,
    backend: str = "auto",
) -> ObjectiveOutput:
    """Project to the vocabulary and apply `vocab_parallel_objective`, chunk by chunk, gradient included.

    Shape: draft_hidden [k, n, h], target_hidden [m, h] (None is allowed for `ce`, which then has no acceptance
    statistics), weight [v/tp, h], target_rows [k, n] int64 into target_hidden, row_labels [n] int64 (the labels of
    target_hidden's first n rows, -1 where their loss is not wanted); the rest as in `vocab_parallel_objective`.
    With row_labels the output has `row_nll` [n] float32, the language-model loss of those rows: it shares the target's
    projection, padding columns included, and has no gradient.
    Gradient: computed in the forward pass and only scaled in the backward pass; to draft_hidden, complete on every
    rank of `group`, and with `weight_requires_grad` to weight (through the drafts; the target is detached).
    Collectives: over `group`, for each chunk three all-reduces of statistics (two more with row_labels); once, one of
    the hidden gradient.
    Memory: the gradients of draft_hidden (and weight), and a chunk's logits of all depths within a byte budget that
    depends neither on k nor on n, but for at least 16 tokens; `chunk_tokens` overrides it.
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
        logit_scale=logit_scale,
        backend=backend,
    )
    if draft_hidden.dim() != 3 or draft_hidden.shape[0] == 0:
        raise ValueError(f"draft_hidden must be [k, n, h] with k at least 1, got {list(draft_hidden.shape)}")
    k, n, h = draft_hidden.shape
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
    row_nll = None
    if row_labels is not None:
        if target_hidden is None or row_labels.shape != (n,) or len(target_hidden) < n:
            raise ValueError(
                f"row_labels must be [{n}] and target_hidden hold a row for each, got {list(row_labels.shape)}"
            )
        row_nll = torch.zeros(n, dtype=torch.float32, device=draft_hidden.device)
    loss, *values = _FusedObjective.apply(
        draft_hidden,
        weight if weight_requires_grad else weight.detach(),
        None if target_hidden is None else target_hidden.detach(),
        target_rows,
        labels,
        valid,
        scale,
        options,
        shard,
        # by the columns that every rank has, padding included: all must cut alike
        chunk_tokens or _chunk_tokens(k, len(weight)),
        row_labels,
        row_nll,
    )  # pyright: ignore[reportGeneralTypeIssues]
    stats = RowStats(*values)
    return ObjectiveOutput(loss, stats.alpha, anchors(valid, horizon)[0], stats, row_nll)
