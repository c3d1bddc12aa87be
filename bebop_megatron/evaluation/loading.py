"""Builds a model from a Megatron checkpoint's own arguments and loads its weights, also without torchrun."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import logging
import os
import re
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import torch

from bebop_megatron.launcher import ensure_environment
from bebop_megatron.platform import enter

# how to run rather than what the model is: decided anew for every run
_NOT_ARCHITECTURE = re.compile(
    "fus|recompute|cuda_graph|fp8|fp4|offload|kitchen|dispatcher|inference|persist|pipeline|backend|stash|"
    "rng|activations|config_logger|test_mode|deepep|hybridep|ncclep|dropout|first_and_last|per_layer_logging"
)
# what else the architecture hangs on, known to the arguments only
_ARGUMENTS_ONLY = (
    "bf16",
    "fp16",
    "make_vocab_size_divisible_by",
    "openai_gelu",
    "quick_geglu",
    "rope_scaling_factor",
    "rotary_seq_len_interpolation_factor",
    "use_rope_scaling",
    "vocab_size",
)


@dataclasses.dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode and its arguments.

    The LM head has `padded_vocab_size` columns, fewer than `vocab_padding` of them unused if Megatron padded it.
    """

    model: Any
    args: Any
    padded_vocab_size: int
    vocab_padding: int


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Megatron reports every argument on standard output: keep it, and show it if loading fails."""
    output = io.StringIO()
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with contextlib.redirect_stdout(output), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except BaseException:
        sys.stderr.write(output.getvalue()[-4000:])
        raise
    finally:
        logging.disable(before)


def _argv(path: str, iteration: int | None, tensor_parallel: int | None) -> list[str]:
    from bebop_megatron.platform import active
    from bebop_megatron.platform.flags import ON_CPU, UNFUSED

    return [
        *("--load", path, "--ckpt-format", "torch_dist", "--use-checkpoint-args"),
        *("--no-load-optim", "--no-load-rng", "--finetune", "--exit-on-missing-checkpoint"),
        *("--tensor-model-parallel-size", str(tensor_parallel or os.environ["WORLD_SIZE"]), "--micro-batch-size", "1"),
        # the last one: a model with GELU and without biases is refused otherwise
        *(*UNFUSED, "--no-bias-gelu-fusion"),
        *(ON_CPU if active() else ["--distributed-backend", "nccl"]),
        *([] if iteration is None else ["--ckpt-step", str(iteration)]),
    ]


def take_architecture(args: Any, trained: Any) -> None:
    """Copy the model's shape from the checkpoint's arguments.

    Megatron's `--use-checkpoint-args` copies a list of names that leaves out, among others, `qk_layernorm`
    and `layernorm_epsilon`: the second makes a model that loads and is wrong.
    """
    from megatron.core.model_parallel_config import ModelParallelConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    parallel = {field.name for field in dataclasses.fields(ModelParallelConfig)}
    model = {field.name for field in dataclasses.fields(MLATransformerConfig)} - parallel
    for name in sorted(model | set(_ARGUMENTS_ONLY)):
        if hasattr(trained, name) and (name in _ARGUMENTS_ONLY or not _NOT_ARCHITECTURE.search(name)):
            setattr(args, name, getattr(trained, name))
    for name in vars(trained):
        if name.startswith("yarn_"):
            setattr(args, name, getattr(trained, name))


def _arguments(path: str, iteration: int | None, with_mtp: bool, tensor_parallel: int | None) -> tuple[Any, Any]:
    """Megatron's arguments for this run, and those of the training run."""
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    argv, sys.argv = sys.argv, [sys.argv[0], *_argv(path, iteration, tensor_parallel)]
    try:
        args = parse_args()
    finally:
        sys.argv = argv
    loaded = load_args_from_checkpoint(args)
    if not isinstance(loaded, tuple):
        raise ValueError(f"{path} does not hold the arguments it was trained with, so its model's shape is unknown")
    args, trained = loaded
    take_architecture(args, trained)
    if not with_mtp:
        args.mtp_num_layers = None
    if args.padded_vocab_size % args.tensor_model_parallel_size:
        raise ValueError(
            f"{path} has {args.padded_vocab_size:,} vocabulary columns, which "
            f"{args.tensor_model_parallel_size} ranks cannot share equally: use another number of processes"
        )
    validate_args(args)
    set_global_variables(args, build_tokenizer=False)
    return args, trained


def unload_model() -> None:
    """Forget Megatron's global state, so that another checkpoint can be loaded; process groups of torchrun stay."""
    from megatron.training.training import destroy_global_state

    destroy_global_state()


def load_model(
    path: str, *, iteration: int | None = None, with_mtp: bool = True, tensor_parallel: int | None = None
) -> LoadedModel:
    """Load the newest `torch_dist` checkpoint below `path`, or that of `iteration`; every `tensor_parallel` processes
    of torchrun share a copy, by default all of them.

    Without a CUDA device Megatron runs on the CPU with gloo. fp8 settings of the training run are not taken
    over.

    Raises:
        ValueError: not such a checkpoint, or a damaged one; no MTP weights in it though `with_mtp`; a number of
            processes that `tensor_parallel` does not divide.
    """
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if tensor_parallel is not None and (tensor_parallel < 1 or world % tensor_parallel):
        raise ValueError(f"{world} process(es) cannot be split into groups of {tensor_parallel} (tensor parallelism)")
    with warnings.catch_warnings():
        # Megatron's import tells at length which optional packages are missing
        warnings.simplefilter("ignore")
        from bebop_megatron.mcore.checkpoints import damage_named, has_mtp_weights, require_whole

        if iteration is None:
            require_whole(path)
        if with_mtp and not has_mtp_weights(path):
            raise ValueError(f"the checkpoint {path} has no MTP weights (no tensor is named mtp.*): nothing can draft")
        if not torch.cuda.is_available():
            enter()
    ensure_environment()
    with _quiet():
        with damage_named(path):
            args, trained = _arguments(path, iteration, with_mtp, tensor_parallel)
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args
        from megatron.training.checkpointing import load_checkpoint
        from megatron.training.initialize import initialize_megatron

        initialize_megatron()
        config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
        builder = config.get_builder_cls()(config)
        models = builder.build_distributed_models(
            ProcessGroupCollection.use_mpu_process_groups(),
            wrap_with_ddp=False,
            data_parallel_random_init=False,
        )
        with damage_named(path):
            load_checkpoint(models, None, None)
    models[0].eval()
    padding = args.make_vocab_size_divisible_by * getattr(trained, "tensor_model_parallel_size", 1)
    return LoadedModel(models[0], args, args.padded_vocab_size, padding)
