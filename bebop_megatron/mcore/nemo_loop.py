"""NeMo 2's training loop: a batch's loss mask, the optimizer by parts, and what its trainer tells callbacks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from lightning.pytorch.callbacks import Callback
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import get_megatron_optimizer
from megatron.core.utils import get_batch_on_this_cp_rank, get_model_config
from nemo.core.optim import McoreDistributedOptimizer
from nemo.lightning.pytorch.optim.base import OptimizerModule

from bebop_megatron.config import FreezeConfig, ObjectiveConfig
from bebop_megatron.mcore.attachment import attached, set_iteration
from bebop_megatron.mcore.freeze_checks import check_freezing
from bebop_megatron.mcore.freeze_install import FreezeLoop, install_freezing, prepare_chunks
from bebop_megatron.mcore.freeze_state import follow_schedule
from bebop_megatron.mcore.logging import gather
from bebop_megatron.schedule.phases import Phase

_LOOP = "bebop_nemo_loop"
_TENSORS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def data_step(dataloader_iter: Any) -> dict[str, Any]:
    """One micro-batch on this rank's device; every stage gets all of it, which MTP layers need.

    Shape: tokens, labels, loss_mask, position_ids [b, s] -> [b, s/cp].
    """
    item = next(dataloader_iter)
    batch = item[0] if isinstance(item, tuple) else item
    batch = {key: batch[key].cuda(non_blocking=True) for key in _TENSORS if batch.get(key) is not None}
    group = parallel_state.get_context_parallel_group()
    return get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=group)


def forward_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The model's losses [b, s], with the loss mask handed to it, which NeMo's own step and GPTModel leave out."""
    return model.module(
        batch["tokens"],
        batch["position_ids"],
        batch.get("attention_mask"),
        labels=batch["labels"],
        loss_mask=batch["loss_mask"],
    )


class MTPOptimizerModule(OptimizerModule):
    """Megatron's optimizer as NeMo's trainer drives it, in two parts where a freeze schedule needs them."""

    def __init__(self, optimizer_config: Any, config: Any, lr_scheduler: Any = None) -> None:
        super().__init__(lr_scheduler=lr_scheduler)
        # NeMo's strategy looks for it under this name
        self.config = optimizer_config
        self.model_config = config

    def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
        """Have gradients reduced as Megatron's own loop does."""
        get_model_config(pl_module).finalize_model_grads_func = finalize_model_grads

    def optimizers(self, model: Any) -> list[Any]:
        """Megatron's optimizer over the wrapped chunks."""
        loop = getattr(self.model_config, _LOOP, None)
        build = get_megatron_optimizer if loop is None else loop.optimizer(get_megatron_optimizer)
        return [McoreDistributedOptimizer(build(self.config, [chunk.module for chunk in model]))]


def _say(phase: Phase, iteration: int) -> None:
    if torch.distributed.get_rank() == 0:
        print(f"bebop_megatron: from iteration {iteration + 1}: {phase.describe(iteration)}")


class MTPCallback(Callback):
    """Enters the phase of each step before it runs, tells the objective how far training is, and logs the metrics."""

    def __init__(self, config: Any) -> None:
        self.config = config
        # where the early phase of the metrics is kept; checkpoints do not carry it
        self.early = SimpleNamespace()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Before a step, which Lightning calls a batch: the phase follows from the steps that the trainer has done."""
        set_iteration(self.config, trainer.global_step)
        loop = getattr(self.config, _LOOP, None)
        if loop is not None:
            loop.controller.on_phase = _say
            loop.controller.before_step(trainer.global_step)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Log objective and acceptance as often as the trainer logs."""
        if trainer.global_step % max(1, trainer.log_every_n_steps) == 0:
            attachment = attached(self.config)
            assert attachment is not None
            for name, value in gather(attachment, self.early).items():
                # the same on every rank already
                pl_module.log(name, value, rank_zero_only=True)


def follow_training(config: Any, options: FreezeConfig, objective: ObjectiveConfig) -> list[Any]:
    """Put a NeMo config's training under our schedule; -> callbacks for the trainer.

    Raises:
        ValueError: the schedule does not go together with the objective; a learning rate of the head's own.
    """
    if not options.by_parts:
        return [MTPCallback(config)]
    if options.lr is not None or options.lr_warmup_iters or options.lr_schedule != "follow":
        raise ValueError(
            "a learning rate of the MTP head's own (lr, lr_schedule, lr_warmup_iters) is not supported with NeMo, "
            "whose schedulers give all parameters one: leave them out, or use Megatron Bridge"
        )
    schedule = options.parsed_schedule
    # what else cannot go together is in NeMo's trainer and optimizer, which are made later
    known = {"optimizer": "adam", "clip_grad": 1.0, "hybrid_layer_pattern": None}
    known["mtp_num_layers"] = config.mtp_num_layers
    check_freezing(options, objective, SimpleNamespace(**known))
    state = follow_schedule(config, schedule)
    install_freezing(options)
    setattr(config, _LOOP, FreezeLoop(options))
    build = config.configure_model

    def configure_model(*args: Any, **kwargs: Any) -> Any:
        (model,) = prepare_chunks([build(*args, **kwargs)], state)
        return model

    # NeMo has no hook between building a model and wrapping it
    config.configure_model = configure_model
    return [MTPCallback(config)]
