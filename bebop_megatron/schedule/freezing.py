"""Takes a part of the model out of training before Megatron wraps it.

A parameter that needs no gradient when the model is wrapped gets no gradient buffer, no optimizer state and no weight
decay, so the frozen part cannot move. Clearing `requires_grad` later would not be a freeze: Adam's momentum and decay
would still move the weights. Tied embeddings belong to the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def part_of(name: str) -> str:
    """The part (`mtp` or `backbone`) that owns the parameter or module of this dotted name."""
    return "mtp" if "mtp" in name.split(".") else "backbone"


def parameters_of(chunks: Iterable[torch.nn.Module], part: str) -> Iterator[torch.nn.Parameter]:
    """The parameters of one part over all model chunks of this rank."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if part_of(name) == part:
                yield parameter


def freeze(chunks: list[torch.nn.Module], part: str) -> int:
    """Freeze one part of unwrapped model chunks; returns how many values no longer train.

    Raises:
        ValueError: an unknown part.
    """
    if part not in ("backbone", "mtp"):
        raise ValueError(f"unknown part {part!r}: choose backbone or mtp")
    count = 0
    for parameter in parameters_of(chunks, part):
        parameter.requires_grad_(False)
        count += parameter.numel()
    for chunk in chunks:
        for name, module in chunk.named_modules():
            # load balancing without a loss moves this buffer, not the optimizer
            if part_of(name) == part and hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = True  # pyright: ignore[reportAttributeAccessIssue]
    return count
