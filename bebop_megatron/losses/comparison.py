"""Drafts against their targets: what both entry points compute of a block of rows, whatever the backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from bebop_megatron.losses import rows as torch_rows
from bebop_megatron.losses.backend import Backend, resolve
from bebop_megatron.losses.rows import LocalRows
from bebop_megatron.losses.shard import VocabShard
from bebop_megatron.losses.statistics import Distribution, RowStats, distributions
from bebop_megatron.losses.target_filter import filter_logits, outside_top_k

if TYPE_CHECKING:
    from bebop_megatron.losses.options import Options

# what of each draft row every rank has a part of; expectations are of logit - global top
_SUMMED = ("alpha", "covered", "rejected", "cross", "reverse_cross", "p_argmax_q")
_SUMMED += ("greedy_target", "greedy_label", "label_logit")


def _part_of_mean(weight: Tensor, mean: Tensor, shift: Tensor) -> Tensor:
    """This rank's part of an expectation of logit - global top: `mean` is over its own share `weight`."""
    return torch.where(weight > 0, weight * (mean + shift), 0)


def _share(side: Distribution) -> Tensor:
    return torch.ones_like(side.shift) if side.share is None else side.share


def _normalised_target(
    logits: Tensor, options: Options, shard: VocabShard, backend: Backend, overwrite: bool
) -> LocalRows:
    scale = options.logit_scale / options.target_temperature
    if options.filters:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32)) * scale
        logits, scale = filter_logits(wide, options.target_top_k, options.target_top_p, shard), 1.0
    return backend.local_rows(logits, scale, reverse=options.needs_reverse_kl, overwrite=overwrite)


@dataclass(frozen=True)
class Target:
    """m target rows, which meet any number of drafts; outside [m, columns] bool: what truncation leaves out of both."""

    distribution: Distribution
    outside: Tensor | None


@dataclass(frozen=True)
class Comparison:
    """n draft rows; row i meets row `rows[i]` of the target and predicts a label, where there are such.

    Shape: label [n] int64: the column of each label, -1 where another rank holds it.
    """

    draft: Distribution
    reference: Target | None
    rows: Tensor
    label: Tensor | None
    shard: VocabShard
    backend: Backend
    reverse: bool

    @classmethod
    def of(
        cls,
        draft_logits: Tensor,
        target: Tensor | Target | None,
        rows: Tensor,
        labels: Tensor | None,
        options: Options,
        shard: VocabShard,
        overwrite: bool = False,
    ) -> Comparison:
        """Normalise both sides; of a target that was compared before, the `reference` of that comparison will do.

        Shape: draft_logits [n, columns], target (logits) [m, columns], rows, labels [n] int64.
        Collectives: two all-reduces over the group, and those of the target's filters.
        Memory: see `local_rows` of the backend; `overwrite` lets it use the logits themselves.
        """
        backend = resolve(options.backend, draft_logits.device)
        reverse = options.needs_reverse_kl
        known = target if isinstance(target, Target) else None
        outside, own = (None, None) if known is None else (known.outside, known.distribution.local)
        if isinstance(target, Tensor):
            given: Tensor = target
            if options.truncate_top_k:
                outside = outside_top_k(given, options.truncate_top_k, shard)
                given = given.masked_fill(outside, -torch.inf)
            own = _normalised_target(given, options, shard, backend, overwrite)
        if outside is not None:
            draft_logits = draft_logits.masked_fill(outside[rows], -torch.inf)
        label = None
        if labels is not None:
            column, held = shard.local(labels)
            label = torch.where(held, column, -1)
        draft = backend.local_rows(
            draft_logits,
            options.logit_scale / options.draft_temperature,
            target=own,
            rows=rows,
            label=label,
            reverse=reverse,
            overwrite=overwrite,
        )
        if own is None or known is not None:
            (done,) = distributions([draft], shard)
            return cls(done, known, rows, label, shard, backend, reverse)
        of_target, done = distributions([own, draft], shard)
        return cls(done, Target(of_target, outside), rows, label, shard, backend, reverse)

    @property
    def target(self) -> Distribution | None:
        """The target's rows, if there are any."""
        return None if self.reference is None else self.reference.distribution

    @property
    def can_fuse(self) -> bool:
        """Whether the direction `tv` can be had with the statistics: no sum needs another rank, or another kernel."""
        return self.backend is torch_rows and self.target is not None and self.shard.group is None

    def stats(self, tv: Tensor | None = None) -> RowStats:
        """All statistics [n]. Without target or labels theirs are 0.

        Collectives: one all-reduce over the group.
        Memory: with `tv` [n, columns], for which `can_fuse` must hold, the direction `tv` is written into it.
        """
        draft, target, rows = self.draft, self.target, self.rows
        zero = torch.zeros_like(draft.entropy)
        own = dict.fromkeys(_SUMMED, zero)
        if target is not None:
            sides = (draft.local, target.local, rows, draft.share, target.share)
            own |= vars(self.backend.overlap(*sides) if tv is None else torch_rows.overlap(*sides, tv))
            weight = _share(target)[rows]
            own["cross"] = _part_of_mean(weight, draft.local.cross, draft.shift)
            if self.reverse:
                own["reverse_cross"] = _part_of_mean(_share(draft), draft.local.reverse_cross, target.shift[rows])
            if self.shard.columns:
                p = self.backend.probability_at(target.local, rows, draft.local.column)
                own["p_argmax_q"] = torch.where(draft.first, weight * p, 0)
            same = draft.first & target.first[rows] & (draft.local.column == target.local.column[rows])
            own["greedy_target"] = same.to(zero.dtype)
        if self.label is not None:
            # no column is -1
            own["greedy_label"] = (draft.first & (draft.local.column == self.label)).to(zero.dtype)
            own["label_logit"] = torch.where(self.label >= 0, draft.local.label_logit + draft.shift, 0)
        total = dict(zip(own, self.shard.sum(torch.stack([*own.values()])), strict=True))
        kl = reverse_kl = target_entropy = zero
        if target is not None:
            target_entropy = target.entropy[rows]
            kl = draft.log_sum - target_entropy - total["cross"]
            if self.reverse:
                reverse_kl = target.log_sum[rows] - draft.entropy - total["reverse_cross"]
        return RowStats(
            alpha=total["alpha"].clamp(max=1),
            covered=total["covered"],
            rejected=total["rejected"],
            kl=kl,
            reverse_kl=reverse_kl,
            target_entropy=target_entropy,
            draft_entropy=draft.entropy,
            p_argmax_q=total["p_argmax_q"],
            greedy_target=total["greedy_target"] > 0,
            greedy_label=total["greedy_label"] > 0,
            log_q_label=zero if self.label is None else total["label_logit"] - draft.log_sum,
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
