"""Ties our objective to a Megatron config, the one object that every seam of the model can see."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.alignment import LAYOUTS
from bebop_megatron.config import MetricsConfig, ObjectiveConfig
from bebop_megatron.mcore.early_phase import EarlyPhase
from bebop_megatron.mcore.refusals import check_config
from bebop_megatron.mcore.validation_sums import ValidationSums
from bebop_megatron.metrics import AcceptanceMeter
from bebop_megatron.reduction import StepCounts

_ATTRIBUTE = "bebop_objective"
_LAYOUT = "bebop_cp_layout"
# Megatron's logging names neither model nor config, so those in use are remembered here
_in_use: weakref.WeakSet[Attachment] = weakref.WeakSet()


@dataclass(eq=False)
class Attachment:
    """An objective in use: its settings, the true vocabulary, the counts of the running step, its metrics.

    `iteration`: completed steps, where a training loop tells. `loss_sums` [2] float64: the objective summed over what
    has been seen since the last log, and the steps in it. `validation`: sums of the validation pass that is running.
    """

    objective: ObjectiveConfig
    vocab_size: int | None
    meter: AcceptanceMeter
    counts: StepCounts | None = None
    loss_sums: Tensor | None = None
    iteration: int | None = None
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    validation: ValidationSums | None = None
    # --mtp-attention, where it was said
    attention: str | None = None
    # what says how often to log, in training loops without Megatron's arguments
    run: Any = None

    def __post_init__(self) -> None:
        self.early = EarlyPhase(self.metrics.entropy_baseline)
        # a freeze schedule may name another loss for a phase, and then comes back to this one
        self.default_loss = self.objective.loss

    def current_iteration(self) -> int:
        """Completed steps; 0 where nothing depends on them.

        Raises:
            RuntimeError: the loss warms up, and the training loop does not say how far it is.
        """
        if self.iteration is None and self.objective.warmup is not None:
            raise RuntimeError(
                "--mtp-loss-warmup needs to know the iteration: call bebop_megatron.mcore.set_iteration(config, "
                "completed_steps) before each training step of your own loop"
            )
        return self.iteration or 0

    def conditions(self) -> dict[str, Any]:
        """What acceptance depends on besides the weights: numbers under other conditions are not comparable."""
        keywords = self.objective.final_keywords()
        names = ("draft_temperature", "target_temperature", "target_top_p", "target_top_k", "truncate_top_k")
        return {
            "depths": self.meter.num_depths,
            # Megatron's own way by another word
            "attention": self.attention or "per-depth",
            **{name: keywords[name] for name in names},
        }

    def add_loss(self, loss: Tensor, share: float) -> None:
        """Add one micro-batch: its part of a step's mean loss, and the share of the step that it is."""
        new = torch.stack([loss.detach().double(), torch.full_like(loss, share, dtype=torch.float64)])
        self.loss_sums = new if self.loss_sums is None else self.loss_sums + new


def attach(
    config: Any,
    objective: ObjectiveConfig,
    vocab_size: int | None = None,
    cp_layout: str = "zigzag",
    metrics: MetricsConfig | None = None,
) -> None:
    """Make `config`'s model train its MTP head on `objective` once `install()` has run.

    `vocab_size` is the true size: columns of the LM head beyond it are padding. Heads are detached from the backbone
    unless the objective is joint. An objective without a loss leaves Megatron's own. `cp_layout` says how your batches
    are cut over context-parallel ranks: `zigzag` as Megatron's are, or `contiguous`. Call it before the model is built:
    Megatron then gives the MTP weights their own norm for gradient clipping.

    Raises:
        ValueError: an unknown layout, a config that has no MTP layers or cannot train them (see `refusals.py`), or that
            trains the LM head jointly through fused gradient accumulation.
    """
    if objective.loss is None:
        return
    if not config.mtp_num_layers:
        raise ValueError(
            f"--mtp-loss {objective.loss} needs MTP layers, and the model has none: add --mtp-num-layers "
            "(and --mtp-use-repeated-layer for one head applied at every depth)"
        )
    if objective.joint and config.gradient_accumulation_fusion:
        # the fused kernel marks the weight as done, and the objective's own gradient would be dropped
        raise ValueError("--mtp-joint needs --no-gradient-accumulation-fusion: the LM head gets two gradients")
    if getattr(config, "hybrid_context_parallel", False):
        raise ValueError(
            "--hybrid-context-parallel changes the context-parallel group from batch to batch, which --mtp-loss does "
            "not support: use --context-parallel-size alone"
        )
    if cp_layout not in LAYOUTS:
        raise ValueError(f"unknown context-parallel layout {cp_layout!r}: choose one of {', '.join(LAYOUTS)}")
    check_config(config)
    config.mtp_detach_heads = not objective.joint
    setattr(config, _LAYOUT, cp_layout)
    meter = AcceptanceMeter(config.mtp_num_layers)
    attachment = Attachment(objective, vocab_size, meter, metrics=metrics or MetricsConfig())
    setattr(config, _ATTRIBUTE, attachment)
    _in_use.add(attachment)


def layout_of(config: Any) -> str:
    """How the batches of a model are cut over context-parallel ranks; Megatron cuts in zigzag."""
    return getattr(config, _LAYOUT, "zigzag")


def set_iteration(config: Any, completed: int) -> None:
    """Tell the objective of `config` how many steps are completed; Megatron's own loop does so by itself."""
    attachment = attached(config)
    if attachment is not None:
        attachment.iteration = completed


def attached(config: Any) -> Attachment | None:
    """What `attach` left on this config, if anything."""
    return getattr(config, _ATTRIBUTE, None)


def in_use() -> list[Attachment]:
    """Every attachment whose config is alive."""
    return list(_in_use)
