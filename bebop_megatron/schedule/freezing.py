"""The two parts of a model, and how a part is taken out of training for good.

A parameter that needs no gradient when Megatron wraps the model gets no gradient buffer, no optimizer state and no
weight decay, so the frozen part cannot move. Clearing `requires_grad` later would not be a freeze: Adam's momentum and
decay would still move the weights. Embedding and LM head, tied or not, belong to the backbone.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch


def part_of(name: str) -> str:
    """The part (`mtp` or `backbone`) that owns the parameter or module of this dotted name."""
    return "mtp" if "mtp" in name.split(".") else "backbone"


def tag_parts(chunks: Iterable[torch.nn.Module]) -> None:
    """Write each parameter's part on the parameter, for those who see no names."""
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            parameter.bebop_part = part_of(name)  # pyright: ignore[reportAttributeAccessIssue]


def part_tag(parameter: torch.nn.Parameter) -> str | None:
    """The part that `tag_parts` wrote on a parameter, if it did."""
    return getattr(parameter, "bebop_part", None)


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
    freeze_router_biases(chunks, frozenset({part}))
    return count


def freeze_router_biases(chunks: Iterable[torch.nn.Module], frozen: frozenset[str]) -> None:
    """Stop the load balancing of frozen parts, which moves a buffer without any optimizer, and let the others go on."""
    for chunk in chunks:
        for name, module in chunk.named_modules():
            if hasattr(module, "frozen_expert_bias"):
                module.frozen_expert_bias = part_of(name) in frozen  # pyright: ignore[reportAttributeAccessIssue]


class FrozenBuffers:
    """Keeps the buffers of frozen parts (router statistics and the like) as they were when the phase began."""

    def __init__(self, chunks: Iterable[torch.nn.Module], frozen: frozenset[str]) -> None:
        buffers = [b for chunk in chunks for name, b in chunk.named_buffers() if part_of(name) in frozen]
        self._kept = [(buffer, buffer.clone()) for buffer in buffers]

    @torch.no_grad()
    def restore(self) -> None:
        """Undo whatever the step wrote to them."""
        for buffer, value in self._kept:
            buffer.copy_(value)
