"""Puts freeze schedules behind Megatron's own names: bucket layout, pipeline schedule, optimizer, training loop."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_model_config

from bebop_megatron.config import FreezeConfig
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.freeze_buckets import with_one_part_per_bucket, with_one_part_per_group
from bebop_megatron.mcore.freeze_control import FreezeController
from bebop_megatron.mcore.freeze_forward import guard_models, with_gradient_for_every_input
from bebop_megatron.mcore.freeze_optimizer import PART, part_overrides, with_own_learning_rate
from bebop_megatron.mcore.freeze_pipeline import FreezeCommunicator
from bebop_megatron.mcore.freeze_state import FreezeState, freeze_state, is_frozen
from bebop_megatron.patching import Patcher
from bebop_megatron.schedule.freezing import freeze, tag_parts
from bebop_megatron.schedule.phases import Phase

_patcher = Patcher()


def prepare_chunks(chunks: list[Any], state: FreezeState) -> list[Any]:
    """Ready unwrapped model chunks for a schedule, before Megatron wraps them.

    What is frozen for the whole run is taken out of training here, and then has neither gradients nor optimizer state.
    """
    if state.schedule.constant:
        for part in sorted(state.frozen):
            freeze(chunks, part)
    tag_parts(chunks)
    guard_models(chunks, state)
    return chunks


def _own_clip(clip: Callable[..., None], limit: float) -> Callable[..., None]:
    @functools.wraps(clip)
    def wrapper(parameters: Any, max_norm: float, *args: Any, **kwargs: Any) -> None:
        detached_head = bool(parameters) and getattr(parameters[0], "grad_norm_group", None) == "mtp"
        clip(parameters, limit if detached_head else max_norm, *args, **kwargs)

    return wrapper


def _unless_frozen(reduce: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(reduce)
    def wrapper(model: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        if not is_frozen(config, "backbone"):
            reduce(model, config, *args, **kwargs)

    return wrapper


def install_freezing(options: FreezeConfig) -> None:
    """Rebind what any training loop over Megatron's core needs. Calling it again does nothing.

    Models whose config carries no schedule behave exactly as before.

    Raises:
        RuntimeError: this Megatron lacks a name that we rely on; nothing has been changed then.
    """
    if _patcher.active:
        return
    compat.check(compat.FREEZE_SEAMS)
    seams = {seam.name: seam for seam in compat.FREEZE_SEAMS}
    seams["_compute_default_per_buffer_param_layout"].rebind(_patcher, with_one_part_per_bucket)
    seams["_compute_per_buffer_param_layout"].rebind(_patcher, with_one_part_per_bucket, static=True)
    seams["partition_buckets"].rebind(_patcher, with_one_part_per_group)
    seams["P2PCommunicator"].rebind(_patcher, lambda _: FreezeCommunicator)
    seams["backward_step"].rebind(_patcher, with_gradient_for_every_input)
    seams["_allreduce_word_embedding_grads"].rebind(_patcher, _unless_frozen)
    for seam in compat.GROUP_KEY_SEAMS:
        seam.rebind(_patcher, lambda keys: (*keys, PART))
    if options.clip_grad is not None:
        limit = options.clip_grad
        seams["clip_grad_by_total_norm_fp32"].rebind(_patcher, lambda clip: _own_clip(clip, limit))


class FreezeLoop:
    """Wrappers for a training loop's own functions, around one model, one optimizer, one scheduler."""

    def __init__(self, options: FreezeConfig) -> None:
        self.options = options
        self.controller: FreezeController | None = None
        self.scheduler: Any = None

    def optimizer(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def wrapper(config: Any, model_chunks: Any, config_overrides: Any = None, **kwargs: Any) -> Any:
            model_chunks = model_chunks if isinstance(model_chunks, list) else [model_chunks]
            if freeze_state(get_model_config(model_chunks[0])) is None:
                return build(config, model_chunks, config_overrides=config_overrides, **kwargs)
            overrides = part_overrides(config, config_overrides, self.options)
            optimizer = build(config, model_chunks, config_overrides=overrides, **kwargs)
            self.controller = FreezeController(model_chunks, optimizer, self.options)
            self.controller.on_phase = _mark
            return optimizer

        return wrapper

    def lr_scheduler(self, build: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(build)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            self.scheduler = build(*args, **kwargs)
            with_own_learning_rate(self.scheduler, self.options)
            return self.scheduler

        return wrapper

    def train_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(step)
        def wrapper(*args: Any, iteration: int, **kwargs: Any) -> Any:
            if self.controller is not None:
                self.controller.before_step(iteration, self.scheduler)
            return step(*args, iteration=iteration, **kwargs)

        return wrapper

    def log(self, write: Callable[[str], None]) -> Callable[[str], None]:
        @functools.wraps(write)
        def wrapper(message: str) -> None:
            line = re.match(r" \[.*?\] iteration +(\d+)/", message)
            if line and self.controller is not None:
                message += f" freeze phase: {self.controller.state.phase.describe(int(line[1]) - 1)} |"
                groups = self.controller.parts.optimizer.param_groups
                rates = [group["lr"] for group in groups if group[PART] == "mtp"]
                if rates:
                    message += f" mtp learning rate: {float(rates[0]):.6E} |"
                norm = getattr(self.controller.parts.optimizer, "grad_norms_by_group", {}).get("mtp")
                if norm is not None and "mtp" not in self.controller.state.frozen:
                    # Megatron prints the norm of the rest, which is 0 while the backbone is frozen
                    message += f" mtp grad norm: {float(norm):.3f} |"
            write(message)

        return wrapper


def _mark(phase: Phase, iteration: int) -> None:
    """Say that a phase begins: on the screen, in TensorBoard, in Weights & Biases."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer, print_rank_0

    print_rank_0(f"bebop_megatron: from iteration {iteration + 1}: {phase.describe(iteration)}")
    mark_in(phase, iteration, get_tensorboard_writer(), get_wandb_writer())


def mark_in(phase: Phase, iteration: int, writer: Any, wandb: Any) -> None:
    """Write that a phase begins to TensorBoard and Weights & Biases, where there are such."""
    text = phase.describe(iteration)
    # a step line that can be laid over any curve: 0 joint, 1 backbone frozen, 2 MTP head frozen
    code = {"none": 0, "backbone": 1, "mtp": 2}[phase.name]
    if writer:
        writer.add_text("mtp/freeze phase", text, iteration + 1)
        writer.add_scalar("mtp/freeze phase code", code, iteration + 1)
    if wandb:
        wandb.log({"mtp/freeze phase": text, "mtp/freeze phase code": code}, iteration + 1)


def install_freezing_loop(options: FreezeConfig) -> None:
    """Rebind Megatron's own training loop on top of `install_freezing`.

    Raises:
        RuntimeError: this Megatron lacks a name that we rely on; nothing has been changed then.
    """
    if not _patcher.active:
        compat.check(compat.TRAINING_SEAMS)
    install_freezing(options)
    loop = FreezeLoop(options)
    wrappers = {
        "get_megatron_optimizer": loop.optimizer,
        "get_optimizer_param_scheduler": loop.lr_scheduler,
        "train_step": loop.train_step,
        "print_rank_last": loop.log,
    }
    for seam in compat.TRAINING_SEAMS:
        seam.rebind(_patcher, wrappers[seam.name])


def uninstall_freezing() -> None:
    """Give Megatron its own names back."""
    _patcher.restore()
