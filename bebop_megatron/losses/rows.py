"""Row statistics and unweighted gradients in PyTorch, vocabulary-parallel; never a gather of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bebop_megatron.losses.shard import VocabShard


@dataclass(frozen=True)
class RowStats:
    """Statistics of each row: alpha = sum min(p, q), `covered` = sum q [q <= p] (S), divergences and entropies in
    nats.
    """

    alpha: Tensor
    covered: Tensor
    kl: Tensor
    reverse_kl: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor
    p_argmax_q: Tensor
    greedy_target: Tensor
    greedy_label: Tensor
    log_q_label: Tensor

    def view(self, *shape: int) -> RowStats:
        return RowStats(**{f.name: getattr(self, f.name).reshape(*shape) for f in fields(self)})


@dataclass(frozen=True)
class Softmax:
    """Shape: log_probs [n, columns], entropy [n], column [n] (first largest on this rank, -1 if not here), first [n]
    (whether this rank is the first that holds a largest).
    """

    log_probs: Tensor
    entropy: Tensor
    column: Tensor
    first: Tensor


def softmaxes(blocks: Sequence[Tensor], shard: VocabShard) -> list[Softmax]:
    """Normalise blocks of logits [n_i, columns] in place.

    Collectives: two all-reduces over the group, for all blocks together.
    """
    largest = shard.max_and_argmax(blocks)
    own = [_sums(block, top, column, shard) for block, (top, column) in zip(blocks, largest, strict=True)]
    totals = shard.sum(torch.cat(own, dim=1)).split([len(block) for block in blocks], dim=1)
    done = []
    for block, (_, column), (norm, dot, holders) in zip(blocks, largest, totals, strict=True):
        log_sum = norm.log()
        entropy = log_sum - dot / norm
        done.append(Softmax(block.sub_(log_sum[:, None]), entropy, column, shard.first(column >= 0, holders)))
    return done


def _sums(logits: Tensor, top: Tensor, column: Tensor, shard: VocabShard) -> Tensor:
    """Shift logits by their maximum, in place; sums of e^z and z e^z, and who holds a maximum: [3, n]."""
    shifted = logits.sub_(top[:, None])
    e = shifted.exp()
    norm = e.sum(-1)
    dot = e.mul_(shifted.clamp(min=torch.finfo(shifted.dtype).min)).sum(-1)
    return torch.stack([norm, dot, shard.bit(column >= 0).to(norm.dtype)])


def _pick(log_probs: Tensor, column: Tensor, held: Tensor) -> Tensor:
    if log_probs.shape[1] == 0:
        return log_probs.new_zeros(held.shape)
    return log_probs.gather(1, column.clamp(min=0)[:, None])[:, 0]


def row_stats(
    draft: Softmax, target: Softmax | None, rows: Tensor, labels: Tensor | None, shard: VocabShard
) -> RowStats:
    """All statistics [n] of n rows; row i meets target row `rows[i]`. Without target or labels theirs are 0.

    Collectives: one all-reduce over the group.
    """
    n = len(draft.entropy)
    zero = draft.entropy.new_zeros(n)
    parts = [zero] * 8
    if target is not None:
        # a private copy, written over step by step: few blocks of logits may live at once
        log_p = target.log_probs[rows]
        q, p = draft.log_probs.exp(), log_p.exp()
        parts[4] = torch.where(draft.first, _pick(p, draft.column, draft.first), 0)
        parts[0] = torch.minimum(p, q).sum(-1)
        # ties count as q <= p
        parts[1] = torch.where(q <= p, q, 0).sum(-1)
        ratio = log_p.sub_(draft.log_probs)
        # 0 log 0 is 0
        parts[2] = torch.where(p > 0, ratio, 0).mul_(p).sum(-1)
        parts[3] = -ratio.masked_fill_(q == 0, 0).mul_(q).sum(-1)
        parts[5] = (draft.first & target.first[rows] & (draft.column == target.column[rows])).to(zero.dtype)
    if labels is not None:
        column, held = shard.local(labels)
        parts[6] = (draft.first & held & (draft.column == column)).to(zero.dtype)
        parts[7] = torch.where(held, _pick(draft.log_probs, column, held), 0)
    total = shard.sum(torch.stack(parts))
    return RowStats(
        alpha=total[0].clamp(max=1),
        covered=total[1],
        kl=total[2],
        reverse_kl=total[3],
        target_entropy=zero if target is None else target.entropy[rows],
        draft_entropy=draft.entropy,
        p_argmax_q=total[4],
        greedy_target=total[5] > 0,
        greedy_label=total[6] > 0,
        log_q_label=total[7],
    )


def gradient_direction(
    draft: Softmax,
    target: Softmax | None,
    rows: Tensor,
    labels: Tensor | None,
    stats: RowStats,
    coefficients: dict[str, Tensor],
    shard: VocabShard,
) -> Tensor:
    """Sum of the row directions `ce`, `kl`, `reverse-kl` and `tv`, each times its coefficient [n] -> [n, columns].

    Gradient: ce: q_j - [j = label]; kl: q_j - p_j; reverse-kl: q_j (log(q_j/p_j) - KL(q||p)); tv:
    -q_j ([q_j <= p_j] - S).
    """
    q = draft.log_probs.exp()
    p = None if target is None else target.log_probs[rows].exp_()
    grad = torch.zeros_like(q)
    for name, weight in coefficients.items():
        w = weight.to(q.dtype)[:, None]
        if name == "ce":
            assert labels is not None
            grad.addcmul_(w, q)
            column, held = shard.local(labels)
            if q.shape[1]:
                grad.scatter_add_(1, column[:, None], -torch.where(held[:, None], w, 0))
            continue
        assert target is not None
        assert p is not None
        if name == "kl":
            grad.addcmul_(w, q - p)
        elif name == "reverse-kl":
            ratio = target.log_probs[rows].neg_().add_(draft.log_probs).masked_fill_(q == 0, 0)
            grad.addcmul_(w, ratio.sub_(stats.reverse_kl[:, None]).mul_(q))
        else:
            accepted = (q <= p).to(q.dtype)
            grad.addcmul_(w, accepted.sub_(stats.covered[:, None]).mul_(q), value=-1)
    return grad
