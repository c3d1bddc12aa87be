"""What the metrics of a run take up from its checkpoints, and what they refuse, before anything is built."""

from __future__ import annotations

from typing import Any

from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import attached
from bebop_megatron.mcore.checkpoints import is_checkpoint, starting_dir
from bebop_megatron.mcore.keep_best import KeepBest, check_keep_best


def _say(message: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(f"bebop_megatron: {message}")


def _resumed_arguments(args: Any) -> Any:
    """The arguments saved with the checkpoint that this run goes on from; None if it starts anew."""
    if args.finetune or args.load is None or not is_checkpoint(args.load):
        return None
    return compat.saved_arguments(starting_dir(args.load, args.ckpt_step))


def start_metrics(config: Any, args: Any, attention: str | None) -> KeepBest | None:
    """Ready the metrics of a config on which `attach` has been called; -> what keeps the best checkpoint, if asked.

    Raises:
        ValueError: `--mtp-keep-best` could never keep anything, or not compare with what it kept.
    """
    attachment = attached(config)
    if attachment is None:
        if args.mtp_keep_best:
            check_keep_best(args, False, {})
        return None
    attachment.attention = attention
    conditions, metrics = attachment.conditions(), attachment.metrics
    if metrics.keep_best:
        check_keep_best(args, True, conditions)
    if metrics.measures:
        named = ", ".join(
            f"{name.replace('_', ' ')} {value}" for name, value in conditions.items() if value is not None
        )
        _say(f"acceptance is measured teacher-forced, with {named}")
        saved = _resumed_arguments(args)
        if saved is not None and not attachment.early.restore(saved, conditions):
            _say("the checkpoint's early phase was measured under other conditions: it starts anew")
        attachment.early.store(args, conditions)
    return KeepBest(args.save, conditions) if metrics.keep_best else None
