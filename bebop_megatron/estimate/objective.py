"""Peak memory of the MTP objective on the rank that computes it: the formulas of docs/loss.md and `losses/budget.py`.

K depths, n rows of a micro-batch on this rank (sequence x batch / context parallel), h hidden size, s bytes of a value:

    inputs      K n h s / sp     the depths' hidden states, stacked for the objective
                n h s            the backbone's, gathered over the sequence-parallel ranks
    forward     K n h s          unweighted gradients (4 bytes a value for fp16)
              + K n h s          the drafts gathered, under sequence parallelism
              + chunk            rows x columns x bytes of a draft's and a target's logit, within a byte budget, and
                                 the hidden states of the chunk's drafts
              + 100 K n          row statistics and the plan
    backward    2 K n h s        the stored gradients and their scaled copy
    joint       columns x h x 4  the gradient of the LM head, in fp32; backward twice that
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bebop_megatron.losses.budget import bytes_per_logit, row_limit
from bebop_megatron.losses.options import Options
from bebop_megatron.losses.rows import block_rows

_STATISTICS = 100
# blocks of rows that PyTorch's statistics are taken in
_SCRATCH = 5


@dataclass(frozen=True)
class Problem:
    """One micro-batch's objective on one rank: n `tokens`, v/tp `columns`, ranks that share its sequence."""

    depths: int
    tokens: int
    hidden: int
    columns: int
    dtype: torch.dtype = torch.bfloat16
    device: str = "cuda"
    sequence_parallel: int = 1
    joint: bool = False


def chunk_bytes(problem: Problem, options: Options) -> int:
    """Most that one chunk holds: as many drafts, and as many targets, as fit into the budget together."""
    # what `auto` takes on a machine with a GPU; this one may lack Triton
    triton = problem.device == "cuda"
    kind = {"triton": triton, "to_weight": problem.joint}
    limit = row_limit(problem.columns, problem.dtype, options, device=problem.device, **kind)
    of_draft, of_target = bytes_per_logit(problem.dtype, options, **kind)
    drafts, targets = min(limit, problem.depths * problem.tokens), min(limit, problem.tokens)
    hidden = drafts * problem.hidden * problem.dtype.itemsize
    block = 0 if triton else block_rows(drafts, problem.columns, torch.device(problem.device)) * problem.columns
    return (drafts * of_draft + targets * of_target) * problem.columns + hidden + _SCRATCH * 4 * block


def peak(problem: Problem, options: Options) -> int:
    """Most bytes that the objective holds at once beyond the model's own activations."""
    k, n, h, s = problem.depths, problem.tokens, problem.hidden, problem.dtype.itemsize
    kept = torch.float32.itemsize if problem.dtype == torch.float16 else s
    inputs = k * n * h * s // problem.sequence_parallel
    gathered = 0
    if problem.sequence_parallel > 1:
        inputs += n * h * s
        gathered = k * n * h * s
    gradients = k * n * h * kept * len(options.shares)
    joint = problem.columns * h * 4 if problem.joint else 0
    forward = gathered + gradients + chunk_bytes(problem, options) + _STATISTICS * k * n + joint
    backward = (2 * k * n * h * s) // problem.sequence_parallel + _STATISTICS * k * n + 2 * joint
    return inputs + max(forward, backward)
