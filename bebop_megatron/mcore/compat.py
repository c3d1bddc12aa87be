"""The only file that knows Megatron's private names. They are checked when we install, not when they first fail."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

TESTED_VERSIONS = ("0.19.2",)

_LOSS_PARAMETERS = (
    "hidden_states",
    "labels",
    "loss_mask",
    "output_layer",
    "output_weight",
    "runtime_gather_output",
    "is_training",
    "config",
    "cp_group",
    "tp_group",
    "packed_seq_params",
    "scale_logits_fn",
    "input_ids",
)
_SCHEDULE_PARAMETERS = ("data_iterator", "model", "num_microbatches", "seq_length")


@dataclass(frozen=True)
class Seam:
    """One name in Megatron that we rebind, and the parameters that we rely on."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def owner(self) -> Any:
        """The module or class that holds the name."""
        module, _, attribute = self.module.partition(":")
        owner: Any = importlib.import_module(module)
        return getattr(owner, attribute) if attribute else owner


# `process_mtp_loss` is imported by name, so it is looked up where it is used
LOSS_SEAMS = (
    Seam("megatron.core.models.gpt.gpt_model", "process_mtp_loss", _LOSS_PARAMETERS),
    Seam("megatron.core.models.hybrid.hybrid_model", "process_mtp_loss", _LOSS_PARAMETERS),
)
SCHEDULE_SEAMS = tuple(
    Seam("megatron.core.pipeline_parallel.schedules", name, _SCHEDULE_PARAMETERS)
    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    )
)
EMBEDDING_SEAM = Seam(
    "megatron.core.transformer.multi_token_prediction:MultiTokenPredictionLayer",
    "_get_embeddings",
    ("input_ids", "position_ids", "embedding", "hidden_states", "packed_seq_params", "padding_mask"),
)
SPEC_SEAM = Seam(
    "megatron.core.models.gpt.gpt_layer_specs", "get_gpt_mtp_block_spec_for_backend", ("config", "spec", "backend")
)
BUILDER_SEAM = Seam("megatron.training.models.gpt", "mtp_block_spec", ("config", "transformer_layer_spec", "vp_stage"))
LOGGING_SEAM = Seam(
    "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper",
    "track_mtp_metrics",
    ("loss_scale", "iteration", "writer", "wandb_writer", "total_loss_dict"),
)

# what freeze schedules rebind; installed only where there is one
_BUFFER = "megatron.core.distributed.param_and_grad_buffer"
FREEZE_SEAMS = (
    Seam(_BUFFER, "_compute_default_per_buffer_param_layout", ("params", "bucket_size")),
    Seam(
        "megatron.core.optimizer.distrib_optimizer:DistributedOptimizer",
        "_compute_per_buffer_param_layout",
        ("params", "bucket_size", "data_parallel_world_size", "ddp_config"),
    ),
    # imported by name, so it is looked up where it is used
    Seam("megatron.core.distributed.distributed_data_parallel", "partition_buckets", ("buffers",)),
    Seam(
        "megatron.core.pipeline_parallel.schedules",
        "backward_step",
        ("input_tensor", "output_tensor", "output_tensor_grad", "config"),
    ),
    Seam("megatron.core.pipeline_parallel.schedules", "P2PCommunicator", ("pp_group", "config")),
    Seam("megatron.core.distributed.finalize_model_grads", "_allreduce_word_embedding_grads", ("model", "config")),
    Seam("megatron.core.optimizer.optimizer", "clip_grad_by_total_norm_fp32", ("parameters", "max_norm")),
)
GROUP_KEY_SEAMS = (
    Seam("megatron.core.optimizer.optimizer", "param_group_identifier_keys"),
    Seam("megatron.core.optimizer.distrib_optimizer", "param_group_identifier_keys"),
)
TRAINING_SEAMS = (
    Seam("megatron.training.training", "get_megatron_optimizer", ("config", "model_chunks", "config_overrides")),
    Seam("megatron.training.training", "get_optimizer_param_scheduler", ("optimizer",)),
    Seam("megatron.training.training", "train_step", ("model", "optimizer", "opt_param_scheduler", "iteration")),
    Seam("megatron.training.training", "print_rank_last", ("message",)),
)


def finish_param_gather(module: Any) -> None:
    """Wait until a module's own parameters are there, where they are gathered behind the optimizer step.

    Megatron waits in a hook before the module's forward pass; whoever reads a weight without that pass must do as much.
    """
    for hook in list(module._forward_pre_hooks.values()):
        if getattr(hook, "__qualname__", "").startswith("DistributedDataParallel._make_forward_pre_hook"):
            hook(module, ())


def let_steps_be_missing(optimizer: Any) -> None:
    """Let a distributed optimizer around torch's Adam load states without a step, which it leaves out when it saves."""
    original = getattr(type(optimizer), "_set_main_param_and_optimizer_states", None)
    if original is not None:
        optimizer._set_main_param_and_optimizer_states = lambda parameter, tensors: original(
            optimizer, parameter, {"step": None, **tensors}
        )


def _installed_seams() -> tuple[Seam, ...]:
    return (*LOSS_SEAMS, *SCHEDULE_SEAMS, EMBEDDING_SEAM, SPEC_SEAM, LOGGING_SEAM)


def check(seams: tuple[Seam, ...] | None = None) -> None:
    """See that this Megatron has every name of `seams`, by default all that `install` rebinds, with its parameters.

    Raises:
        RuntimeError: the version is outside 0.19, or a name or parameter is missing.
    """
    from megatron.core import __version__

    tested = ", ".join(TESTED_VERSIONS)
    if not str(__version__).startswith("0.19."):
        raise RuntimeError(
            f"megatron-core {__version__} is not supported: bebop_megatron needs 0.19.x (tested with {tested})"
        )
    for seam in _installed_seams() if seams is None else seams:
        target = getattr(seam.owner(), seam.name, None)
        where = f"{seam.module.replace(':', '.')}.{seam.name}"
        if target is None:
            raise RuntimeError(
                f"megatron-core {__version__} has no {where}, which bebop_megatron rebinds (tested with {tested})"
            )
        missing = [p for p in seam.parameters if p not in inspect.signature(target).parameters]
        if missing:
            raise RuntimeError(
                f"megatron-core {__version__}: {where} no longer takes {', '.join(missing)} (tested with {tested})"
            )
