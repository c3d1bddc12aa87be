"""The keywords that both entry points share, validated once, in the caller's words."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.losses.backend import BACKENDS
from bebop_megatron.losses.prefix import HORIZONS, anchors
from bebop_megatron.losses.registry import OBJECTIVES, shares


@dataclass(frozen=True)
class Options:
    """What to compute; see `vocab_parallel_objective` for the meaning of each field.

    Raises:
        ValueError: an unknown name, a value out of range, or a combination that makes no sense.
    """

    kind: str
    horizon: str = "full"
    reduction: str = "mean"
    mix: tuple[str, float] | None = None
    draft_temperature: float = 1.0
    target_temperature: float = 1.0
    target_top_p: float = 1.0
    target_top_k: int = 0
    truncate_top_k: int = 0
    logit_scale: float = 1.0
    backend: str = "auto"

    def __post_init__(self) -> None:
        _choose("objective", self.kind, OBJECTIVES)
        _choose("horizon", self.horizon, HORIZONS)
        _choose("reduction", self.reduction, ("mean", "sum"))
        _choose("backend", self.backend, BACKENDS)
        if self.mix is not None:
            _choose("objective", self.mix[0], OBJECTIVES)
            if not 0 <= self.mix[1] <= 1:
                raise ValueError(f"mix gives the other objective a share between 0 and 1, got {self.mix[1]}")
        if "tv" in self.shares and self.horizon == "per-depth":
            raise ValueError(
                "the end-to-end objective 'tv' is a product over depths and has no per-depth horizon: "
                "use horizon 'full' or 'partial', or 'tv-step'"
            )
        for name in ("draft_temperature", "target_temperature", "logit_scale"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be positive and finite, got {getattr(self, name)}")
        if not 0 < self.target_top_p <= 1:
            raise ValueError(f"target_top_p must lie in (0, 1], got {self.target_top_p}")
        for name in ("target_top_k", "truncate_top_k"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} must be 0 (off) or positive, got {getattr(self, name)}")
        if self.truncate_top_k and self.needs_labels:
            raise ValueError("truncate_top_k keeps the target's likeliest tokens, and a label of 'ce' may not be one")
        if self.needs_reverse_kl and self.filters:
            raise ValueError(
                "objective 'reverse-kl' is infinite wherever target_top_k or target_top_p leaves a token out: "
                "use another objective with them"
            )

    @property
    def shares(self) -> dict[str, float]:
        """The objectives in play and the share of each."""
        return shares(self.kind, self.mix)

    @property
    def filters(self) -> bool:
        """Whether the target is filtered."""
        return bool(self.target_top_k) or self.target_top_p < 1

    @property
    def copies_target(self) -> bool:
        """Whether something is left out of the target's logits."""
        return self.filters or bool(self.truncate_top_k)

    @property
    def needs_target(self) -> bool:
        return any(OBJECTIVES[k].needs_target for k in self.shares)

    @property
    def needs_labels(self) -> bool:
        return any(OBJECTIVES[k].needs_labels for k in self.shares)

    @property
    def needs_reverse_kl(self) -> bool:
        return any(OBJECTIVES[k].needs_reverse_kl for k in self.shares)


def _choose(what: str, value: str, choices: Any) -> None:
    if value not in choices:
        raise ValueError(f"unknown {what} {value!r}: choose one of {', '.join(sorted(choices))}")


def check_valid(valid: Tensor | None, k: int, n: int, device: torch.device) -> Tensor:
    """The validity table, all True where none was given.

    Raises:
        ValueError: wrong shape or dtype.
    """
    if valid is None:
        return torch.ones(k, n, dtype=torch.bool, device=device)
    if valid.shape != (k, n) or valid.dtype != torch.bool:
        raise ValueError(f"valid must be bool [{k}, {n}], got {valid.dtype} {list(valid.shape)}")
    return valid


def check_labels(labels: Tensor | None, options: Options, k: int, n: int) -> Tensor | None:
    """The labels, if given.

    Raises:
        ValueError: missing although the objective needs them, wrong shape or dtype.
    """
    if labels is None:
        if options.needs_labels:
            raise ValueError("objective 'ce' needs labels [k, n]: the token that each depth predicts")
        return None
    if labels.shape != (k, n) or labels.dtype != torch.int64:
        raise ValueError(f"labels must be int64 [{k}, {n}], got {labels.dtype} {list(labels.shape)}")
    return labels


def depth_scale(row_scale: Tensor | None, options: Options, valid: Tensor) -> Tensor:
    """Factor [k] float64 on each depth's sum: the caller's, or what makes the sum a mean (0 where nothing counts).

    Raises:
        ValueError: `row_scale` of a wrong shape, or together with reduction 'mean'.
    """
    k = valid.shape[0]
    if row_scale is not None:
        if options.reduction == "mean":
            raise ValueError("row_scale replaces the mean: use reduction='sum' with it")
        if row_scale.shape != (k,):
            raise ValueError(f"row_scale must be [{k}], got {list(row_scale.shape)}")
        return row_scale.double()
    if options.reduction == "sum":
        return torch.ones(k, dtype=torch.float64, device=valid.device)
    counts = anchors(valid, options.horizon)
    return torch.where(counts > 0, 1.0 / counts.clamp(min=1).double(), 0.0)
