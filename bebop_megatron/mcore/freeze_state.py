"""What is frozen at the moment: on the Megatron config, which model, loss, reduction and optimizer can all see."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from bebop_megatron.mcore.attachment import attached
from bebop_megatron.schedule.phases import FreezeSchedule, Phase

_ATTRIBUTE = "bebop_freeze"


@dataclass(eq=False)
class FreezeState:
    """A schedule in use and the phase it is in.

    While the backbone is frozen, two results of the running micro-batch wait here for the model's output: `pending`,
    the MTP loss, which is tied to the backward pass there, and `lm_loss` [b, s], the language-model loss.
    """

    schedule: FreezeSchedule
    phase: Phase
    pending: Tensor | None = None
    lm_loss: Tensor | None = None

    @property
    def frozen(self) -> frozenset[str]:
        """The parts that do not train in this phase."""
        return self.phase.frozen

    def enter(self, phase: Phase, config: Any) -> None:
        """Make `phase` the one in force, with its objective if it names one."""
        self.phase = phase
        attachment = attached(config)
        if attachment is not None:
            loss = phase.objective or attachment.default_loss
            if loss != attachment.objective.loss:
                attachment.objective = replace(attachment.objective, loss=loss)
                # sums of another objective must not reach the next log line
                attachment.loss_sums = None


def follow_schedule(config: Any, schedule: FreezeSchedule) -> FreezeState:
    """Put a schedule on a model config; the phase is that of the first iteration until a training loop says more."""
    state = FreezeState(schedule, schedule.phase(0))
    setattr(config, _ATTRIBUTE, state)
    return state


def freeze_state(config: Any) -> FreezeState | None:
    """What `follow_schedule` left on this config, if anything."""
    return getattr(config, _ATTRIBUTE, None)


def is_frozen(config: Any, part: str) -> bool:
    """Whether a part of this config's model is frozen in the phase in force."""
    state = freeze_state(config)
    return state is not None and part in state.frozen
