"""What Megatron's own training loop tells the objective, and what it is told of the work that the objective does."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from bebop_megatron.config import MetricsConfig, ObjectiveConfig
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import in_use
from bebop_megatron.mcore.keep_best import KeepBest
from bebop_megatron.mcore.logging import with_negative_values
from bebop_megatron.mcore.validation import ValidationLoop
from bebop_megatron.patching import Patcher

_patcher = Patcher()


def _with_iteration(step: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(step)
    def train_step(*args: Any, iteration: int, **kwargs: Any) -> Any:
        for attachment in in_use():
            attachment.iteration = iteration
        return step(*args, iteration=iteration, **kwargs)

    return train_step


def extra_products(objective: ObjectiveConfig, depths: int, metrics: MetricsConfig | None = None) -> int:
    """LM-head products (tokens x h x v) beyond the three of each depth's loss that Megatron counts.

    The target is projected once more, for `ce` only to measure; a detached head has no gradient of the LM head's
    weight, a joint one projects its drafts twice. While a loss warms up, the gradient of the other loss is projected
    too; that is not counted.
    """
    target = objective.needs_target(0) or (metrics or MetricsConfig()).measures
    return int(target) + (depths if objective.joint else -depths)


def _with_head_work(
    objective: ObjectiveConfig, metrics: MetricsConfig, count: Callable[..., Any]
) -> Callable[..., Any]:
    @functools.wraps(count)
    def num_floating_point_operations(args: Any, batch_size: int, **lengths: Any) -> Any:
        real = lengths.get("total_real_tokens_in_batch")
        tokens = batch_size * args.seq_length if real is None else real
        product = 2 * tokens * args.hidden_size * args.padded_vocab_size
        return count(args, batch_size, **lengths) + product * extra_products(objective, args.mtp_num_layers, metrics)

    return num_floating_point_operations


def install_training_loop(
    objective: ObjectiveConfig, metrics: MetricsConfig | None = None, keep_best: KeepBest | None = None
) -> None:
    """Rebind Megatron's step, its count of floating-point operations, its evaluation and its log line.

    With `keep_best` also what follows each step. Calling it again does nothing.

    Raises:
        RuntimeError: this Megatron lacks a name that we rely on; nothing has been changed then.
    """
    if _patcher.active or objective.loss is None:
        return
    measured = metrics or MetricsConfig()
    compat.require((*compat.LOOP_SEAMS, *compat.VALIDATION_SEAMS, *compat.BEST_SEAMS))
    step, flops = compat.LOOP_SEAMS
    evaluate, evaluate_and_print, print_line = compat.VALIDATION_SEAMS
    checkpoint_due, save = compat.BEST_SEAMS
    loop = ValidationLoop(keep_best)
    step.rebind(_patcher, _with_iteration)
    flops.rebind(_patcher, lambda count: _with_head_work(objective, measured, count))
    evaluate.rebind(_patcher, loop.evaluate)
    evaluate_and_print.rebind(_patcher, loop.evaluate_and_print)
    print_line.rebind(_patcher, with_negative_values)
    print_line.rebind(_patcher, loop.print_line)
    if keep_best is not None:
        saver = getattr(save.owner(), save.name)
        checkpoint_due.rebind(_patcher, lambda due: keep_best.checkpoint_due(due, saver))


def uninstall_training_loop() -> None:
    """Give Megatron its own names back."""
    _patcher.restore()
