"""A launch rehearsed in one process: Megatron's own arguments, checks and models of any rank, without its memory.

The world is torch's fake process group, where collectives do nothing; tensors are on the meta device, which has shapes
and no data. So a script for hundreds of GPUs can be checked, and its parameters counted to the last one, on a laptop.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from bebop_megatron.patching import Patcher
from bebop_megatron.platform.cpu import enter
from bebop_megatron.platform.flags import UNFUSED

# what a GPU machine has and this one may lack; none of it changes a parameter
_WITHOUT = {
    "--moe-permute-fusion": 0,
    "--moe-router-fusion": 0,
    "--cross-entropy-loss-fusion": 0,
    "--cross-entropy-fusion-impl": 1,
    "--tp-comm-overlap": 0,
    "--use-te-rng-tracker": 0,
    "--wandb-project": 1,
    "--wandb-exp-name": 1,
    "--wandb-save-dir": 1,
    "--tensorboard-dir": 1,
    "--load": 1,
    "--pretrained-checkpoint": 1,
    "--attention-backend": 1,
}


class _Hopper:
    """The properties of a GPU that Megatron's checks ask for."""

    name = "rehearsed"
    major, minor = 9, 0
    multi_processor_count = 132
    total_memory = 80 << 30


class Unknown(ValueError):
    """Arguments that Megatron, or we, refuse; the message is theirs."""


def stand_in(arguments: Sequence[str]) -> list[str]:
    """The same launch without kernels, files and services that it needs on the cluster and not here."""
    kept, skip = [], 0
    for word in arguments:
        name = word.split("=", 1)[0]
        if skip:
            skip -= 1
        elif name in _WITHOUT:
            skip = 0 if "=" in word else _WITHOUT[name]
        else:
            kept.append(word)
    return [*kept, *UNFUSED, "--distributed-backend", "gloo"]


@contextlib.contextmanager
def _command_line(arguments: Sequence[str], world_size: int) -> Iterator[None]:
    before, environment = sys.argv, {name: os.environ.get(name) for name in ("RANK", "WORLD_SIZE")}
    sys.argv = ["rehearsal", *arguments]
    os.environ |= {"RANK": "0", "WORLD_SIZE": str(world_size)}
    try:
        yield
    finally:
        sys.argv = before
        for name, value in environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _only_known_flags(arguments: Sequence[str]) -> None:
    """Megatron's parser with ours, on the command line as it is: a wrong flag or value ends here.

    Raises:
        Unknown: with argparse's message.
    """
    from megatron.training.arguments import add_megatron_arguments

    from bebop_megatron.mcore.arguments import add_mtp_arguments

    parser = add_mtp_arguments(add_megatron_arguments(argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)))

    def fail(message: str) -> None:
        raise Unknown(message)

    parser.error = fail  # pyright: ignore[reportAttributeAccessIssue]
    try:
        parser.parse_args(list(arguments))
    except argparse.ArgumentError as error:
        raise Unknown(str(error)) from error


def _parse(arguments: Sequence[str], world_size: int) -> Any:
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.global_vars import set_args, unset_global_variables

    from bebop_megatron.mcore.arguments import add_mtp_arguments, refusal

    _only_known_flags(arguments)
    with _command_line(stand_in(arguments), world_size):
        patcher = Patcher()
        patcher.set(torch.cuda, "get_device_capability", lambda *_: (_Hopper.major, _Hopper.minor))
        patcher.set(torch.cuda, "get_device_properties", lambda *_: _Hopper)
        try:
            args = parse_args(add_mtp_arguments)
            validate_args(args)
        except (AssertionError, ValueError, RuntimeError) as error:
            raise Unknown(refusal(error)) from error
        finally:
            patcher.restore()
    unset_global_variables()
    set_args(args)
    return args


class Rehearsal:
    """A launch of `world_size` ranks: its arguments, its model config, and the model chunks of any rank."""

    def __init__(self, arguments: Sequence[str], world_size: int, vocab_size: int | None = None) -> None:
        """Parse and check; `vocab_size` where neither the arguments nor a tokenizer at hand say it.

        Raises:
            Unknown: the arguments are refused by Megatron or by us.
        """
        enter()
        self.world_size = world_size
        self.args = _parse(arguments, world_size)
        self._pad_vocabulary(vocab_size)
        self.config = self._config()

    def _pad_vocabulary(self, vocab_size: int | None) -> None:
        from megatron.training.vocab_utils import calculate_padded_vocab_size

        args = self.args
        args.vocab_size = args.vocab_size or vocab_size
        if args.vocab_size is None:
            raise Unknown("how large is the vocabulary? Add --vocab-size to the arguments")
        if getattr(args, "padded_vocab_size", None) is None:
            args.padded_vocab_size = calculate_padded_vocab_size(
                args.vocab_size, args.make_vocab_size_divisible_by, args.tensor_model_parallel_size, False
            )

    def _config(self) -> Any:
        from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

        from bebop_megatron.mcore import install
        from bebop_megatron.mcore.arguments import refusal
        from bebop_megatron.mcore.batches import prepare_packed_arguments
        from bebop_megatron.mcore.flags import Flags

        install()
        args = self.args
        try:
            prepare_packed_arguments(args)
            flags = Flags.of(args)
            self.objective, self.schedule = flags.objective, flags.freezing.parsed_schedule
            config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
            flags.apply(args, config, args.vocab_size, None)
        except (AssertionError, ValueError) as error:
            raise Unknown(refusal(error)) from error
        return config

    @contextlib.contextmanager
    def rank(self, rank: int, device: str = "meta") -> Iterator[list[Any]]:
        """The model chunks that this rank would build, on the meta device or really, in the types they would have.

        Collectives: none that do anything. The groups are taken down at the end.
        """
        from megatron.core import parallel_state
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
        from megatron.core.transformer.module import Float16Module
        from torch.testing._internal.distributed.fake_pg import FakeStore

        args, patcher = self.args, Patcher()
        if dist.is_initialized():
            raise RuntimeError("a rehearsal makes a process group of its own, and there is one already")
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=self.world_size)
        try:
            parallel_state.initialize_model_parallel(
                args.tensor_model_parallel_size,
                args.pipeline_model_parallel_size,
                args.virtual_pipeline_model_parallel_size,
                context_parallel_size=args.context_parallel_size,
                expert_model_parallel_size=args.expert_model_parallel_size,
                expert_tensor_parallel_size=args.expert_tensor_parallel_size,
                create_gloo_process_groups=False,
                order="tp-cp-ep-dp-pp" if not args.use_tp_pp_dp_mapping else "tp-cp-ep-pp-dp",
            )
            initialize_rng_tracker(force_reset=True)
            model_parallel_cuda_manual_seed(1)
            patcher.set(torch.cuda, "current_device", lambda: torch.device(device))
            if device == "meta":
                # copies of the embedding are made equal when they are built; the fake group knows no meta tensors
                patcher.set(dist, "all_reduce", lambda *_, **__: None)
            config = self.config
            transformer = config.transformer
            transformer.perform_initialization = False
            transformer.use_cpu_initialization = False
            transformer.gradient_accumulation_fusion = False
            build = config.get_builder_cls()(config).build_model
            groups = ProcessGroupCollection.use_mpu_process_groups()
            stages = args.virtual_pipeline_model_parallel_size
            with torch.device(device):
                chunks = [build(groups, vp_stage=stage) for stage in (range(stages) if stages else [None])]
                if args.bf16 or args.fp16:
                    chunks = [Float16Module(transformer, chunk).module for chunk in chunks]
            yield chunks
        finally:
            patcher.restore()
            parallel_state.destroy_model_parallel()
            dist.destroy_process_group()

    def stage_ranks(self) -> list[int]:
        """One rank of each pipeline stage, the first data-parallel one."""
        stages = self.args.pipeline_model_parallel_size
        return [stage * (self.world_size // stages) for stage in range(stages)]
