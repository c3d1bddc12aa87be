"""Puts our metrics into Megatron's log line, TensorBoard and Weights & Biases, as ratios of sums."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop_megatron.mcore.attachment import Attachment, in_use

# too many for a line, or named as Megatron's own, which the line does not have either
_NOT_IN_LINE = ("mtp entropy bin/", "mtp_")
# values of the running interval that Megatron leaves out of its line, because they are negative
_left_out: dict[str, float] = {}


def in_line(name: str) -> bool:
    """Whether a metric is printed; all of them are written."""
    return not name.startswith(_NOT_IN_LINE)


def summed_over_ranks(state: torch.Tensor) -> torch.Tensor:
    """A state of this rank, added up.

    Collectives: one all-reduce over the data x context parallel group. Tensor-parallel ranks hold the same rows.
    """
    total = state.to(torch.cuda.current_device(), torch.float64)
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    return total


def gather(attachment: Attachment, args: Any) -> dict[str, float]:
    """Metrics over the interval and all data-parallel ranks; starts the next interval.

    Collectives: one all-reduce over the data x context parallel group; in the run's early phase one broadcast more.
    """
    device = torch.cuda.current_device()
    loss = torch.zeros(2, dtype=torch.float64, device=device) if attachment.loss_sums is None else attachment.loss_sums
    total = summed_over_ranks(torch.cat([loss, attachment.meter.state().to(device, torch.float64)])).cpu()
    values = {}
    if total[1] > 0:
        values[f"mtp {attachment.objective.loss} loss"] = float(total[0] / total[1])
    if attachment.metrics.measures:
        values |= attachment.meter.compute(total[2:], per_depth=attachment.metrics.full)
        curves = attachment.meter.curves(total[2:])
        if attachment.early.over:
            values |= attachment.early.split(curves)
        else:
            attachment.early.add(curves)
            attachment.early.store(args, attachment.conditions())
    attachment.meter.reset()
    attachment.loss_sums = None
    return values


def write(values: Mapping[str, float], iteration: int, writer: Any, wandb_writer: Any) -> None:
    """Write scalars to TensorBoard and Weights & Biases, where there are such."""
    if writer:
        for name, value in values.items():
            writer.add_scalar(name, value, iteration)
    if wandb_writer:
        # one call: their server counts calls
        wandb_writer.log(dict(values), iteration)


def _megatron_arguments() -> Any:
    from megatron.training import get_args

    return get_args()


def make_track_mtp_metrics(original: Callable[..., None]) -> Callable[..., None]:
    """Wrap Megatron's MTP logging; without an objective of ours it is Megatron's alone."""

    def track_mtp_metrics(
        loss_scale: float,
        iteration: int,
        writer: Any,
        wandb_writer: Any = None,
        total_loss_dict: dict[str, Any] | None = None,
    ) -> None:
        if not in_use():
            original(loss_scale, iteration, writer, wandb_writer, total_loss_dict)
            return
        _left_out.clear()
        for attachment in in_use():
            run = attachment.run or _megatron_arguments()
            if iteration % run.log_interval != 0:
                continue
            values = gather(attachment, run)
            write(values, iteration, writer, wandb_writer)
            printed = {name: value for name, value in values.items() if in_line(name)}
            _left_out.update({name: value for name, value in printed.items() if value < 0})
            if total_loss_dict is None:
                continue
            # where nothing was counted in this interval the log line would show 0
            for stale in [name for name in total_loss_dict if name.startswith("mtp ") and name not in printed]:
                del total_loss_dict[stale]
            for name, value in printed.items():
                # the log line divides by the iterations of the interval; ours is a ratio over all of it
                steps = max(1, int(total_loss_dict.get("advanced iterations", 1)))
                total_loss_dict[name] = torch.tensor([value * steps], device=torch.cuda.current_device())

    track_mtp_metrics.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    return track_mtp_metrics


def with_negative_values(write_line: Callable[[str], None]) -> Callable[[str], None]:
    """Wrap the function that prints Megatron's log line, from which it leaves out whatever is negative."""

    @functools.wraps(write_line)
    def wrapper(message: str) -> None:
        if _left_out and re.match(r" \[.*?\] iteration +\d+/", message):
            message += "".join(f" {name}: {value:.6E} |" for name, value in _left_out.items())
            _left_out.clear()
        write_line(message)

    return wrapper
