"""Rollouts as the learner's micro-batches: which token counts how much, and what it was sampled with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.rl.grpo import advantages
from bebop_megatron.rl.records import Rollout


@dataclass(frozen=True)
class Sample:
    """Prompt and completion; `log_probs` of the completion's tokens, which are the last ones."""

    tokens: list[int]
    log_probs: list[float]
    advantage: float
    staleness: int


def samples_of(rollouts: Sequence[Rollout], step: int, normalise: bool) -> list[Sample]:
    """Every completion of a step, with its advantage within its group."""
    found = []
    for rollout in rollouts:
        for group in rollout.groups:
            values = advantages(group.rewards, normalise)
            for tokens, log_probs, value in zip(group.completions, group.log_probs, values, strict=True):
                found.append(Sample(group.prompt + tokens, log_probs, value, step - rollout.version))
    return found


def micro_batches(
    samples: Sequence[Sample],
    *,
    micro_batch_size: int,
    replicas: int = 1,
    rank: int = 0,
    multiple: int = 1,
    one_length: bool = False,
) -> list[dict[str, Tensor]]:
    """The share of data-parallel rank `rank`, neighbours in length together.

    `weight` makes the sum of a step's token losses their mean, after Megatron has divided by the numbers of
    micro-batches and replicas. Lengths are multiples of `multiple`, and all alike where pipeline stages need that
    (`one_length`).

    Shape: each tokens [b, s] int64; loss_mask, behaviour, weight [b, s] float32, at the token that they are about;
    advantage [b] float32.

    Raises:
        ValueError: samples that do not fill the micro-batches of all ranks.
    """
    if len(samples) % (micro_batch_size * replicas):
        raise ValueError(
            f"{len(samples)} completions do not fill micro-batches of {micro_batch_size} on {replicas} data-parallel "
            "ranks: change --groups, --group-size or --micro-batch-size"
        )
    ordered = sorted(samples, key=lambda sample: len(sample.tokens))
    parts = [ordered[i : i + micro_batch_size] for i in range(0, len(ordered), micro_batch_size)]
    total = sum(len(sample.log_probs) for sample in samples)
    scale = len(parts) / max(1, total)
    longest = len(ordered[-1].tokens)
    # ranks take turns, so that each has short and long ones
    return [
        _padded(part, scale, longest if one_length else len(part[-1].tokens), multiple)
        for part in parts[rank::replicas]
    ]


def _padded(part: Sequence[Sample], scale: float, length: int, multiple: int) -> dict[str, Tensor]:
    length = -(-length // multiple) * multiple
    tokens = torch.zeros(len(part), length, dtype=torch.int64)
    mask, behaviour = torch.zeros(len(part), length), torch.zeros(len(part), length)
    for row, sample in enumerate(part):
        end = len(sample.tokens)
        begin = end - len(sample.log_probs)
        tokens[row, :end] = torch.tensor(sample.tokens)
        mask[row, begin:end] = 1
        behaviour[row, begin:end] = torch.tensor(sample.log_probs)
    return {
        "tokens": tokens,
        "loss_mask": mask,
        "behaviour": behaviour,
        "weight": mask * scale,
        "advantage": torch.tensor([sample.advantage for sample in part]),
    }
