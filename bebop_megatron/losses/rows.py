"""Row statistics and unweighted gradients in PyTorch, vocabulary-parallel; never a gather of the vocabulary."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from bebop_megatron.losses.shard import VocabShard


@dataclass(frozen=True)
class RowStats:
    """Statistics of each row: alpha = sum min(p, q), `covered` = sum q [q <= p] (S), divergences and entropies in nats."""

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
        return RowStats(**{f.name: getattr(self, f.name).view(*shape) for f in fields(self)})


@dataclass(frozen=True)
class Softmax:
    """Shape: log_probs [n, columns], entropy [n], column [n] (first largest on this rank, -1 if not here), first [n]."""

    log_probs: Tensor
    entropy: Tensor
    column: Tensor
    first: Tensor


def softmaxes(blocks: Sequence[Tensor], shard: VocabShard) -> list[Softmax]:
    """Normalise blocks of logits [n_i, columns] in place. Collectives: two all-reduces over the group for each block."""
    return [_softmax(block, shard) for block in blocks]


def _softmax(logits: Tensor, shard: VocabShard) -> Softmax:
    top, column = shard.max_and_argmax(logits)
    shifted = logits.sub_(top[:, None])
    e = shifted.exp()
    lowest = torch.finfo(shifted.dtype).min
    dot = (e * shifted.clamp(min=lowest)).sum(-1)
    sums = shard.sum(torch.stack([e.sum(-1), dot, shard.bit(column >= 0).to(e.dtype)]))
    log_sum = sums[0].log()
    return Softmax(
        shifted.sub_(log_sum[:, None]), log_sum - sums[1] / sums[0], column, shard.first(column >= 0, sums[2])
    )


def _pick(log_probs: Tensor, column: Tensor, held: Tensor) -> Tensor:
    if log_probs.shape[1] == 0:
        return log_probs.new_zeros(held.shape)
    return log_probs.gather(1, column.clamp(min=0)[:, None])[:, 0]


def row_stats(
    draft: Softmax, target: Softmax | None, rows: Tensor, labels: Tensor | None, shard: VocabShard, full: bool
) -> RowStats:
    """All statistics [n] of n rows; row i meets target row `rows[i]`. Without target or labels theirs are 0.

    `full` says that the objective needs reverse KL; it is cheap and always computed.
    Collectives: one all-reduce over the group.
    """
    n = len(draft.entropy)
    zero = draft.entropy.new_zeros(n)
    parts = [zero] * 9
    if target is not None:
        log_q, log_p = draft.log_probs, target.log_probs[rows]
        q, p = log_q.exp(), log_p.exp()
        ratio = log_p - log_q
        parts[0] = torch.minimum(p, q).sum(-1)
        # ties count as q <= p
        parts[1] = torch.where(q <= p, q, 0).sum(-1)
        parts[2] = torch.where(p > 0, p * ratio, 0).sum(-1)
        parts[3] = -torch.where(q > 0, q * ratio, 0).sum(-1)
        parts[4] = torch.where(draft.first, _pick(log_p, draft.column, draft.first).exp(), 0)
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

    Gradient: ce: q_j - [j = label]; kl: q_j - p_j; reverse-kl: q_j (log(q_j/p_j) - KL(q||p)); tv: -q_j ([q_j <= p_j] - S).
    """
    q = draft.log_probs.exp()
    log_p = None if target is None else target.log_probs[rows]
    grad = torch.zeros_like(q)
    for name, weight in coefficients.items():
        w = weight.to(q.dtype)[:, None]
        if name == "ce":
            assert labels is not None
            grad += w * q
            column, held = shard.local(labels)
            if q.shape[1]:
                grad.scatter_add_(1, column[:, None], -torch.where(held[:, None], w, 0))
            continue
        assert log_p is not None
        p = log_p.exp()
        if name == "kl":
            grad += w * (q - p)
        elif name == "reverse-kl":
            ratio = torch.where(q > 0, draft.log_probs - log_p, 0)
            grad += w * q * (ratio - stats.reverse_kl[:, None])
        else:
            grad -= w * q * ((q <= p).to(q.dtype) - stats.covered[:, None])
    return grad
