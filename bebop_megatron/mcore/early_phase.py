"""The first log intervals of a run: the line of acceptance over entropy that later changes are split by."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from bebop_megatron.entropy import EntropyCurve, split_change
from bebop_megatron.metrics import CURVES

# where Megatron's arguments, and with them its checkpoints, carry the sums
_ATTRIBUTE = "bebop_early_phase"


class EarlyPhase:
    """Sums over the first `intervals` log intervals in which something was measured.

    The slope b is fitted on the tokens of these intervals, and the reference (H_0, A_0) is their mean. A later
    interval at (H, A) then differs by b (H - H_0), which entropy explains, and by a remainder, the mismatch of draft
    and target.
    """

    def __init__(self, intervals: int) -> None:
        self.intervals = intervals
        self.seen = 0
        self.state = torch.zeros(len(CURVES) * EntropyCurve().size, dtype=torch.float64)

    @property
    def over(self) -> bool:
        """Whether the phase is complete."""
        return self.seen >= self.intervals

    def add(self, curves: dict[str, EntropyCurve]) -> None:
        """Add an interval, already summed over data-parallel ranks; afterwards every rank of the job knows the sums.

        Collectives: one broadcast from the last rank, which computes the loss, to the whole world: checkpoints are
        written with the arguments of rank 0, which may hold no MTP layers.
        """
        own = torch.cat([curves[rule].state().cpu() for rule in CURVES])
        counted = bool((own != 0).any())
        known = torch.cat([torch.tensor([self.seen + counted], dtype=torch.float64), self.state + own])
        shared = known.to(torch.cuda.current_device())
        if dist.is_initialized():
            dist.broadcast(shared, dist.get_world_size() - 1, group=dist.group.WORLD)
        shared = shared.cpu()
        self.seen, self.state = int(shared[0]), shared[1:]

    def split(self, curves: dict[str, EntropyCurve]) -> dict[str, float]:
        """`mtp entropy part/<rule>` and `mtp mismatch part/<rule>` of the change since the phase; {} before its end."""
        out: dict[str, float] = {}
        if not self.over:
            return out
        for rule, part in zip(CURVES, self.state.chunk(len(CURVES)), strict=True):
            early = EntropyCurve.from_state(part)
            line, before, now = early.fit(), early.mean(), curves[rule].mean()
            if line is not None and before is not None and now is not None:
                change = split_change(line.slope, before, now)
                out[f"mtp entropy part/{rule}"] = change.entropy_part
                out[f"mtp mismatch part/{rule}"] = change.mismatch_part
        return out

    def store(self, args: Any, conditions: dict[str, Any]) -> None:
        """Put the sums on Megatron's arguments, so that the next checkpoint holds them."""
        setattr(args, _ATTRIBUTE, {"seen": self.seen, "state": self.state.tolist(), "conditions": conditions})

    def restore(self, saved_args: Any, conditions: dict[str, Any]) -> bool:
        """Take up the sums of a checkpoint's arguments; False if they were measured under other conditions."""
        saved = getattr(saved_args, _ATTRIBUTE, None)
        if saved is None:
            return True
        state = torch.tensor(saved["state"], dtype=torch.float64)
        if saved["conditions"] != conditions or state.shape != self.state.shape:
            return False
        self.seen, self.state = saved["seen"], state
        return True
