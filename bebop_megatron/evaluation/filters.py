"""From logits to the distribution a token is drawn from, and from that distribution to a token.

Verification is lossless only if q is the distribution the draft was really drawn from, to the last bit and
with every filter. So there is one definition of both steps, used for the draft and for the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from bebop_megatron.evaluation.settings import DecodeConfig


def filtered_probs(
    logits: Tensor, temperature: float, top_k: int = 0, top_p: float = 1.0, vocab_size: int | None = None
) -> Tensor:
    """Probabilities after temperature, then top-k, then top-p of what top-k left.

    Temperature 0 puts all mass on the first largest logit. Top-p keeps the smallest set whose mass reaches
    `top_p`, never less than one token; equal probabilities are kept in the order of their ids. `top_k` 0 and
    `top_p` 1 keep everything.

    Shape: logits [..., v] any floating type -> [..., v] float32 (float64 for float64 logits); columns from
    `vocab_size` on are padding and get probability 0.

    Raises:
        ValueError: a setting out of range.
    """
    width = logits.shape[-1]
    _check_filters(temperature, top_k, top_p, vocab_size, width)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if vocab_size is not None and vocab_size < width:
        padding = torch.arange(width, device=logits.device) >= vocab_size
        logits = logits.masked_fill(padding, -torch.inf)
    if temperature == 0:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    # the largest logit goes first, so that a tiny temperature cannot overflow
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature
    if 0 < top_k < width or top_p < 1:
        logits = logits.masked_fill(~_kept(logits, top_k, top_p), -torch.inf)
    return logits.softmax(-1)


def target_probs(logits: Tensor, config: DecodeConfig, vocab_size: int) -> Tensor:
    """p of a decoder with these settings. Shape: logits [..., v] -> [..., v]."""
    return filtered_probs(logits, config.temperature, config.top_k, config.top_p, vocab_size)


def draft_probs(logits: Tensor, config: DecodeConfig, vocab_size: int) -> Tensor:
    """q of the same: p's temperature, and its filters unless `filter_draft` is off. Shape: as `target_probs`."""
    top_k, top_p = (config.top_k, config.top_p) if config.filter_draft else (0, 1.0)
    return filtered_probs(logits, config.temperature, top_k, top_p, vocab_size)


def _check_filters(temperature: float, top_k: int, top_p: float, vocab_size: int | None, width: int) -> None:
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {temperature}")
    if top_k < 0:
        raise ValueError(f"top_k must be 0 (off) or the number of tokens to keep, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must lie in (0, 1], got {top_p}")
    if vocab_size is not None and not 0 < vocab_size <= width:
        raise ValueError(f"vocab_size is {vocab_size:,} but the logits have {width:,} columns")


def _kept(logits: Tensor, top_k: int, top_p: float) -> Tensor:
    # stable: of equal logits the lower id comes first on every device
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    if top_k > 0:
        ordered = ordered.masked_fill(torch.arange(ordered.shape[-1], device=logits.device) >= top_k, -torch.inf)
    keep = ordered > -torch.inf
    if top_p < 1:
        # float64: float32 loses whole tokens when it adds up a vocabulary
        probs = ordered.double().softmax(-1)
        # mass before a token; exactly 0 before the first, which therefore always stays
        keep &= probs.cumsum(-1) - probs < top_p
    return torch.zeros_like(keep).scatter_(-1, ids, keep)


def sample(weights: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Draw one id per row, with probability proportional to its weight.

    Each id runs an exponential clock of rate `weight`, and the first to ring wins: argmax of weight / Exp(1).
    A weight of 0 never wins, weights need not add up to 1, and there is no cumulative sum, which on a GPU has
    no deterministic kernel and need not be monotone. In float64, because a GPU's float32 clocks come in steps
    of 6e-8, which distorts the tail of a vocabulary of 10^5 tokens.

    Shape: weights [..., v], non-negative, some of them positive in every row -> [...] int64.
    """
    clocks = torch.empty_like(weights, dtype=torch.float64).exponential_(generator=generator)
    return (weights / clocks.clamp_(min=torch.finfo(torch.float64).tiny)).argmax(-1)
