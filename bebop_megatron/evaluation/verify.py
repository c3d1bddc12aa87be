"""Which draft tokens survive, and which token follows them, without a change of the distribution.

    rule          draft        accept y with      after a rejection draw from
    rejection     y ~ q        min(1, p(y)/q(y))  max(0, p - q), renormalised
    target-only   y given      p(y)               p without y, renormalised

Both produce exactly the target's distribution. When every draft is accepted, the bonus token comes from the
target's distribution at the position after the last draft.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.evaluation.filters import sample

RULES = ("rejection", "target-only")


@dataclass(frozen=True)
class Verification:
    """The outcome of one verification per row.

    Shape: num_accepted [b] int64, 0..num_drafts; tokens [b, gamma + 1] int64: accepted drafts, the recovered
    or bonus token, then -1; accept_prob and alpha [b, gamma], 0 from num_drafts on. Both are conditional on
    the drafts before having been accepted: `accept_prob` is the probability that this draft is, `alpha` that
    a draft drawn from q is (sum min(p, q)); under target-only both are p(y).
    """

    num_accepted: Tensor
    tokens: Tensor
    accept_prob: Tensor
    alpha: Tensor


def verify(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    rule: str = "rejection",
    num_drafts: Tensor | None = None,
    generator: torch.Generator | None = None,
    *,
    validate: bool = False,
) -> Verification:
    """Accept a prefix of the drafts and draw the token after it: together distributed as the target's own.

    A draft that q says is impossible (q(y) = 0, an error of the caller) counts as accepted where p(y) > 0 and
    as rejected elsewhere. Without `validate` nothing waits for the device.

    Shape: target_probs [b, gamma + 1, v], draft_probs [b, gamma, v] (unused under target-only, may be None),
    draft_tokens [b, gamma] int64, num_drafts [b] int64 or None for gamma everywhere; entries from num_drafts
    on may hold anything. Computed in float32, or float64 where an input is.

    Raises:
        ValueError: unknown rule, shapes that do not fit, rejection without draft_probs; with `validate` also
            rows that are no distributions, ids out of range, and drafts that q says are impossible.
    """
    _check_shapes(target_probs, draft_probs, draft_tokens, rule, num_drafts)
    b, gamma = draft_tokens.shape
    step = torch.arange(gamma, device=target_probs.device)
    drafted = (step < num_drafts[:, None]) if num_drafts is not None else step.expand(b, gamma) >= 0
    if validate:
        _check_values(target_probs, draft_probs if rule == "rejection" else None, draft_tokens, drafted, num_drafts)
    p, q = _common_precision(target_probs, draft_probs if rule == "rejection" else None)
    # ids past num_drafts may be padding
    y = torch.where(drafted, draft_tokens, 0).long()
    accept_prob, alpha = _acceptance(p[:, :gamma], q, y)
    accept_prob, alpha = accept_prob.where(drafted, 0.0), alpha.where(drafted, 0.0)

    # in [0, 1): probability 1 always passes, 0 never; float32 would round small probabilities
    uniform = torch.rand(b, gamma, dtype=torch.float64, device=p.device, generator=generator)
    num_accepted = (uniform < accept_prob).long().cumprod(1).sum(1)
    following = sample(_following_weights(p, q, y, num_accepted, drafted), generator)

    slot, end = torch.arange(gamma + 1, device=p.device), num_accepted[:, None]
    tokens = torch.cat([y, end], dim=1).where(slot < end, -1).scatter(1, end, following[:, None])
    return Verification(num_accepted, tokens, accept_prob, alpha)


def _common_precision(p: Tensor, q: Tensor | None) -> tuple[Tensor, Tensor | None]:
    dtype = torch.promote_types(p.dtype, torch.float32)
    if q is None:
        return p.to(dtype), None
    dtype = torch.promote_types(dtype, q.dtype)
    return p.to(dtype), q.to(dtype)


def _acceptance(p: Tensor, q: Tensor | None, y: Tensor) -> tuple[Tensor, Tensor]:
    """Acceptance of the drafts y, and of a draft yet to be drawn; without q the draft is certain to be y.

    Shape: p and q [b, gamma, v], y [b, gamma] -> [b, gamma] twice.
    """
    p_y = p.gather(2, y[..., None]).squeeze(2).clamp(max=1)
    if q is None:
        return p_y, p_y
    q_y = q.gather(2, y[..., None]).squeeze(2)
    # the comparison first, so that p = q gives 1 and q = 0 divides nothing
    accept_prob = torch.where(p_y < q_y, p_y / q_y, (p_y > 0).to(p.dtype))
    return accept_prob, torch.minimum(p, q).sum(2).clamp(max=1)


def _following_weights(p: Tensor, q: Tensor | None, y: Tensor, num_accepted: Tensor, drafted: Tensor) -> Tensor:
    """What the token after the accepted drafts is drawn from: the residual, or the target itself.

    Shape: p [b, gamma + 1, v], q [b, gamma, v], num_accepted [b], drafted [b, gamma] -> [b, v] float64.
    """
    b, gamma = y.shape
    rows = torch.arange(b, device=p.device)
    weights = p[rows, num_accepted].double()
    if gamma == 0:
        return weights
    last = num_accepted.clamp(max=gamma - 1)
    if q is None:
        residual = weights.scatter(1, y[rows, last][:, None], 0.0)
    else:
        residual = (weights - q[rows, last]).clamp(min=0)
    # p <= q everywhere, up to rounding, leaves nothing: p itself then
    rejected = (num_accepted < gamma) & drafted[rows, last] & (residual.sum(1) > 0)
    return torch.where(rejected[:, None], residual, weights)


def _check_shapes(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    rule: str,
    num_drafts: Tensor | None,
) -> None:
    if rule not in RULES:
        raise ValueError(f"unknown verification rule {rule!r}: choose one of {', '.join(sorted(RULES))}")
    if draft_tokens.ndim != 2 or target_probs.ndim != 3:
        raise ValueError(
            "verify takes target_probs [b, gamma + 1, v] and draft_tokens [b, gamma], got "
            f"{list(target_probs.shape)} and {list(draft_tokens.shape)}"
        )
    b, gamma = draft_tokens.shape
    v = target_probs.shape[2]
    if target_probs.shape[:2] != (b, gamma + 1):
        raise ValueError(
            f"{gamma} draft tokens in {b} rows need target_probs [{b}, {gamma + 1}, v], whose last position "
            f"is the bonus token's, got {list(target_probs.shape)}"
        )
    if rule == "rejection":
        if draft_probs is None:
            raise ValueError("the rejection rule needs draft_probs, the distributions that the drafts were drawn from")
        if draft_probs.shape != (b, gamma, v):
            raise ValueError(f"draft_probs must be [{b}, {gamma}, {v}], got {list(draft_probs.shape)}")
    if num_drafts is not None and num_drafts.shape != (b,):
        raise ValueError(f"num_drafts must be [{b}], got {list(num_drafts.shape)}")


def _check_values(
    target_probs: Tensor,
    draft_probs: Tensor | None,
    draft_tokens: Tensor,
    drafted: Tensor,
    num_drafts: Tensor | None,
) -> None:
    gamma, v = draft_tokens.shape[1], target_probs.shape[2]
    if num_drafts is not None and bool(((num_drafts < 0) | (num_drafts > gamma)).any()):
        raise ValueError(f"num_drafts must lie in 0..{gamma}, got {num_drafts.tolist()}")
    read = torch.cat([drafted.new_ones(drafted.shape[0], 1), drafted], dim=1)
    for name, probs, used in (("target_probs", target_probs, read), ("draft_probs", draft_probs, drafted)):
        if probs is None:
            continue
        rows = probs[used].double()
        # NaN fails both comparisons
        if not bool(((rows >= 0).all(1) & ((rows.sum(1) - 1).abs() < 1e-2)).all()):
            raise ValueError(
                f"{name} holds rows that are no distributions: negative entries, NaN, or a sum other than 1"
            )
    ids = draft_tokens[drafted]
    if bool(((ids < 0) | (ids >= v)).any()):
        raise ValueError(f"draft_tokens holds ids outside 0..{v - 1}")
    if draft_probs is not None and bool((draft_probs[drafted].gather(1, ids[:, None]) == 0).any()):
        raise ValueError(
            "a draft token has probability 0 under draft_probs, so it was not drawn from them: hand over the "
            "distribution used for drafting, with its temperature and filters"
        )
