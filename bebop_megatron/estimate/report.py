"""Puts the parts together: bytes of every pipeline stage, with backbone or head frozen, both trained, or joint."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from bebop_megatron.estimate import activations
from bebop_megatron.estimate.objective import Problem, peak
from bebop_megatron.estimate.weights import Block, Weights, count, weigh, whole_model
from bebop_megatron.losses.options import Options
from bebop_megatron.platform.rehearsal import Rehearsal

# what is trained: parts, and whether the MTP gradient goes into the backbone
SITUATIONS = {
    "backbone frozen": (frozenset({"mtp"}), False),
    "mtp frozen": (frozenset({"backbone"}), False),
    "both, detached": (frozenset({"backbone", "mtp"}), False),
    "joint": (frozenset({"backbone", "mtp"}), True),
}


@dataclass(frozen=True)
class Stage:
    """Bytes of one rank of a pipeline stage in one situation."""

    stage: int
    parameters: float
    gradients: float
    optimizer: float
    activations: float
    head: float
    logits: float
    objective: float

    @property
    def total(self) -> float:
        return sum(value for name, value in asdict(self).items() if name != "stage")


@dataclass(frozen=True)
class Estimate:
    """A launch: parameters of the whole model, each stage's bytes by situation, and which one its flags ask for."""

    world_size: int
    parameters: int
    mtp_parameters: int
    asked: str
    stages: dict[str, list[Stage]]
    blocks: list[list[Block]]


@dataclass(frozen=True)
class _Shape:
    """What of a stage the formulas need: layers, draft steps, whether it has the LM head, columns of that."""

    layers: list[str]
    depths: int
    loss: bool
    columns: int


def _shape(args: Any, chunks: Sequence[Any]) -> _Shape:
    numbers = set()
    depths = 0
    for chunk in chunks:
        names = [name for name, _ in chunk.named_parameters()]
        layers = getattr(getattr(chunk, "decoder", None), "layers", [])
        numbers |= {layer.layer_number - 1 for layer in layers}
        if any(re.match(r"mtp\.", name) for name in names):
            depths = args.mtp_num_layers or 0
    every = activations.kinds(args)
    loss = any(getattr(chunk, "post_process", False) for chunk in chunks)
    return _Shape(
        [every[n] for n in sorted(numbers)], depths, loss, args.padded_vocab_size // args.tensor_model_parallel_size
    )


def _options(objective: Any) -> Options | None:
    if objective.loss is None:
        return None
    keywords = objective.keywords(0)
    return Options(**(keywords | {"backend": "auto"}))


def _asked(objective: Any, schedule: Any) -> str:
    if schedule.constant and "backbone" in schedule.phase(0).frozen:
        return "backbone frozen"
    if schedule.constant and "mtp" in schedule.phase(0).frozen:
        return "mtp frozen"
    return "joint" if objective.joint else "both, detached"


def _stage(launch: Rehearsal, number: int, blocks: list[Block], shape: _Shape, situation: str, device: str) -> Stage:
    args = launch.args
    trained, joint = SITUATIONS[situation]
    weights: Weights = weigh(args, blocks, trained)
    tokens = activations.Tokens.of(args)
    microbatches = max(args.global_batch_size // (args.micro_batch_size * args.data_parallel_size), 1)
    frozen = "backbone" not in trained
    backbone = activations.backbone_bytes(args, shape.layers, number, microbatches, frozen)
    head = logits = objective = 0.0
    if "mtp" in trained and shape.depths:
        head = activations.head_bytes(args, shape.depths, number, microbatches)
    options = _options(launch.objective)
    if shape.loss:
        # a frozen backbone's own loss shares the target's projection, chunk by chunk
        logits = 0.0 if frozen and options else activations.logits_bytes(args, shape.columns)
        if options and args.mtp_num_layers and "mtp" in trained:
            problem = Problem(
                args.mtp_num_layers,
                tokens.rows,
                args.hidden_size,
                shape.columns,
                launch.config.transformer.params_dtype,
                device,
                tokens.spread,
                joint,
            )
            objective = float(peak(problem, options))
    return Stage(number, weights.parameters, weights.gradients, weights.optimizer, backbone, head, logits, objective)


def estimate(arguments: Sequence[str], world_size: int, device: str = "cuda") -> Estimate:
    """Estimate a launch from its Megatron arguments.

    Raises:
        Unknown: Megatron or we refuse the arguments.
    """
    launch = Rehearsal(arguments, world_size)
    blocks: list[list[Block]] = []
    shapes: list[_Shape] = []
    totals = {"backbone": 0, "mtp": 0}
    for rank in launch.stage_ranks():
        with launch.rank(rank) as chunks:
            blocks.append(count(chunks))
            shapes.append(_shape(launch.args, chunks))
            for part, number in whole_model(launch.args, chunks, len(blocks) == 1).items():
                totals[part] += number
    stages = {
        situation: [
            _stage(launch, number, blocks[number], shapes[number], situation, device) for number in range(len(blocks))
        ]
        for situation in SITUATIONS
    }
    return Estimate(
        world_size, sum(totals.values()), totals["mtp"], _asked(launch.objective, launch.schedule), stages, blocks
    )
