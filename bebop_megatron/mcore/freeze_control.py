"""Carries a freeze schedule through training: before each step, whatever the iteration's phase asks for is in force."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from bebop_megatron.config import FreezeConfig
from bebop_megatron.mcore.freeze_buckets import freeze_buckets
from bebop_megatron.mcore.freeze_optimizer import PartOptimizer
from bebop_megatron.mcore.freeze_state import freeze_state
from bebop_megatron.schedule.freezing import FrozenBuffers, freeze_router_biases
from bebop_megatron.schedule.phases import Phase


class FreezeController:
    """Applies the schedule on a model's config to its wrapped chunks and its optimizer.

    Raises:
        ValueError: the config has no schedule, or the optimizer no groups for its parts.
    """

    def __init__(self, chunks: list[Any], optimizer: Any, options: FreezeConfig) -> None:
        self.config = get_model_config(chunks[0])
        state = freeze_state(self.config)
        if state is None:
            raise ValueError("the model's config has no freeze schedule: call follow_schedule on it first")
        self.state = state
        self.chunks = chunks
        self.options = options
        self.parts = PartOptimizer(optimizer, options)
        self.on_phase: Callable[[Phase, int], None] = lambda phase, iteration: None
        self._entered: Phase | None = None

    def before_step(self, iteration: int, scheduler: Any = None) -> Phase:
        """Enter the phase of the step that follows `iteration` completed ones, if it is another one.

        Collectives: where parameters are gathered behind the optimizer step, the gathers that a newly frozen part is
        still owed; every rank switches at the same iteration.
        """
        phase = self.state.schedule.phase(iteration)
        if phase == self._entered:
            return phase
        self._entered = phase
        self.state.enter(phase, self.config)
        freeze_buckets(self.chunks, phase.frozen)
        freeze_router_biases(self.chunks, phase.frozen)
        self.parts.frozen = phase.frozen
        self.parts.after_step = FrozenBuffers(self.chunks, phase.frozen).restore
        # a run that resumes later in the phase finds moments that have been reset already
        if self.options.phase_reset_moments and iteration == phase.start and "mtp" not in phase.frozen:
            self.parts.reset_moments("mtp")
            if scheduler is not None:
                scheduler.step(0)
        self.on_phase(phase, iteration)
        return phase
