"""Tells the overlapped gradient reduction about weights that never get a gradient.

A pipeline stage with MTP layers holds a copy of the embedding, and stages that need none may hold an LM head. With
detached heads no gradient reaches them, so Megatron's overlapped reduction waits for it: it asserts in the first step.
The copies' own gradients are zero; the embedding's then receives the first stage's in the embedding group, as it must.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.utils import get_attr_wrapped_model

from bebop_megatron.mcore.attachment import attached

_known: weakref.WeakKeyDictionary[Any, list[torch.nn.Parameter]] = weakref.WeakKeyDictionary()


def _copies(model: Any) -> list[torch.nn.Parameter]:
    """Trainable weights of one model chunk that no loss reaches."""
    # the first stage's embedding is the backbone's own
    if model.pre_process or not getattr(model, "mtp_process", False) or not model.config.mtp_detach_heads:
        return []
    tied, loss_here = model.share_embeddings_and_output_weights, model.post_process
    unused = []
    if not (tied and loss_here):
        unused += model.embedding.parameters()
    # a tied LM head multiplies by the embedding's weight; HybridModel has an LM head without a loss, GPTModel has none
    if (tied or not loss_here) and hasattr(model, "output_layer"):
        unused += model.output_layer.parameters()
    return [parameter for parameter in unused if parameter.requires_grad]


def _report(wrapped: Any) -> None:
    if wrapped not in _known:
        _known[wrapped] = _copies(get_attr_wrapped_model(wrapped.module, "pre_process", return_model_obj=True))
    for parameter in _known[wrapped]:
        group = wrapped.param_to_bucket_group[parameter]
        started = group.grad_reduce_handle is not None or group.grad_reduce_finished
        if parameter not in group.per_param_grad_ready_counts and (group.is_first_batch or not started):
            group.register_grad_ready(parameter)


def with_unused_copies(finish_grad_sync: Callable[..., None]) -> Callable[..., None]:
    """Wrap the data-parallel wrapper's `finish_grad_sync`; models without our objective pass straight through.

    Collectives: the bucket that holds a copy is reduced here, without overlap.
    """

    @functools.wraps(finish_grad_sync)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.ddp_config.overlap_grad_reduce and attached(self.config) is not None:
            _report(self)
        finish_grad_sync(self, *args, **kwargs)

    return wrapper
