"""Megatron Bridge's training loop: the optimizer by parts, the freeze schedule and the metrics of Megatron's own loop.

Bridge calls Megatron's schedules, optimizers and MTP logging, so all of that is the same code. What its loop has for
itself are callbacks, an optimizer builder, and a log line.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from megatron.bridge.training.callbacks import Callback

from bebop_megatron.config import FreezeConfig, ObjectiveConfig
from bebop_megatron.data import MaskedGPTDataset
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import Attachment, attached, set_iteration
from bebop_megatron.mcore.freeze_checks import check_freezing
from bebop_megatron.mcore.freeze_install import FreezeLoop, install_freezing, mark_in, prepare_chunks
from bebop_megatron.mcore.freeze_state import follow_schedule
from bebop_megatron.mcore.logging import in_line, summed_over_ranks, with_negative_values, write
from bebop_megatron.mcore.validation_sums import ValidationSums
from bebop_megatron.patching import Patcher
from bebop_megatron.schedule.phases import Phase

_patcher = Patcher()


def _before_wrapping(model: Any, hook: Callable[[list[Any]], list[Any]]) -> None:
    """Have a hook run on the unwrapped chunks of a provider or a model config."""
    if hasattr(model, "pre_wrap_hooks"):
        model.pre_wrap_hooks.append(hook)
    else:
        model.register_pre_wrap_hook(hook)


class MTPCallback(Callback):
    """Tells the objective how far training is, and measures the head while Bridge evaluates.

    The iteration is the step that Bridge has restored, so a resumed run continues exactly.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    def _attachment(self) -> Attachment:
        attachment = attached(self.config)
        assert attachment is not None
        return attachment

    def on_train_step_start(self, context: Any) -> None:
        """Note the number of completed steps: warm-ups of the loss depend on it."""
        set_iteration(self.config, context.state.train_state.step)

    def on_eval_start(self, context: Any) -> None:
        """Begin to measure a pass over validation data."""
        attachment = self._attachment()
        if attachment.metrics.measures:
            attachment.validation = ValidationSums(self.config.mtp_num_layers)

    def on_eval_end(self, context: Any) -> None:
        """Log what the pass has measured.

        Collectives: one all-reduce over the data x context parallel group.
        """
        self._end(context, "validation")

    on_test_start = on_eval_start

    def on_test_end(self, context: Any) -> None:
        """As `on_eval_end`, on test data."""
        self._end(context, "test")

    def _end(self, context: Any, name: str) -> None:
        from megatron.bridge.utils.common_utils import print_rank_last

        attachment = self._attachment()
        sums, attachment.validation = attachment.validation, None
        if sums is None:
            return
        assert attachment.default_loss is not None
        loss = attachment.objective.loss or attachment.default_loss
        values = sums.compute(summed_over_ranks(sums.state()), loss, per_depth=attachment.metrics.full)
        state, step = context.state, context.state.train_state.step
        named = {f"{key} {name}": value for key, value in values.items()}
        write(named, step, state.tensorboard_logger, state.wandb_logger)
        line = "".join(f" {key} value: {value:.6E} |" for key, value in values.items() if in_line(key))
        print_rank_last(f" mtp {name} at iteration {step} |{line}")


class FreezeCallback(Callback):
    """Enters the phase of each step before it runs."""

    def __init__(self, loop: FreezeLoop) -> None:
        self.loop = loop

    def on_train_step_start(self, context: Any) -> None:
        """Switch parts on and off at the step's boundary, and mark it for the loggers."""
        from megatron.bridge.utils.common_utils import print_rank_0

        assert self.loop.controller is not None

        def mark(phase: Phase, iteration: int) -> None:
            print_rank_0(f"bebop_megatron: from iteration {iteration + 1}: {phase.describe(iteration)}")
            mark_in(phase, iteration, context.state.tensorboard_logger, context.state.wandb_logger)

        self.loop.controller.on_phase = mark
        self.loop.controller.before_step(context.state.train_state.step, context.scheduler)


def _as_arguments(container: Any, config: Any) -> SimpleNamespace:
    """A ConfigContainer under the names of Megatron's arguments, as far as freezing asks for them."""
    optimizer, ddp, dist = container.optimizer, container.ddp, container.dist
    return SimpleNamespace(
        **vars(config)
        | vars(optimizer)
        | {
            "hybrid_layer_pattern": getattr(container.model, "hybrid_layer_pattern", None),
            "use_megatron_fsdp": dist.use_megatron_fsdp or ddp.use_megatron_fsdp,
            "use_torch_fsdp2": dist.use_torch_fsdp2,
        }
    )


def follow_training(container: Any, config: Any, options: FreezeConfig, objective: ObjectiveConfig) -> list[Callback]:
    """Put a ConfigContainer's training under our schedule and metrics; `config` is its model's transformer config.

    Bridge trains one model in a process, so calling it again forgets the model before. -> callbacks for Bridge's loop.

    Raises:
        RuntimeError: this Bridge lacks a name that we rely on.
        ValueError: the schedule does not go together with the objective or with the container's settings.
    """
    compat.require(compat.BRIDGE_SEAMS)
    schedule = options.parsed_schedule
    if options.by_parts:
        check_freezing(options, objective, _as_arguments(container, config))
    release()
    optimizer, scheduler, line, dataset = compat.BRIDGE_SEAMS
    callbacks: list[Callback] = []
    # the same dataset, which also reads a mask of targets beside the data
    dataset.rebind(_patcher, lambda _: MaskedGPTDataset)
    attachment = attached(config)
    if attachment is not None:
        attachment.run = container.logger
        line.rebind(_patcher, with_negative_values)

        def true_vocabulary(chunks: list[Any]) -> list[Any]:
            # known once Bridge has read the tokenizer
            attachment.vocab_size = container.model.vocab_size
            return chunks

        _before_wrapping(container.model, true_vocabulary)
        callbacks.append(MTPCallback(config))
    if options.by_parts:
        state = follow_schedule(config, schedule)
        _before_wrapping(container.model, lambda chunks: prepare_chunks(chunks, state))
        install_freezing(options)
        loop = FreezeLoop(options)
        optimizer.rebind(_patcher, loop.optimizer)
        scheduler.rebind(_patcher, loop.lr_scheduler)
        line.rebind(_patcher, loop.log)
        callbacks.append(FreezeCallback(loop))
    return callbacks


def release() -> None:
    """Give Bridge its own names back."""
    _patcher.restore()
