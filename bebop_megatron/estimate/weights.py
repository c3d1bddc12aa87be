"""Parameters of a rank, and the bytes of gradients and optimizer state that they bring.

Per trained parameter (Megatron's `docs/user-guide/features/dist_optimizer.md`, and the optimizers' own code):

    gradient      4 bytes where they are accumulated in fp32 (the default with --bf16), else the parameter's own size
    optimizer     a main copy in fp32 of each 16-bit parameter, and Adam's two moments in fp32: 4 + 4 + 4
                  a distributed optimizer shards the three: dense parameters over the data x context parallel ranks,
                  experts over their own data-parallel ranks
                  with --use-precision-aware-optimizer the types are those of the flags

A frozen part has neither, in a phase list that never trains it; where parts take turns both are there all the time.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from bebop_megatron.schedule.freezing import part_of


@dataclass(frozen=True)
class Block:
    """Parameters of one kind: `part` backbone or mtp, experts or not, one size of value."""

    part: str
    expert: bool
    itemsize: int
    count: int

    @property
    def bytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True)
class Weights:
    """Bytes of one rank."""

    parameters: float
    gradients: float
    optimizer: float


def count(chunks: Iterable[Any]) -> list[Block]:
    """The parameters of model chunks by kind; one that two modules share counts once."""
    sums: dict[tuple[str, bool, int], int] = {}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            # Megatron's mark of a parameter that is not reduced over all data-parallel ranks
            expert = not getattr(parameter, "allreduce", True)
            key = (part_of(name), expert, parameter.element_size())
            sums[key] = sums.get(key, 0) + parameter.numel()
    return [Block(part, expert, itemsize, total) for (part, expert, itemsize), total in sorted(sums.items())]


def whole_model(args: Any, chunks: Iterable[Any], first: bool) -> dict[str, int]:
    """Parameters by part that one rank of a stage stands for: its shards times the ranks that hold the others.

    `first`: whether it is the first stage. Copies of the embedding on later stages do not count.
    """
    sums = {"backbone": 0, "mtp": 0}
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if not first and name.startswith("embedding."):
                continue
            sharded = getattr(parameter, "tensor_model_parallel", False)
            if getattr(parameter, "allreduce", True):
                ranks = args.tensor_model_parallel_size if sharded else 1
            else:
                ranks = args.expert_model_parallel_size * (args.expert_tensor_parallel_size if sharded else 1)
            sums[part_of(name)] += parameter.numel() * ranks
    return sums


def _gradient_bytes(args: Any, itemsize: int) -> int:
    if args.use_precision_aware_optimizer:
        return args.main_grads_dtype.itemsize
    return 4 if args.accumulate_allreduce_grads_in_fp32 else itemsize


def _optimizer_bytes(args: Any, itemsize: int) -> float:
    moments = 2 if args.optimizer == "adam" else 1 if args.optimizer == "sgd" and args.sgd_momentum else 0
    if args.use_precision_aware_optimizer:
        # the main copy of an fp16 one holds the bits that the parameter lacks
        states = args.exp_avg_dtype.itemsize + args.exp_avg_sq_dtype.itemsize
        return states + (args.main_params_dtype.itemsize if itemsize < 4 else 0)
    return 4 * moments + (torch.float32.itemsize if itemsize < 4 else 0)


def shards(args: Any) -> tuple[int, int]:
    """Over how many ranks a distributed optimizer spreads the state of a dense parameter, and of an expert's."""
    if not args.use_distributed_optimizer:
        return 1, 1
    instances = args.num_distributed_optimizer_instances
    dense = args.world_size // (args.tensor_model_parallel_size * args.pipeline_model_parallel_size)
    expert = args.world_size // (
        args.expert_tensor_parallel_size * args.expert_model_parallel_size * args.pipeline_model_parallel_size
    )
    return dense // instances, max(expert // instances, 1)


def weigh(args: Any, blocks: Iterable[Block], trained: frozenset[str]) -> Weights:
    """Bytes of a rank that holds `blocks` and trains some parts of them."""
    dense, expert = shards(args)
    parameters = gradients = optimizer = 0.0
    for block in blocks:
        parameters += block.bytes
        if block.part in trained:
            gradients += block.count * _gradient_bytes(args, block.itemsize)
            optimizer += block.count * _optimizer_bytes(args, block.itemsize) / (expert if block.expert else dense)
    return Weights(parameters, gradients, optimizer)
