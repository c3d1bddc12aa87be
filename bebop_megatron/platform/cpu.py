"""Megatron on CPU and gloo: entered on purpose, announced once, refused where a GPU is present."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

import torch

from bebop_megatron.launcher import is_first
from bebop_megatron.patching import Patcher

logger = logging.getLogger(__name__)

_patcher = Patcher()


def active() -> bool:
    """Whether Megatron is running on the CPU through this module."""
    return _patcher.active


def enter() -> None:
    """Make Megatron run on the CPU with the gloo backend. Calling it again does nothing.

    Raises:
        RuntimeError: a CUDA device is present; nothing here may ever slow a GPU run down.
    """
    if active():
        return
    if torch.cuda.is_available():
        raise RuntimeError(
            f"the CPU platform was asked for, but {torch.cuda.device_count()} CUDA device(s) are present. "
            "To run on the CPU all the same, hide them: CUDA_VISIBLE_DEVICES=''."
        )
    # Megatron insists on an environment variable of the GPU scheduler, and on compiled fusions
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    torch._dynamo.config.disable = True

    from bebop_megatron.platform.device import patch_torch
    from bebop_megatron.platform.megatron_names import patch_megatron

    # Megatron's import probes for CUDA extensions must still see a machine without CUDA
    patch_megatron(_patcher)
    patch_torch(_patcher)
    if is_first():
        logger.warning("bebop_megatron: no CUDA device, running Megatron on the CPU with gloo")


def leave() -> None:
    """Undo `enter`. Models that were built in between keep their CPU modules."""
    _patcher.restore()


def requested_backend(arguments: Sequence[str]) -> str:
    """The value of `--distributed-backend` in a Megatron command line; Megatron's default is nccl."""
    flag, backend = "--distributed-backend", "nccl"
    for index, argument in enumerate(arguments):
        if argument == flag and index + 1 < len(arguments):
            backend = arguments[index + 1]
        elif argument.startswith(flag + "="):
            backend = argument.split("=", 1)[1]
    return backend


def maybe_enter_cpu(arguments: Sequence[str]) -> bool:
    """Enter the CPU platform when a command line asks for gloo and the machine has no CUDA device.

    Raises:
        RuntimeError: there is no CUDA device and the command line does not ask for gloo.
    """
    if torch.cuda.is_available() and not active():
        return False
    if requested_backend(arguments) != "gloo":
        raise RuntimeError(
            "no CUDA device was found and --distributed-backend is not gloo. "
            "To run on the CPU, add --distributed-backend gloo."
        )
    enter()
    return True
