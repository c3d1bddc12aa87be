"""The objective over logits: one autograd function with closed-form gradients, vocabulary-parallel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from bebop_megatron.losses.comparison import Comparison
from bebop_megatron.losses.options import Options, check_labels, check_valid, depth_scale
from bebop_megatron.losses.prefix import anchors, counted
from bebop_megatron.losses.registry import OBJECTIVES, weighted_terms
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.statistics import RowStats


@dataclass(frozen=True)
class ObjectiveOutput:
    """The loss of a micro-batch and what was seen on the way.

    Shape: loss [] float32 (fp64 for fp64 input); alpha [k, n], detached; num_valid [] int64: anchors that count;
    stats: every row statistic [k, n], detached, 0 where an entry is not valid; row_nll [n] float32, where asked for.
    """

    loss: Tensor
    alpha: Tensor
    num_valid: Tensor
    stats: RowStats
    row_nll: Tensor | None = None


def only_valid(stats: RowStats, valid: Tensor) -> RowStats:
    """Statistics with 0 (False) at entries that are not valid, whatever was computed there."""
    return RowStats(**{name: torch.where(valid, value, torch.zeros_like(value)) for name, value in vars(stats).items()})


def unit_blend(options: Options, weights: list[Tensor], alpha: Tensor) -> dict[str, Tensor]:
    """Coefficient [n] of each row direction: the objectives' blends, each times its weights [n]."""
    total: dict[str, Tensor] = {}
    for kind, weight in zip(options.shares, weights, strict=True):
        for name, coefficient in OBJECTIVES[kind].blend(alpha).items():
            term = weight * coefficient
            total[name] = total[name] + term if name in total else term
    return total


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
        compared = _compare(draft_logits, target_logits, labels, options, shard)
        # rows that are not valid may hold NaN, and keep it to themselves
        stats = only_valid(compared.stats().view(*valid.shape), valid)
        loss, weights = weighted_terms(options.shares, stats, counted(valid, options.horizon), scale)
        ctx.save_for_backward(draft_logits, target_logits, labels, valid, *weights)
        ctx.options, ctx.shard, ctx.stats = options, shard, stats
        fields = tuple(vars(stats).values())
        ctx.mark_non_differentiable(*fields)
        return loss, *fields

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        draft_logits, target_logits, labels, valid, *weights = ctx.saved_tensors
        options: Options = ctx.options
        # two all-reduces again, instead of keeping both softmaxes between forward and backward
        compared = _compare(draft_logits, target_logits, labels, options, ctx.shard)
        factor = grads[0] * (options.logit_scale / options.draft_temperature)
        stats = ctx.stats.view(-1)
        blend = unit_blend(options, [(w * factor).reshape(-1) for w in weights], stats.alpha)
        direction = compared.direction(stats, blend).masked_fill_(~valid.reshape(-1, 1), 0)
        grad = torch.zeros_like(draft_logits)
        grad[..., : ctx.shard.columns] = direction.view(*valid.shape, ctx.shard.columns).to(grad.dtype)
        return grad, None, None, None, None, None, None


def _compare(
    draft_logits: Tensor, target_logits: Tensor | None, labels: Tensor | None, options: Options, shard: VocabShard
) -> Comparison:
    sides = [None if x is None else x[..., : shard.columns].flatten(0, 1) for x in (draft_logits, target_logits)]
    assert sides[0] is not None
    rows = torch.arange(len(sides[0]), device=draft_logits.device)
    return Comparison.of(sides[0], sides[1], rows, None if labels is None else labels.flatten(), options, shard)


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
    truncate_top_k: int = 0,
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
    factor on each depth's sum) -> see `ObjectiveOutput`.
    `target_top_p`, `target_top_k`: the target is filtered as a server would, then renormalised; `truncate_top_k`: both
    sides are restricted to the target's likeliest tokens.
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
        truncate_top_k=truncate_top_k,
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
