"""What a training run would have left in a checkpoint beside tensors: its arguments, made from a command line."""

from __future__ import annotations

import sys
from typing import Any


def arguments_from(command_line: list[str], vocab_size: int) -> Any:
    """Megatron's arguments for these flags, defaults and all, as they stand in a checkpoint.

    Raises:
        ValueError: Megatron does not know a flag.
    """
    from megatron.training.arguments import parse_args

    argv, sys.argv = sys.argv, ["convert", *command_line]
    try:
        args = parse_args()
    except SystemExit as error:
        raise ValueError(f"this Megatron does not take these arguments: {' '.join(command_line)}") from error
    finally:
        sys.argv = argv
    if args.hybrid_layer_pattern:
        from megatron.core.models.hybrid.hybrid_layer_allocation import get_hybrid_total_layer_count

        args.num_layers = get_hybrid_total_layer_count(args.hybrid_layer_pattern)
    # no padding: every layout reads the true rows and fills its own padding
    args.vocab_size = args.padded_vocab_size = vocab_size
    args.iteration = 0
    return args


def common_state(args: Any) -> dict[str, Any]:
    """The common state of a checkpoint that starts at iteration 0."""
    return {
        "args": args,
        "checkpoint_version": 3.0,
        "iteration": 0,
        "num_floating_point_operations_so_far": 0,
        "content_metadata": {"singleton_local_shards": False, "chained_optim_avoid_prefix": True},
    }
