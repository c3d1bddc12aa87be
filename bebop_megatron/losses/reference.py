"""The specification: every objective as a dense float64 formula, differentiated by autograd."""

from __future__ import annotations

import torch
from torch import Tensor

ALPHA_FLOOR = 1e-4


def _filtered(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    if top_p < 1:
        p = logits.softmax(-1)
        ordered = p.sort(dim=-1, descending=True).values
        # a token stays if the mass before it has not reached top_p, and with it all that are as likely
        stays = (ordered.cumsum(-1) - ordered) < top_p
        least = torch.where(stays, ordered, torch.inf).amin(-1, keepdim=True)
        logits = logits.masked_fill(p < least, -torch.inf)
    return logits


def _kl(log_a: Tensor, log_b: Tensor) -> Tensor:
    a = log_a.exp()
    # 0 log 0 is 0, in value and in gradient
    return (a * torch.where(a > 0, log_a - log_b, 0)).sum(-1)


def reference_objective(
    draft_logits: Tensor,
    target_logits: Tensor | None,
    kind: str,
    *,
    valid: Tensor,
    labels: Tensor | None = None,
    vocab_size: int | None = None,
    draft_temperature: float = 1.0,
    target_temperature: float = 1.0,
    target_top_p: float = 1.0,
    target_top_k: int = 0,
    truncate_top_k: int = 0,
    logit_scale: float = 1.0,
    horizon: str = "full",
    reduction: str = "mean",
) -> Tensor:
    """The loss in float64, straight from its definition.

    Shape: draft_logits, target_logits [k, n, v], valid [k, n] bool, labels [k, n] int64 -> [].
    Gradient: autograd's, through draft_logits only.
    Raises:
        ValueError: an unknown objective.
    """
    k, n = valid.shape
    v = draft_logits.shape[-1] if vocab_size is None else vocab_size
    drop = ~valid[..., None]
    # NaN in a row that does not count must not reach the gradient of one that does
    z = draft_logits[..., :v].double().masked_fill(drop, 0)
    # probabilities underflow long before their logarithms do
    if truncate_top_k and target_logits is not None:
        kept = _filtered(target_logits[..., :v].detach().double().masked_fill(drop, 0), truncate_top_k, 1.0)
        target_logits = kept
        z = z.masked_fill(kept == -torch.inf, -torch.inf)
    log_q = (z * logit_scale / draft_temperature).log_softmax(-1)
    log_p, alpha = torch.zeros_like(log_q), torch.zeros(k, n, dtype=torch.float64)
    if target_logits is not None:
        z = target_logits[..., :v].detach().double().masked_fill(drop, 0) * logit_scale / target_temperature
        log_p = _filtered(z, target_top_k, target_top_p).log_softmax(-1)
        p, q = log_p.exp(), log_q.exp()
        # ties count as q <= p; torch.minimum would give them half a gradient
        alpha = torch.where(q <= p, q, p).sum(-1)

    if kind == "tv":
        terms = []
        product = torch.ones_like(alpha[0])
        for i in range(k):
            product = product * alpha[i]
            terms.append(1 - product)
        term = torch.stack(terms)
    elif kind == "tv-step":
        term = 1 - alpha
    elif kind == "kl":
        term = _kl(log_p, log_q)
    elif kind == "reverse-kl":
        term = _kl(log_q, log_p)
    elif kind == "lk":
        floor = alpha.detach().clamp(min=ALPHA_FLOOR)
        # below the floor the gradient is that of alpha over the floor, not zero
        term = -floor.log() - (alpha - alpha.detach()) / floor
    elif kind == "lk-hybrid":
        share = torch.exp(-3 * alpha.detach())
        term = share * _kl(log_p, log_q) + (1 - share) * (1 - alpha)
    elif kind == "ce":
        assert labels is not None
        term = -log_q.gather(-1, torch.where(valid, labels, 0)[..., None]).squeeze(-1)
    else:
        raise ValueError(f"unknown objective {kind!r}")

    # without an anchor that counts: 0, and a gradient of 0
    total = (log_q.exp() * 0).sum()
    if horizon == "per-depth":
        for i in range(k):
            count = int(valid[i].sum())
            if count:
                total = total + term[i][valid[i]].sum() / (count if reduction == "mean" else 1) / k
        return total
    count = 0
    for a in range(n):
        m = k
        if horizon == "full":
            m = k if bool(valid[:, a].all()) else 0
        else:
            m = next((i for i in range(k) if not valid[i, a]), k)
        if m:
            total = total + term[:m, a].sum() / k
            count += 1
    return total / count if reduction == "mean" and count else total
