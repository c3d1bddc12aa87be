"""The objective and its acceptance over a whole validation pass, as sums."""

from __future__ import annotations

import torch
from torch import Tensor

from bebop_megatron.config import ObjectiveConfig
from bebop_megatron.losses.prefix import anchors, counted
from bebop_megatron.losses.registry import loss_by_depth
from bebop_megatron.losses.statistics import RowStats
from bebop_megatron.metrics import AcceptanceMeter


class ValidationSums:
    """What a validation pass has seen on this rank; states of ranks and passes add up."""

    def __init__(self, num_depths: int) -> None:
        self.num_depths = num_depths
        self.meter = AcceptanceMeter(num_depths)
        self._loss: Tensor | None = None

    def update(self, objective: ObjectiveConfig, stats: RowStats, valid: Tensor) -> None:
        """Add one micro-batch; nothing waits for the device.

        Shape: statistics [k, n], valid [k, n] bool.
        """
        assert objective.loss is not None
        horizon = objective.resolved_horizon
        losses = loss_by_depth(objective.loss, stats, counted(valid, horizon))
        new = torch.stack([losses, anchors(valid, horizon).double()], dim=1)
        self._loss = new if self._loss is None else self._loss + new
        self.meter.update(stats, valid)

    def state(self) -> Tensor:
        """Everything counted so far: [2 k + the meter's] float64."""
        loss = torch.zeros(self.num_depths, 2, dtype=torch.float64) if self._loss is None else self._loss
        return torch.cat([loss.flatten(), self.meter.state().to(loss.device)])

    def compute(self, state: Tensor, name: str, per_depth: bool = False) -> dict[str, float]:
        """Ratios of a state: the objective as `mtp <name> loss`, then what the meter says."""
        whole = state.cpu()
        sums, counts = whole[: 2 * self.num_depths].view(-1, 2).unbind(1)
        out = {}
        if bool((counts > 0).any()):
            # a depth without anchors contributes nothing, as in training
            out[f"mtp {name} loss"] = float((sums / counts.clamp(min=1)).mean())
        return out | self.meter.compute(whole[2 * self.num_depths :], per_depth)
