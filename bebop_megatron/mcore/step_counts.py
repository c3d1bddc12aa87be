"""Counts the valid anchors of a whole optimizer step before its first forward pass.

The exact mean over the global batch needs the global count while the first micro-batch is differentiated. Megatron's
schedules receive the data iterator and the number of micro-batches, so the wrapper reads the step's micro-batches
ahead, counts, and hands the schedule an iterator that plays them back.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_model_config

from bebop_megatron.mcore.attachment import Attachment, attached
from bebop_megatron.mcore.freeze_state import is_frozen
from bebop_megatron.reduction import StepCounts, batch_counts, global_counts


class _Replay:
    """Gives back what was read ahead, then goes on with the iterator behind it."""

    def __init__(self, items: list[Any], behind: Iterator[Any]) -> None:
        self._items = iter(items)
        self._behind = behind

    def __iter__(self) -> _Replay:
        return self

    def __next__(self) -> Any:
        for item in self._items:
            return item
        return next(self._behind)


def _is_cut(item: Any, seq_length: int) -> bool:
    """Whether a batch was cut over the context-parallel ranks already: its chains cannot be seen to their ends."""
    size = parallel_state.get_context_parallel_world_size()
    mask = item.get("loss_mask") if isinstance(item, dict) else None
    return size > 1 and mask is not None and mask.shape[1] * size == seq_length


def _count(
    attachment: Attachment, data_iterator: Any, num_microbatches: int, seq_length: int, depths: int
) -> tuple[Any, StepCounts | None]:
    """Read one step ahead: -> (iterator that replays it, counts or None where batches cannot be read)."""
    chunks = data_iterator if isinstance(data_iterator, list) else [data_iterator]
    # the loss is computed on the last model chunk
    source = chunks[-1]
    items: list[Any] = [None] * num_microbatches
    # only the first tensor-parallel rank reads data, also where the others hold an iterator
    if source is not None and parallel_state.get_tensor_model_parallel_rank() == 0:
        items = [next(source) for _ in range(num_microbatches)]
        chunks = [*chunks[:-1], _Replay(items, source)]
    whole = [None if _is_cut(item, seq_length) else item for item in items]
    counts = global_counts(
        batch_counts(whole, depths, attachment.objective.resolved_horizon),
        num_microbatches,
        torch.cuda.current_device(),
        # before context-parallel slicing every such rank reads whole sequences
        parallel_state.get_data_parallel_group(with_context_parallel=False),
        parallel_state.get_tensor_model_parallel_group(),
    )
    return chunks if isinstance(data_iterator, list) else chunks[0], counts


def with_step_counts(schedule: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap one of Megatron's forward-backward schedules; models without our objective pass straight through."""

    @functools.wraps(schedule)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        model = kwargs["model"]
        config = get_model_config(model[0] if isinstance(model, list) else model)
        attachment = attached(config)
        if (
            attachment is None
            or is_frozen(config, "mtp")
            or kwargs.get("forward_only")
            or not parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        ):
            return schedule(*args, **kwargs)
        kwargs["data_iterator"], attachment.counts = _count(
            attachment,
            kwargs["data_iterator"],
            kwargs["num_microbatches"],
            kwargs["seq_length"],
            config.mtp_num_layers,
        )
        try:
            return schedule(*args, **kwargs)
        finally:
            attachment.counts = None

    return wrapper
