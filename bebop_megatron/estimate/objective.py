"""Peak memory of the MTP objective on the rank that computes it: the formulas of docs/loss.md and `losses/chunked.py`.

K depths, n rows of a micro-batch on this rank (sequence x batch / context parallel), h hidden size, s bytes of a value:

    inputs      K n h s / sp     the depths' hidden states, stacked for the objective
                n h s            the backbone's, gathered over the sequence-parallel ranks
    forward     K n h s          unweighted gradients (4 bytes a value for fp16)
              + K n h s          the drafts gathered, under sequence parallelism
              + chunk            (drafts + targets) x columns x bytes of a logit, within a byte budget, and the
                                 chunk's drafts once more
              + 100 K n          row statistics and the plan
    backward    2 K n h s        the stored gradients and their scaled copy
    joint       columns x h x 4  the gradient of the LM head, in fp32; backward twice that
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bebop_megatron.losses import rows
from bebop_megatron.losses.chunked import _CHUNK_BYTES, _MIN_ROWS
from bebop_megatron.losses.options import Options

_STATISTICS = 100


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

    def bytes_per_logit(self, options: Options) -> int:
        """What a chunk holds of each logit, as the backend of the device says."""
        backend = rows
        if self.device == "cuda":
            # the formula alone: on a machine without Triton the kernels cannot be imported
            wide = torch.promote_types(self.dtype, torch.float32)
            results, itemsize = len(options.shares), self.dtype.itemsize
            extra = wide.itemsize if self.joint and wide != self.dtype else 0
            return max(itemsize * results, itemsize + extra)
        return backend.bytes_per_logit(
            self.dtype, reverse=options.needs_reverse_kl, results=len(options.shares), to_weight=self.joint
        )


def chunk_bytes(problem: Problem, options: Options) -> int:
    """Most that one chunk holds: as many drafts and as many targets as half the budget allows each."""
    per_logit = problem.bytes_per_logit(options)
    if options.copies_target:
        per_logit += torch.promote_types(problem.dtype, torch.float32).itemsize
    per_row = max(problem.columns * per_logit, 1)
    limit = max(_MIN_ROWS, _CHUNK_BYTES[problem.device] // (2 * per_row))
    drafts = min(limit, problem.depths * problem.tokens)
    targets = min(limit, problem.tokens)
    hidden = drafts * problem.hidden * problem.dtype.itemsize
    # a CPU takes statistics in blocks that fit into its caches
    blocks = 5 * 4 * rows._BLOCK * torch.get_num_threads() if problem.device == "cpu" else 0
    return (drafts + targets) * per_row + hidden + min(blocks, 5 * drafts * problem.columns * 4)


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
