"""What Megatron's own training loop tells the objective, and what it is told of the work that the objective does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bebop_megatron.config import ObjectiveConfig
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import in_use
from bebop_megatron.patching import Patcher

_patcher = Patcher()


def _with_iteration(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def train_step(*args: Any, iteration: int, **kwargs: Any) -> Any:
        for attachment in in_use():
            attachment.iteration = iteration
        return step(*args, iteration=iteration, **kwargs)

    return train_step


def extra_products(objective: ObjectiveConfig, depths: int) -> int:
    """LM-head products (tokens x h x v) beyond the three of each depth's loss that Megatron counts.

    The target is projected once more; a detached head has no gradient of the LM head's weight, a joint one projects its
    drafts twice. While a loss warms up, the gradient of the other loss is projected too; that is not counted.
    """
    return 1 + (depths if objective.joint else -depths)


def _with_head_work(objective: ObjectiveConfig, count: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(count)
    def num_floating_point_operations(args: Any, batch_size: int, **lengths: Any) -> Any:
        real = lengths.get("total_real_tokens_in_batch")
        tokens = batch_size * args.seq_length if real is None else real
        product = 2 * tokens * args.hidden_size * args.padded_vocab_size
        return count(args, batch_size, **lengths) + product * extra_products(objective, args.mtp_num_layers)

    return num_floating_point_operations


def install_training_loop(objective: ObjectiveConfig) -> None:
    """Rebind Megatron's step and its count of floating-point operations. Calling it again does nothing.

    Raises:
        RuntimeError: this Megatron lacks a name that we rely on; nothing has been changed then.
    """
    if _patcher.active or objective.loss is None:
        return
    compat.require(compat.LOOP_SEAMS)
    step, flops = compat.LOOP_SEAMS
    _patcher.set(step.owner(), step.name, _with_iteration(getattr(step.owner(), step.name)))
    _patcher.set(flops.owner(), flops.name, _with_head_work(objective, getattr(flops.owner(), flops.name)))


def uninstall_training_loop() -> None:
    """Give Megatron its own names back."""
    _patcher.restore()
