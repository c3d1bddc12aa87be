"""What a freeze schedule can and cannot go together with, said before anything is built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from bebop_megatron.config import FreezeConfig, ObjectiveConfig
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.arguments import config_from_args
from bebop_megatron.mcore.checkpoints import is_checkpoint, starting_dir

# options of Megatron under which a part cannot be left out of a step, or a module not out of a graph
_UNSUPPORTED = (
    ("optimizer_cpu_offload", "--optimizer-cpu-offload"),
    ("optimizer_cuda_graph", "--optimizer-cuda-graph"),
    ("use_megatron_fsdp", "--use-megatron-fsdp"),
    ("use_torch_fsdp2", "--use-torch-fsdp2"),
    ("overlap_param_gather_with_optimizer_step", "--overlap-param-gather-with-optimizer-step"),
    ("overlap_moe_expert_parallel_comm", "--overlap-moe-expert-parallel-comm"),
    ("reuse_grad_buf_for_mxfp8_param_ag", "--reuse-grad-buf-for-mxfp8-param-ag"),
    ("freeze_all_layers", "--freeze-all-layers"),
)


def _check_support(args: Any) -> None:
    if args.optimizer != "adam":
        raise ValueError(f"a freeze schedule and the --mtp-lr family need --optimizer adam, got {args.optimizer}")
    if getattr(args, "cuda_graph_impl", "none") != "none":
        raise ValueError(
            f"a freeze schedule changes what runs and cannot be combined with --cuda-graph-impl {args.cuda_graph_impl}"
        )
    for name, flag in _UNSUPPORTED:
        if getattr(args, name, False):
            raise ValueError(f"{flag} cannot be combined with a freeze schedule or the --mtp-lr family: drop one")


def check_freezing(options: FreezeConfig, objective: ObjectiveConfig, args: Any) -> None:
    """See that schedule, objective and Megatron's arguments go together.

    Raises:
        ValueError: with the option that is missing or has to go.
    """
    schedule = options.parsed_schedule
    asked = f"--mtp-freeze-schedule {options.schedule}" if options.schedule else "the --mtp-lr family"
    if not args.mtp_num_layers and not args.hybrid_layer_pattern:
        raise ValueError(f"{asked} needs MTP layers: add --mtp-num-layers")
    if objective.loss is None and (schedule.frozen_parts or schedule.objectives):
        raise ValueError(f"{asked} needs --mtp-loss: ce is the objective of Megatron's own MTP loss")
    for loss in sorted(schedule.objectives):
        replace(objective, loss=loss)
    backbone_trains = any("backbone" not in frozen for frozen in schedule.frozen_sets)
    if objective.joint and not backbone_trains:
        raise ValueError("--mtp-joint trains the backbone, which --mtp-freeze-schedule backbone freezes: drop one")
    if options.clip_grad is not None and (objective.joint or objective.loss is None or not args.clip_grad > 0):
        raise ValueError(
            "--mtp-clip-grad needs a detached MTP head (--mtp-loss without --mtp-joint) and --clip-grad above 0"
        )
    _check_support(args)


def schedule_change(options: FreezeConfig, args: Any) -> str | None:
    """What a run that resumes from `--load` with this schedule does differently; None if it goes on as before.

    Raises:
        ValueError: the checkpoint's optimizer state does not fit a run with this schedule.
    """
    if args.load is None or not is_checkpoint(args.load):
        return None
    common = compat.read_common_state(starting_dir(args.load, args.ckpt_step))
    if common.get("args") is None:
        return None
    before = config_from_args(FreezeConfig, common["args"])
    old = before.parsed_schedule
    if not (args.no_load_optim or args.finetune):
        _check_optimizer_state(before, options, args, common["args"])
    if before.schedule == options.schedule:
        return None
    iteration = int(common.get("iteration", 0))
    was, now = before.schedule or "none", options.schedule or "none"
    change = old.change_at(options.parsed_schedule, iteration)
    return f"the freeze schedule changes at iteration {iteration}, from {was} to {now}: {change}"


def _never_trained(options: FreezeConfig) -> frozenset[str]:
    schedule = options.parsed_schedule
    return schedule.frozen_parts if schedule.constant else frozenset()


def _check_optimizer_state(before: FreezeConfig, now: FreezeConfig, args: Any, saved_args: Any) -> None:
    lost = _never_trained(before) - _never_trained(now)
    if lost:
        raise ValueError(
            f"the checkpoint {args.load} comes from --mtp-freeze-schedule {before.schedule}, which never trained the "
            f"{min(lost)} and kept no optimizer state for it. Start from it with --pretrained-checkpoint instead of "
            "--load"
        )
    same_buckets = (before.by_parts, _never_trained(before)) == (now.by_parts, _never_trained(now))
    bound = args.use_distributed_optimizer and not getattr(saved_args, "dist_ckpt_optim_fully_reshardable", False)
    if bound and not same_buckets:
        raise ValueError(
            f"the distributed optimizer's state in {args.load} is laid out for "
            f"--mtp-freeze-schedule {before.schedule}, not for {now.schedule}. Save it with "
            "--dist-ckpt-optim-fully-reshardable, or start from it with --pretrained-checkpoint instead of --load"
        )
