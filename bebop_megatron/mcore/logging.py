"""Puts our metrics into Megatron's log line, TensorBoard and Weights & Biases, as ratios of sums."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

from bebop_megatron.mcore.attachment import Attachment, in_use


def _gather(attachment: Attachment) -> dict[str, float]:
    """Metrics over the interval and all data-parallel ranks; starts the next interval.

    Collectives: one all-reduce over the data x context parallel group.
    """
    device = torch.cuda.current_device()
    state = attachment.meter.state().to(device, torch.float64)
    loss = torch.zeros(2, dtype=torch.float64, device=device) if attachment.loss_sums is None else attachment.loss_sums
    total = torch.cat([loss, state])
    dist.all_reduce(total, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
    values = {}
    if total[1] > 0:
        values[f"mtp {attachment.objective.loss} loss"] = float(total[0] / total[1])
    values |= attachment.meter.compute(total[2:])
    attachment.meter.reset()
    attachment.loss_sums = None
    return values


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
        from megatron.training import get_args

        if iteration % get_args().log_interval != 0:
            return
        for attachment in in_use():
            values = _gather(attachment)
            if total_loss_dict is not None:
                # where nothing was counted in this interval the log line would show 0
                for stale in [name for name in total_loss_dict if name.startswith("mtp ") and name not in values]:
                    del total_loss_dict[stale]
            for name, value in values.items():
                if total_loss_dict is not None:
                    # the log line divides by the iterations of the interval; ours is a ratio over all of it
                    steps = max(1, int(total_loss_dict.get("advanced iterations", 1)))
                    total_loss_dict[name] = torch.tensor([value * steps], device=torch.cuda.current_device())
                if writer is not None:
                    writer.add_scalar(name, value, iteration)
                if wandb_writer is not None:
                    wandb_writer.log({name: value}, iteration)

    track_mtp_metrics.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    return track_mtp_metrics
