"""Puts our code behind Megatron's own names, and takes it off again."""

from __future__ import annotations

from bebop_megatron.mcore import compat
from bebop_megatron.mcore.logging import make_track_mtp_metrics
from bebop_megatron.mcore.loss_hook import make_process_mtp_loss
from bebop_megatron.mcore.rolling import with_rolled_inputs
from bebop_megatron.mcore.spec import make_builder_mtp_block_spec, make_mtp_block_spec
from bebop_megatron.mcore.step_counts import with_step_counts
from bebop_megatron.mcore.tied_head import with_idle_head
from bebop_megatron.mcore.unused_copies import with_unused_copies
from bebop_megatron.patching import Patcher

_patcher = Patcher()


def install() -> None:
    """Rebind Megatron's MTP loss, inputs and block spec, its schedules and its MTP logging.

    Calling it again does nothing.

    Models whose config carries no objective of ours behave exactly as before; `__wrapped__` keeps each original.

    Raises:
        RuntimeError: this Megatron lacks a name that we rely on; nothing has been changed then.
    """
    if _patcher.active:
        return
    compat.check()
    for seams, wrap in (
        (compat.LOSS_SEAMS, make_process_mtp_loss),
        (compat.SCHEDULE_SEAMS, with_step_counts),
        ((compat.EMBEDDING_SEAM,), with_rolled_inputs),
        ((compat.SPEC_SEAM,), make_mtp_block_spec),
        ((compat.GRAD_SYNC_SEAM,), with_unused_copies),
        ((compat.TIED_HEAD_SEAM,), with_idle_head),
    ):
        for seam in seams:
            seam.rebind(_patcher, wrap)
    compat.LOGGING_SEAM.rebind(_patcher, make_track_mtp_metrics, static=True)


def install_builder() -> None:
    """`install()`, and the builder of `megatron.training`, which a program without it never imports."""
    install()
    seam = compat.BUILDER_SEAM
    if not hasattr(getattr(seam.owner(), seam.name), "__wrapped__"):
        compat.check((seam,))
        seam.rebind(_patcher, make_builder_mtp_block_spec)


def uninstall() -> None:
    """Give Megatron its own names back, also those that a freeze schedule has rebound."""
    # imported late: it needs parts of Megatron that a run without a schedule does not load
    from bebop_megatron.mcore.freeze_install import uninstall_freezing

    uninstall_freezing()
    _patcher.restore()
