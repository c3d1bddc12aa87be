"""Group-relative policy gradients: advantages of a group, and the loss of tokens that a slightly older policy chose.

For a completion o with advantage A, sampled token by token from the policy mu, the loss of the policy pi is

    - w_t A log pi(o_t) + kl (r_t - 1 - log r_t) - bonus H(pi_t),   w_t = min(pi/mu, C), detached,   r_t = mu/pi

mean over all tokens of the step. The rollout's log-probabilities are the target's, whatever drafted the tokens, so
speculation leaves mu, and with it the gradient, as it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.losses.shard import VocabShard


def advantages(rewards: list[float], normalise: bool) -> list[float]:
    """Rewards minus their group's mean, over its standard deviation; all 0 where the group is of one mind."""
    values = torch.tensor(rewards, dtype=torch.float64)
    centred = values - values.mean()
    spread = values.std(unbiased=False)
    if spread < 1e-8:
        return [0.0] * len(rewards)
    return (centred / spread if normalise else centred).tolist()


class _LogProbAndEntropy(torch.autograd.Function):
    """Shape: logits [..., v/tp], labels [...] -> [...] float32 twice."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, temperature: float, shard: VocabShard) -> tuple[Tensor, ...]:
        scaled = logits[..., : shard.columns].float() / temperature
        if shard.columns:
            top = shard.maximum(scaled.amax(-1))
        else:
            top = shard.maximum(logits.new_full(logits.shape[:-1], -torch.inf, dtype=torch.float32))
        scaled = scaled - top[..., None]
        weights = scaled.exp()
        column, held = shard.local(labels)
        own = scaled.gather(-1, column[..., None]).squeeze(-1) if shard.columns else torch.zeros_like(top)
        total, weighted, chosen = shard.sum(
            torch.stack([weights.sum(-1), (weights * scaled).sum(-1), torch.where(held, own, 0.0)])
        )
        log_total = total.log()
        probs = weights / total[..., None]
        log_prob, entropy = chosen - log_total, log_total - weighted / total
        ctx.save_for_backward(probs, scaled - log_total[..., None], entropy, column, held)
        ctx.temperature, ctx.columns, ctx.dtype = temperature, logits.shape[-1], logits.dtype
        return log_prob, entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        grad_log_prob, grad_entropy = grads
        probs, log_probs, entropy, column, held = ctx.saved_tensors
        # dH/dz_j = -p_j (log p_j + H)
        grad = -probs * (grad_log_prob[..., None] + grad_entropy[..., None] * (log_probs + entropy[..., None]))
        if probs.shape[-1]:
            grad.scatter_add_(-1, column[..., None], torch.where(held, grad_log_prob, 0.0)[..., None])
        padding = grad.new_zeros(*grad.shape[:-1], ctx.columns - grad.shape[-1])
        return (torch.cat([grad, padding], -1) / ctx.temperature).to(ctx.dtype), None, None, None


def log_prob_and_entropy(
    logits: Tensor, labels: Tensor, *, vocab_size: int, temperature: float = 1.0, group: Any = None
) -> tuple[Tensor, Tensor]:
    """Log-probability of the labels and entropy, in nats, of softmax(logits / temperature).

    Shape: logits [..., v/tp], labels [...] int64 global ids -> [...] float32 twice.
    Gradient: of log p, (onehot - p) / T; of the entropy, -p (log p + H) / T; 0 for padding columns.
    Collectives: two all-reduces over `group` forward, none backward.
    Memory: two float32 copies of the logits.
    """
    shard = VocabShard.of_columns(logits.shape[-1], vocab_size, group, "logits")
    return _LogProbAndEntropy.apply(logits, labels, temperature, shard)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the tokens of a micro-batch, weighted: `loss` has a gradient; the rest is for the log."""

    loss: Tensor
    entropy: Tensor
    importance: Tensor
    truncated: Tensor
    kl: Tensor


def policy_loss(
    log_prob: Tensor,
    entropy: Tensor,
    behaviour: Tensor,
    advantage: Tensor,
    weight: Tensor,
    *,
    truncation: float,
    kl: float = 0.0,
    entropy_bonus: float = 0.0,
) -> PolicyLoss:
    """The loss at the head of this file.

    Shape: log_prob, entropy (of the policy), behaviour (log-probabilities of the rollout), advantage, weight [b, t];
    `weight` is 0 for what is no token of a completion, and sums to 1 over a step.
    Gradient: into log_prob and entropy.
    """
    counted = weight > 0
    ratio = torch.where(counted, log_prob.detach() - behaviour, 0.0).exp()
    weighted = -(ratio.clamp(max=truncation) * advantage * log_prob)
    # what is not counted may hold anything
    difference = torch.where(counted, behaviour - log_prob, 0.0)
    divergence = difference.exp() - 1 - difference
    each = weighted + kl * divergence - entropy_bonus * entropy

    def total(values: Tensor) -> Tensor:
        return torch.where(counted, values * weight, 0.0).sum()

    with torch.no_grad():
        seen = [total(value) for value in (entropy, ratio, (ratio > truncation).float(), divergence)]
    return PolicyLoss(total(each), *seen)
