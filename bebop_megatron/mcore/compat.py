"""The only file that knows Megatron's private names. They are checked when we install, not when they first fail."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import queue
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.mcore.checkpoints import damage_named
from bebop_megatron.patching import Patcher

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

    def rebind(self, patcher: Patcher, wrap: Callable[[Any], Any], *, static: bool = False) -> None:
        """Put `wrap(what is there)` under the name until `patcher.restore()`; `static` for a static method."""
        wrapped = wrap(getattr(self.owner(), self.name))
        patcher.set(self.owner(), self.name, staticmethod(wrapped) if static else wrapped)


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
# called, not rebound: decoding runs the layer's own parts around states of its own
DELTA_NET_SEAMS = tuple(
    Seam("megatron.core.ssm.gated_delta_net:GatedDeltaNet", name, parameters)
    for name, parameters in (
        ("_prepare_input_for_gated_delta_rule", ("qkv", "gate", "batch", "seq_len", "gate_feats")),
        ("_compute_g_and_beta", ("A_log_local_cp", "dt_bias_local_cp", "alpha", "beta")),
        ("_apply_gated_norm", ("x", "gate")),
    )
)
# a class, so that every wrapped model already built is covered too
GRAD_SYNC_SEAM = Seam("megatron.core.distributed:DistributedDataParallel", "finish_grad_sync", ("force_all_reduce",))
TIED_HEAD_SEAM = Seam(
    "megatron.core.models.common.language_module.language_module:LanguageModule",
    "tie_embeddings_and_output_weights_state_dict",
    ("sharded_state_dict", "output_layer_weight_key", "first_stage_word_emb_key"),
)


# what we read without rebinding: configuration fields, and attributes that a constructor sets
CONFIG_FIELDS = (
    "mtp_num_layers",
    "mtp_detach_heads",
    "mtp_loss_scaling_factor",
    "mtp_use_repeated_layer",
    "calculate_per_token_loss",
    "pipeline_model_parallel_layout",
    "overlap_p2p_comm",
    "sequence_parallel",
    "gradient_accumulation_fusion",
)
CONSTRUCTED = (
    (
        "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup",
        ("per_param_grad_ready_counts", "is_first_batch", "grad_reduce_handle", "grad_reduce_finished"),
    ),
    ("megatron.core.distributed:DistributedDataParallel", ("param_to_bucket_group", "ddp_config")),
    (
        "megatron.core.models.gpt:GPTModel",
        ("mtp_process", "pre_process", "post_process", "embedding", "share_embeddings_and_output_weights"),
    ),
    (
        "megatron.core.models.hybrid.hybrid_model:HybridModel",
        ("mtp_process", "pre_process", "post_process", "embedding", "share_embeddings_and_output_weights"),
    ),
)
SYMBOLS = (
    ("megatron.core.transformer.multi_token_prediction:MTPLossAutoScaler", "main_loss_backward_scale"),
    ("megatron.core.transformer.multi_token_prediction", "get_mtp_ranks"),
    ("megatron.core.transformer.multi_token_prediction", "mtp_on_this_rank"),
)


def _owner(path: str) -> Any:
    return Seam(path, "").owner()


def _check_what_is_read(tested: str) -> None:
    """Names that we read: a changed one would give wrong numbers, not an error.

    Raises:
        RuntimeError: with the symbol that is missing and the versions that have it.
    """
    from megatron.core import __version__
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = "megatron.core.transformer.transformer_config.TransformerConfig"
    fields = {field.name for field in dataclasses.fields(TransformerConfig)}
    missing = [f"{config}.{name}" for name in CONFIG_FIELDS if name not in fields]
    missing += [f"{path}.{name}" for path, name in SYMBOLS if not hasattr(_owner(path), name)]
    for path, names in CONSTRUCTED:
        # attributes exist on instances only, so the constructor's own code is asked
        known = _owner(path).__init__.__code__.co_names
        missing += [f"{path}.{name}" for name in names if name not in known]
    if missing:
        raise RuntimeError(
            f"megatron-core {__version__} has no {', '.join(missing).replace(':', '.')}, which bebop_megatron reads "
            f"(tested with {tested})"
        )


def have_transformer_engine() -> bool:
    """Whether Megatron found Transformer Engine when it was imported."""
    from megatron.core.extensions.transformer_engine import HAVE_TE

    return HAVE_TE


def write_checkpoints_in_process() -> None:
    """Spare the process that Megatron starts at the first save, seconds long, to serve a queue between processes.

    A save that is not asynchronous writes in threads of the process that asks for it.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    if hasattr(filesystem_async.FileSystemWriterAsync, "write_preloaded_data_multithread"):
        filesystem_async._results_queue = queue.Queue()  # pyright: ignore[reportAttributeAccessIssue]


# optimizer formats that another tensor or pipeline size can read
RESHARDABLE = frozenset({"fully_reshardable", "fully_sharded_model_space", "fsdp_dtensor"})


@dataclass(frozen=True)
class SavedLayout:
    """How a checkpoint was cut: sizes, the distributed optimizer's format if it has one, rows of the padded LM head.

    `schedule` is the state of Megatron's learning rate schedule, where the checkpoint has one.
    """

    tensor: int
    pipeline: int
    optimizer: str | None
    padded_vocab: int | None = None
    schedule: dict[str, Any] | None = None


def read_common_state(folder: Path) -> dict[str, Any]:
    """What the checkpoint in `folder` (an iteration's) holds beside tensors; nothing unless it is a `torch_dist` one.

    Raises:
        ValueError: the file that holds it is damaged.
    """
    from megatron.core import dist_checkpointing

    with damage_named(folder):
        if not dist_checkpointing.check_is_distributed_checkpoint(str(folder)):
            return {}
        return dist_checkpointing.load_common_state_dict(str(folder))


def saved_arguments(folder: Path) -> Any:
    """Megatron's arguments in the checkpoint in `folder` (an iteration's); None where it has none.

    Raises:
        ValueError: the file that holds them is damaged.
    """
    return read_common_state(folder).get("args")


def checkpoint_layout(folder: Path) -> SavedLayout | None:
    """Read how the checkpoint in `folder` (an iteration's) was cut; None where it does not say."""
    from megatron.core import dist_checkpointing

    common = read_common_state(folder)
    args = common.get("args")
    if args is None:
        return None
    metadata = dist_checkpointing.load_content_metadata(preloaded_state_dict=common) or {}
    sharded = args.use_distributed_optimizer and not getattr(args, "no_save_optim", False)
    return SavedLayout(
        args.tensor_model_parallel_size,
        args.pipeline_model_parallel_size,
        metadata.get("distrib_optim_sharding_type") if sharded else None,
        getattr(args, "padded_vocab_size", None),
        common.get("opt_param_scheduler"),
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
LOOP_SEAMS = (
    Seam("megatron.training.training", "train_step", ("iteration",)),
    Seam(
        "megatron.training.training",
        "num_floating_point_operations",
        ("args", "batch_size", "seqlen_squared_sum_in_batch", "total_real_tokens_in_batch"),
    ),
)
VALIDATION_SEAMS = (
    Seam("megatron.training.training", "evaluate", ("forward_step_func", "data_iterator", "model")),
    Seam(
        "megatron.training.training",
        "evaluate_and_print_results",
        ("prefix", "forward_step_func", "data_iterator", "model", "iteration", "write_to_tensorboard"),
    ),
    Seam("megatron.training.training", "print_rank_last", ("message",)),
)
# Megatron Bridge's own training loop
BRIDGE_SEAMS = (
    Seam("megatron.bridge.training.optim", "get_megatron_optimizer", ("config", "model_chunks", "config_overrides")),
    Seam("megatron.bridge.training.optim", "_get_scheduler", ("optimizer_config", "scheduler_config", "optimizer")),
    Seam("megatron.bridge.training.utils.train_utils", "print_rank_last", ("message",)),
    Seam("megatron.bridge.data.utils", "GPTDataset"),
)
_SAVED = ("model", "optimizer", "opt_param_scheduler", "iteration", "num_floating_point_operations_so_far")
BEST_SEAMS = (
    Seam("megatron.training.training", "checkpoint_and_decide_exit", (*_SAVED, "checkpointing_context")),
    Seam("megatron.training.training", "save_checkpoint_and_time", (*_SAVED, "train_data_iterator")),
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


def require(seams: Iterable[Seam]) -> None:
    """See that every seam exists and takes the parameters we rely on.

    Raises:
        RuntimeError: a name or a parameter is missing.
    """
    from megatron.core import __version__

    tested = ", ".join(TESTED_VERSIONS)
    for seam in seams:
        target = getattr(seam.owner(), seam.name, None)
        where = f"{seam.module.replace(':', '.')}.{seam.name}"
        if target is None:
            raise RuntimeError(
                f"megatron-core {__version__} has no {where}, which bebop_megatron rebinds (tested with {tested})"
            )
        known = inspect.signature(target).parameters if callable(target) else {}
        missing = [p for p in seam.parameters if p not in known]
        if missing:
            raise RuntimeError(
                f"megatron-core {__version__}: {where} no longer takes {', '.join(missing)} (tested with {tested})"
            )


def _installed_seams() -> tuple[Seam, ...]:
    return (*LOSS_SEAMS, *SCHEDULE_SEAMS, EMBEDDING_SEAM, SPEC_SEAM, LOGGING_SEAM, GRAD_SYNC_SEAM, TIED_HEAD_SEAM)


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
    require(_installed_seams() if seams is None else seams)
    if seams is None:
        _check_what_is_read(tested)


def survey() -> list[tuple[str, str, str | None]]:
    """Every name that we rebind or read: what needs it, where it is, what is wrong with it (None: nothing)."""
    groups = {
        "objective": _installed_seams(),
        "GPT builder": (BUILDER_SEAM,),
        "training loop": LOOP_SEAMS,
        "freeze schedules": (*FREEZE_SEAMS, *GROUP_KEY_SEAMS, *TRAINING_SEAMS),
    }
    found = []
    for group, seams in groups.items():
        for seam in seams:
            try:
                require((seam,))
                problem = None
            except (ImportError, AttributeError, RuntimeError) as error:
                problem = str(error)
            found.append((group, f"{seam.module.replace(':', '.')}.{seam.name}", problem))
    try:
        _check_what_is_read(", ".join(TESTED_VERSIONS))
        problem = None
    except (ImportError, AttributeError, RuntimeError) as error:
        problem = str(error)
    found.append(("names that are read", "configuration fields and attributes", problem))
    return found
