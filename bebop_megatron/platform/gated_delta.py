"""The three kernels of flash-linear-attention that Megatron's gated delta net calls, in plain torch, packed or not."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def l2norm(x: Tensor, eps: float = 1e-6, dim: int = -1, **_: Any) -> Tensor:
    """Divide by the Euclidean norm along `dim`."""
    return x * torch.rsqrt((x * x).sum(dim, keepdim=True) + eps)


def _documents(cu_seqlens: Tensor | None, length: int) -> Iterator[slice]:
    bounds = [0, length] if cu_seqlens is None else [int(bound) for bound in cu_seqlens]
    for start, stop in itertools.pairwise(bounds):
        if stop > start:
            yield slice(start, stop)


def causal_conv1d(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, cu_seqlens: Tensor | None = None, **_: Any
) -> tuple[Tensor, None]:
    """Depthwise causal convolution with SiLU that never reads across a document boundary.

    Shape: x [b, s, d], weight [d, w], cu_seqlens [documents + 1] -> [b, s, d].
    """
    width = weight.shape[-1]
    out = []
    for document in _documents(cu_seqlens, x.shape[1]):
        padded = F.pad(x[:, document].transpose(1, 2), (width - 1, 0))
        out.append(F.silu(F.conv1d(padded, weight.unsqueeze(1), bias, groups=weight.shape[0])).transpose(1, 2))
    return torch.cat(out, 1), None


def chunk_gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    g: Tensor,
    beta: Tensor,
    initial_state: Tensor | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, Tensor | None]:
    """Gated delta rule; without `initial_state` the state starts at zero, as it does in each packed document.

    Shape: q, k [b, s, heads, d_k], v [b, s, heads, d_v], g, beta [b, s, heads], initial_state
    [b, heads, d_k, d_v] float32 -> [b, s, heads, d_v], and the state after the last token or None.

    Raises:
        ValueError: packed documents with a state.
    """
    from megatron.core.ssm.gated_delta_net.common import torch_chunk_gated_delta_rule

    if cu_seqlens is not None and (initial_state is not None or output_final_state):
        raise ValueError("packed documents start with an empty state and keep none: pass no cu_seqlens with a state")
    out, state = [], initial_state
    for document in _documents(cu_seqlens, q.shape[1]):
        # its loop over a chunk is Python: short documents must not be padded to the default of 64
        size = min(64, max(1, document.stop - document.start))
        parts = (x[:, document] for x in (q, k, v))
        result, state = torch_chunk_gated_delta_rule(
            *parts,
            g=g[:, document],
            beta=beta[:, document],
            chunk_size=size,
            initial_state=initial_state,
            output_final_state=output_final_state,
        )
        out.append(result)
    return torch.cat(out, 1), state if output_final_state else None
