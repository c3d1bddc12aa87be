"""Which implementation of the row statistics runs: PyTorch anywhere, Triton on a GPU (or in Triton's interpreter)."""

from __future__ import annotations

import functools
import logging
import os
from importlib.util import find_spec
from typing import Any, Protocol

import torch
from torch import Tensor

from bebop_megatron.losses import rows as torch_rows
from bebop_megatron.losses.rows import LocalRows, Overlap

BACKENDS = ("auto", "torch", "triton")


class Backend(Protocol):
    """The functions of `rows.py`, which documents them; `kernels.py` has the same."""

    def local_rows(self, logits: Tensor, scale: float = 1.0, **keywords: Any) -> LocalRows: ...
    def probability_at(self, side: LocalRows, rows: Tensor, column: Tensor) -> Tensor: ...
    def overlap(
        self, draft: LocalRows, target: LocalRows, rows: Tensor, draft_share: Tensor | None, target_share: Tensor | None
    ) -> Overlap: ...
    def direction(
        self, draft: LocalRows, target: LocalRows | None, rows: Tensor, *rest: Any, **keywords: Any
    ) -> Tensor: ...


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def resolve(backend: str, device: torch.device) -> Backend:
    """The module that does the work: `auto` takes Triton for CUDA tensors where it is installed, PyTorch elsewhere.

    Raises:
        ValueError: Triton asked for, and not installed, or the tensors are not on a GPU.
    """
    name = backend
    if backend == "auto":
        name = "triton" if device.type == "cuda" and find_spec("triton") is not None else "torch"
    elif backend == "triton":
        if find_spec("triton") is None:
            raise ValueError("backend 'triton' was asked for, and Triton is not installed: use 'auto' or 'torch'")
        if device.type != "cuda" and not _interpreted():
            raise ValueError(
                f"backend 'triton' was asked for, and the tensors are on {device.type}: Triton's kernels need a GPU "
                "(or its interpreter, TRITON_INTERPRET=1)"
            )
    _say(backend, name, device.type)
    if name == "torch":
        return torch_rows  # pyright: ignore[reportReturnType]
    from bebop_megatron.losses import kernels

    return kernels  # pyright: ignore[reportReturnType]


@functools.cache
def _say(asked: str, taken: str, device: str) -> None:
    logging.getLogger(__name__).info("MTP objective: backend %s on %s (%s was asked for)", taken, device, asked)
