"""The only file that knows Megatron's private names. They are checked when we install, not when they first fail."""

from __future__ import annotations

import importlib
import inspect
from dataclasses import dataclass
from typing import Any

TESTED_VERSIONS = ("0.19.2",)

_LOSS_PARAMETERS = (
    "hidden_states",
    "labels",
    "loss_mask",
    "output_layer",
    "output_weight",
    "runtime_gather_output",
    "is_training",
    "config",
    "cp_group",
    "tp_group",
    "packed_seq_params",
    "scale_logits_fn",
    "input_ids",
)
_SCHEDULE_PARAMETERS = ("data_iterator", "model", "num_microbatches")


@dataclass(frozen=True)
class Seam:
    """One name in Megatron that we rebind, and the parameters that we rely on."""

    module: str
    name: str
    parameters: tuple[str, ...] = ()

    def owner(self) -> Any:
        """The module or class that holds the name."""
        module, _, attribute = self.module.partition(":")
        owner: Any = importlib.import_module(module)
        return getattr(owner, attribute) if attribute else owner


# `process_mtp_loss` is imported by name, so it is looked up where it is used
LOSS_SEAMS = (
    Seam("megatron.core.models.gpt.gpt_model", "process_mtp_loss", _LOSS_PARAMETERS),
    Seam("megatron.core.models.hybrid.hybrid_model", "process_mtp_loss", _LOSS_PARAMETERS),
)
SCHEDULE_SEAMS = tuple(
    Seam("megatron.core.pipeline_parallel.schedules", name, _SCHEDULE_PARAMETERS)
    for name in (
        "forward_backward_no_pipelining",
        "forward_backward_pipelining_without_interleaving",
        "forward_backward_pipelining_with_interleaving",
    )
)
LOGGING_SEAM = Seam(
    "megatron.core.transformer.multi_token_prediction:MTPLossLoggingHelper",
    "track_mtp_metrics",
    ("loss_scale", "iteration", "writer", "wandb_writer", "total_loss_dict"),
)
# a class, so that every wrapped model already built is covered too
GRAD_SYNC_SEAM = Seam("megatron.core.distributed:DistributedDataParallel", "finish_grad_sync", ("force_all_reduce",))


def check() -> None:
    """See that this Megatron has every name that `install` rebinds, with the parameters it relies on.

    Raises:
        RuntimeError: the version is outside 0.19, or a name or parameter is missing.
    """
    from megatron.core import __version__

    tested = ", ".join(TESTED_VERSIONS)
    if not str(__version__).startswith("0.19."):
        raise RuntimeError(
            f"megatron-core {__version__} is not supported: bebop_megatron needs 0.19.x (tested with {tested})"
        )
    for seam in (*LOSS_SEAMS, *SCHEDULE_SEAMS, LOGGING_SEAM, GRAD_SYNC_SEAM):
        target = getattr(seam.owner(), seam.name, None)
        where = f"{seam.module.replace(':', '.')}.{seam.name}"
        if target is None:
            raise RuntimeError(
                f"megatron-core {__version__} has no {where}, which bebop_megatron rebinds (tested with {tested})"
            )
        missing = [p for p in seam.parameters if p not in inspect.signature(target).parameters]
        if missing:
            raise RuntimeError(
                f"megatron-core {__version__}: {where} no longer takes {', '.join(missing)} (tested with {tested})"
            )
