"""Drafts against their targets: what both entry points compute of a block of rows, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bebop_megatron.losses.backend import Backend, resolve
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.statistics import Distribution, RowStats, distributions
from bebop_megatron.losses.target_filter import filter_logits, outside_top_k

if TYPE_CHECKING:
    from bebop_megatron.losses.options import Options


def _part_of_mean(weight: Tensor, mean: Tensor, shift: Tensor) -> Tensor:
    """This rank's part of an expectation of logit - global top: `mean` is over its own share `weight`."""
    return torch.where(weight > 0, weight * (mean + shift), 0)


def _share(side: Distribution) -> Tensor:
    return torch.ones_like(side.shift) if side.share is None else side.share


@dataclass(frozen=True)
class Comparison:
    """n draft rows; row i meets row `rows[i]` of the target and predicts a label, where there are such.

    Shape: label [n] int64: the column of each label, -1 where another rank holds it.
    """

    draft: Distribution
    target: Distribution | None
    rows: Tensor
    label: Tensor | None
    shard: VocabShard
    backend: Backend
    reverse: bool

    @classmethod
    def of(
        cls,
        draft_logits: Tensor,
        target_logits: Tensor | None,
        rows: Tensor,
        labels: Tensor | None,
        options: Options,
        shard: VocabShard,
        overwrite: bool = False,
    ) -> Comparison:
        """Normalise both sides.

        Shape: draft_logits [n, columns], target_logits [m, columns], rows, labels [n] int64.
        Collectives: two all-reduces over the group, and those of the target's filters.
        Memory: see `local_rows` of the backend; `overwrite` lets it use the logits themselves.
        """
        backend = resolve(options.backend, draft_logits.device)
        reverse = options.needs_reverse_kl
        sides = []
        if target_logits is not None and options.truncate_top_k:
            outside = outside_top_k(target_logits, options.truncate_top_k, shard)
            target_logits = target_logits.masked_fill(outside, -torch.inf)
            draft_logits = draft_logits.masked_fill(outside[rows], -torch.inf)
        if target_logits is not None:
            scale = options.logit_scale / options.target_temperature
            if options.filters:
                wide = target_logits.to(torch.promote_types(target_logits.dtype, torch.float32)) * scale
                target_logits, scale = filter_logits(wide, options.target_top_k, options.target_top_p, shard), 1.0
            sides.append(backend.local_rows(target_logits, scale, reverse=reverse, overwrite=overwrite))
        label = None
        if labels is not None:
            column, held = shard.local(labels)
            label = torch.where(held, column, -1)
        draft = backend.local_rows(
            draft_logits,
            options.logit_scale / options.draft_temperature,
            target=sides[0] if sides else None,
            rows=rows,
            label=label,
            reverse=reverse,
            overwrite=overwrite,
        )
        *targets, done = distributions([*sides, draft], shard)
        return cls(done, targets[0] if targets else None, rows, label, shard, backend, reverse)

    def stats(self) -> RowStats:
        """All statistics [n]. Without target or labels theirs are 0.

        Collectives: one all-reduce over the group.
        """
        draft, target, rows = self.draft, self.target, self.rows
        zero = torch.zeros_like(draft.entropy)
        parts = [zero] * 9
        if target is not None:
            overlap = self.backend.overlap(draft.local, target.local, rows, draft.share, target.share)
            weight = _share(target)[rows]
            parts[0], parts[1], parts[8] = overlap.alpha, overlap.covered, overlap.rejected
            parts[2] = _part_of_mean(weight, draft.local.cross, draft.shift)
            if self.reverse:
                parts[3] = _part_of_mean(_share(draft), draft.local.reverse_cross, target.shift[rows])
            if self.shard.columns:
                p = self.backend.probability_at(target.local, rows, draft.local.column)
                parts[4] = torch.where(draft.first, weight * p, 0)
            same = draft.first & target.first[rows] & (draft.local.column == target.local.column[rows])
            parts[5] = same.to(zero.dtype)
        if self.label is not None:
            # no column is -1
            parts[6] = (draft.first & (draft.local.column == self.label)).to(zero.dtype)
            parts[7] = torch.where(self.label >= 0, draft.local.label_logit + draft.shift, 0)
        total = self.shard.sum(torch.stack(parts))
        kl = reverse_kl = target_entropy = zero
        if target is not None:
            target_entropy = target.entropy[rows]
            kl = draft.log_sum - target_entropy - total[2]
            if self.reverse:
                reverse_kl = target.log_sum[rows] - draft.entropy - total[3]
        return RowStats(
            alpha=total[0].clamp(max=1),
            covered=total[1],
            rejected=total[8],
            kl=kl,
            reverse_kl=reverse_kl,
            target_entropy=target_entropy,
            draft_entropy=draft.entropy,
            p_argmax_q=total[4],
            greedy_target=total[5] > 0,
            greedy_label=total[6] > 0,
            log_q_label=zero if self.label is None else total[7] - draft.log_sum,
        )

    def direction(self, stats: RowStats, coefficients: dict[str, Tensor], overwrite: bool = False) -> Tensor:
        """Row directions, each times its coefficient [n] -> [n, columns]: formulas at `rows.direction`.

        Memory: with `overwrite` the draft's own block becomes the result.
        """
        log_ratio = None
        if "reverse-kl" in coefficients:
            assert self.target is not None
            # log(q/p) of logits that are relative to their rank's top, less KL(q||p)
            of_target = (self.target.shift - self.target.log_sum)[self.rows]
            log_ratio = self.draft.shift - self.draft.log_sum - of_target - stats.reverse_kl
        return self.backend.direction(
            self.draft.local,
            None if self.target is None else self.target.local,
            self.rows,
            self.draft.share,
            None if self.target is None else self.target.share,
            coefficients,
            stats.covered,
            stats.rejected,
            log_ratio,
            self.label,
            overwrite=overwrite,
        )
