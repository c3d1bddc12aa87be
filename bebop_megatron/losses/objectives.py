"""The objective over logits: one autograd function with closed-form gradients, vocabulary-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_megatron.losses.options import Options, check_labels, check_valid, depth_scale
from bebop_megatron.losses.prefix import anchors, counted
from bebop_megatron.losses.registry import combined_terms
from bebop_megatron.losses.rows import RowStats, gradient_direction, row_stats, softmaxes
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.target_filter import filter_logits


@dataclass(frozen=True)
class ObjectiveOutput:
    """Shape: loss [] float32 (fp64 for fp64 input); alpha [k, n], detached; num_valid [] int64: anchors that count;
    stats: every row statistic [k, n], detached, 0 where an entry is not valid; row_nll [n] float32, where asked for.
    """

    loss: Tensor
    alpha: Tensor
    num_valid: Tensor
    stats: RowStats
    row_nll: Tensor | None = None


def working_logits(logits: Tensor, temperature: float, scale: float, shard: VocabShard) -> Tensor:
    """A private copy of the true columns in fp32 (fp64 stays): scaled by MuP and temperature."""
    wide = logits[..., : shard.columns].to(torch.promote_types(logits.dtype, torch.float32), copy=True)
    factor = scale / temperature
    return wide if factor == 1 else wide.mul_(factor)


def target_logits_to_rows(logits: Tensor, options: Options, shard: VocabShard) -> Tensor:
    """Working copy of target logits with the serving filters applied."""
    wide = working_logits(logits, options.target_temperature, options.logit_scale, shard)
    return filter_logits(wide, options.target_top_k, options.target_top_p, shard)


def only_valid(stats: RowStats, valid: Tensor) -> RowStats:
    """Statistics with 0 (False) at entries that are not valid, whatever was computed there."""
    return RowStats(**{name: torch.where(valid, value, torch.zeros_like(value)) for name, value in vars(stats).items()})


class _LogitObjective(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        draft_logits: Tensor,
        target_logits: Tensor | None,
        labels: Tensor | None,
        valid: Tensor,
        scale: Tensor,
        options: Options,
        shard: VocabShard,
    ) -> tuple[Tensor, ...]:
        k, n = valid.shape
        draft, target = _softmaxes(draft_logits, target_logits, valid, options, shard)
        rows = torch.arange(k * n, device=valid.device)
        flat_labels = None if labels is None else labels.reshape(-1)
        stats = row_stats(draft, target, rows, flat_labels, shard).view(k, n)
        stats = only_valid(stats, valid)
        value, coefficients = combined_terms(options.kind, options.mix, stats, counted(valid, options.horizon))
        ctx.save_for_backward(draft_logits, target_logits, labels, valid, scale, *coefficients.values())
        ctx.names, ctx.options, ctx.shard, ctx.stats = list(coefficients), options, shard, stats
        fields = tuple(vars(stats).values())
        loss = (value * scale[:, None].to(value.dtype)).sum()
        ctx.mark_non_differentiable(*fields)
        return loss, *fields

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_loss = grads[0]
        draft_logits, target_logits, labels, valid, scale, *weights = ctx.saved_tensors
        options: Options = ctx.options
        k, n = valid.shape
        # two all-reduces again, instead of keeping both softmaxes between forward and backward
        draft, target = _softmaxes(draft_logits, target_logits, valid, options, ctx.shard)
        rows = torch.arange(k * n, device=valid.device)
        factor = scale[:, None].to(weights[0].dtype) * grad_loss * (options.logit_scale / options.draft_temperature)
        direction = gradient_direction(
            draft,
            target,
            rows,
            None if labels is None else labels.reshape(-1),
            ctx.stats.view(-1),
            {name: (w * factor).reshape(-1) for name, w in zip(ctx.names, weights, strict=True)},
            ctx.shard,
        )
        grad = torch.zeros_like(draft_logits)
        direction = direction.masked_fill_(~valid.reshape(-1, 1), 0).view(k, n, ctx.shard.columns)
        grad[..., : ctx.shard.columns] = direction.to(grad.dtype)
        return grad, None, None, None, None, None, None


def _softmaxes(
    draft_logits: Tensor, target_logits: Tensor | None, valid: Tensor, options: Options, shard: VocabShard
) -> tuple[Any, Any]:
    # rows that are not valid may hold NaN: they become uniform
    drop = ~valid.reshape(-1, 1)
    draft = working_logits(draft_logits, options.draft_temperature, options.logit_scale, shard)
    blocks = [draft.reshape(len(drop), shard.columns).masked_fill_(drop, 0)]
    if target_logits is not None:
        rows = target_logits.reshape(len(drop), target_logits.shape[-1]).masked_fill(drop, 0)
        blocks.append(target_logits_to_rows(rows, options, shard))
    done = softmaxes(blocks, shard)
    return done[0], done[1] if target_logits is not None else None


def vocab_parallel_objective(
    draft_logits: Tensor,
    target_logits: Tensor | None,
    kind: str = "tv",
    *,
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
    backend: str = "auto",
) -> ObjectiveOutput:
    """Train draft distributions towards target distributions: any of `OBJECTIVES` over vocabulary-sharded logits.

    Shape: draft_logits, target_logits [k, n, v/tp] (targets aligned per depth; None is allowed for `ce`), valid [k, n]
    bool, labels [k, n] int64 global ids (for `ce`; anything where not valid), row_scale [k] (with reduction `sum`: a
    factor on each depth's sum, equal entries for `tv`) -> see `ObjectiveOutput`.
    Gradient: closed form, to draft_logits only (table in `registry.py`; end-to-end weights in `prefix.py`). The target
    is detached. Columns from `vocab_size` on are padding: probability and gradient 0.
    Collectives: over `group`: forward three all-reduces (max, sum, statistics), backward two. The vocabulary is never
    gathered.
    Memory: the inputs, and one float for each row and direction.
    Raises:
        ValueError: an unknown name, shapes that do not fit, a missing target or labels, fewer columns than vocabulary.
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
    if draft_logits.dim() != 3:
        raise ValueError(f"draft_logits must be [k, n, v/tp], got {list(draft_logits.shape)}")
    k, n, columns = draft_logits.shape
    if k == 0:
        raise ValueError("draft_logits has no depth: k must be at least 1")
    if target_logits is None and options.needs_target:
        raise ValueError(f"objective {kind!r} compares with the target: target_logits may be None only for 'ce'")
    if target_logits is not None and target_logits.shape != draft_logits.shape:
        raise ValueError(
            f"target_logits must be aligned per depth, {list(draft_logits.shape)}, got {list(target_logits.shape)}"
        )
    valid = check_valid(valid, k, n, draft_logits.device)
    labels = check_labels(labels, options, k, n)
    shard = VocabShard.of_columns(columns, vocab_size, group, "draft_logits")
    scale = depth_scale(row_scale, options, valid)
    target = None if target_logits is None else target_logits.detach()
    loss, *fields = _LogitObjective.apply(draft_logits, target, labels, valid, scale, options, shard)  # pyright: ignore[reportGeneralTypeIssues]
    stats = RowStats(*fields)
    return ObjectiveOutput(loss, stats.alpha, anchors(valid, horizon)[0], stats)
