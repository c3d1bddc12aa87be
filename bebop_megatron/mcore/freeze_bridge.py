"""Freeze schedules in Megatron Bridge's training loop: the same optimizer by parts, driven by a callback."""

from __future__ import annotations

from typing import Any

from bebop_megatron.config import FreezeConfig
from bebop_megatron.mcore.freeze_install import FreezeLoop, install_freezing, prepare_chunks, rebind
from bebop_megatron.mcore.freeze_state import follow_schedule
from bebop_megatron.schedule.phases import FreezeSchedule, Phase


def freeze_callback(model: Any, options: FreezeConfig) -> Any:
    """A callback for Bridge's `pretrain` or `finetune` that follows `options.schedule` on a model provider.

    Call `bebop_megatron.mcore.install()` and `attach(model, objective)` first. The phase comes from the step that
    Bridge has restored, so a resumed run continues exactly.

    Raises:
        RuntimeError: Megatron Bridge is not installed.
        ValueError: the schedule does not parse.
    """
    try:
        from megatron.bridge.training import optim
        from megatron.bridge.training.callbacks import Callback
    except ImportError as error:
        raise RuntimeError("Megatron Bridge is not installed: pip install 'bebop-megatron[bridge]'") from error

    state = follow_schedule(model, FreezeSchedule.parse(options.schedule or "none"))
    model.register_pre_wrap_hook(lambda chunks: prepare_chunks(chunks, state))
    install_freezing(options)
    loop = FreezeLoop(options)
    rebind(optim, "get_megatron_optimizer", loop.optimizer)
    rebind(optim, "_get_scheduler", loop.lr_scheduler)

    class FreezeCallback(Callback):
        """Enters the phase of each step before it runs."""

        def on_train_step_start(self, context: Any) -> None:
            """Switch parts on and off at the step's boundary, and mark it for the loggers."""
            assert loop.controller is not None

            def mark(phase: Phase, iteration: int) -> None:
                if context.state.tensorboard_logger:
                    text = phase.describe(iteration)
                    context.state.tensorboard_logger.add_text("mtp/freeze phase", text, iteration + 1)

            loop.controller.on_phase = mark
            loop.controller.before_step(context.state.train_state.step, context.scheduler)

    return FreezeCallback()
