"""A repair of vLLM 0.32.0 on CPU, for the process that imports it only.

The rejection sampler spreads each request's temperature over its draft tokens by `expand_kernel`. The CPU version hands
the C++ kernel an int64 copy of the float32 output and drops the copy, so that the temperature of a draft token is
whatever the uninitialised output held: the target's distribution is wrong at any temperature but 0. GPUs run the Triton
kernel and are not concerned. Other adapters in the same file copy back.

Delete this file when `vllm.utils.cpu_triton_utils._expand_kernel_impl` writes its output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def expand(
    output: Tensor,
    input_val: Tensor,
    cu_num_tokens: Tensor,
    replace_from: float,
    replace_to: float,
    MAX_NUM_TOKENS: Any = None,
) -> None:
    """Write each request's value to its tokens, with `replace_from` replaced: the Triton kernel's definition.

    Shape: input_val [b], cu_num_tokens [b] cumulative counts -> output [cu_num_tokens[-1]], in place.
    """
    counts = torch.diff(cu_num_tokens, prepend=cu_num_tokens.new_zeros(1))
    values = torch.where(input_val == replace_from, torch.full_like(input_val, replace_to), input_val)
    output.copy_(values.repeat_interleave(counts))


def is_broken(adapter: Any) -> bool:
    """Whether vLLM's own adapter leaves a float32 output as it was."""
    output = torch.full((3,), -1.0)
    adapter(output, torch.tensor([0.5, 0.7]), torch.tensor([1, 3], dtype=torch.int32), 0, 1)
    return not torch.equal(output, torch.tensor([0.5, 0.7, 0.7]))


def repair() -> bool:
    """Replace the adapter if it is broken; returns whether it was."""
    from vllm.platforms import current_platform
    from vllm.utils import cpu_triton_utils

    current_platform.import_kernels()
    broken = is_broken(cpu_triton_utils._expand_kernel_impl)
    if broken:
        cpu_triton_utils._expand_kernel_impl = expand
    return broken
