"""Gradients and parameters of a frozen part stay off the network.

Megatron reduces gradients and gathers parameters by bucket. A bucket must hold one part only, so the layouts are cut
where the part changes; the group of a bucket whose part is frozen then neither reduces nor gathers.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby
from typing import Any

import torch
from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
from megatron.core.optimizer.param_layout import PerBufferParamLayout

from bebop_megatron.schedule.freezing import part_tag


class _OnePartGroup(_ParamAndGradBucketGroup):
    """A bucket group of one part, which can be frozen, and which tolerates parameters without a gradient."""

    frozen = False

    def start_param_sync(self, force_sync: bool = False) -> None:
        if force_sync or not self.frozen:
            super().start_param_sync(force_sync=force_sync)

    def start_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if not self.frozen:
            super().start_grad_sync(force_all_reduce=force_all_reduce)

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        if self.frozen:
            return
        late = self.ddp_config.overlap_grad_reduce and not self.is_first_batch and self.grad_reduce_handle is None
        if late and not self.grad_reduce_finished and self.ddp_config.num_distributed_optimizer_instances == 1:
            # some parameter got no gradient in this step, so nothing has started the reduction
            self.start_grad_sync(force_all_reduce=force_all_reduce)
        super().finish_grad_sync(force_all_reduce=force_all_reduce)

    def reset(self) -> None:
        if len(self.per_param_grad_ready_counts) != len(self.params):
            # Megatron insists on a gradient for every parameter before it overlaps; wait for such a step
            self.per_param_grad_ready_counts = {}
        super().reset()

    def learn_again(self) -> None:
        """Forget which gradients announce the end of a backward pass: another phase has other ones."""
        self.is_first_batch = True
        self.golden_per_param_grad_ready_counts = {}
        self.per_param_grad_ready_counts = {}


def _part_of_group(group: Any) -> str | None:
    tags = {part_tag(parameter) for parameter in group.params}
    return tags.pop() if len(tags) == 1 else None


def _runs(params: list[torch.nn.Parameter]) -> Iterator[list[torch.nn.Parameter]]:
    """Neighbours of one part, last in the model first, as buffers are filled."""
    for _, run in groupby(params[::-1], key=part_tag):
        yield list(run)[::-1]


def with_one_part_per_bucket(layout: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that lays a buffer's parameters out in buckets: it starts a new bucket where the part changes."""

    @functools.wraps(layout)
    def wrapper(params: list[torch.nn.Parameter], *args: Any, **kwargs: Any) -> Any:
        whole = layout(params, *args, **kwargs)
        if any(part_tag(parameter) is None for parameter in params):
            return whole
        places: dict[Any, tuple[int, int, int]] = {}
        bounds: list[tuple[int, int]] = []
        unpadded: list[int] = []
        for run in _runs(params):
            piece = layout(run, *args, **kwargs)
            offset, first = (bounds[-1][1] if bounds else 0), len(bounds)
            # bucket ends are padded to what starts must be aligned to, so a piece can be moved as it is
            for parameter, (start, end, bucket) in piece.param_index_map.items():
                places[parameter] = (start + offset, end + offset, bucket + first)
            bounds += [(start + offset, end + offset) for start, end in piece.bucket_indices]
            unpadded += piece.per_bucket_numel_unpadded
        # Megatron's fully reshardable checkpoints drop the padding between buckets when they gather, and then look
        # parameters up as if it were there: padding between buckets has to count as content
        unpadded = [end - start for start, end in bounds[:-1]] + unpadded[-1:]
        return PerBufferParamLayout(
            param_index_map=places,
            bucket_indices=bounds,
            per_bucket_numel_unpadded=unpadded,
            param_indices=whole.param_indices,
            num_optimizer_shards=whole.num_optimizer_shards,
        )

    return wrapper


def with_one_part_per_group(partition: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the function that gathers buckets in groups: tagged parameters get groups of one part that can be frozen."""

    @functools.wraps(partition)
    def wrapper(buffers: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        groups = []
        for group in partition(buffers, *args, **kwargs):
            by_part = [list(run) for _, run in groupby(group.buckets, key=lambda b: part_tag(b.params_list[0]))]
            pieces = [group]
            if len(by_part) > 1:
                buffer = buffers[0]
                of = (buffer.ddp_config, buffer.data_parallel_group, buffer.data_parallel_world_size)
                pieces = [_ParamAndGradBucketGroup(buckets, *of) for buckets in by_part]
            for piece in pieces:
                if _part_of_group(piece) is not None:
                    piece.__class__ = _OnePartGroup
            groups += pieces
        return groups

    return wrapper


def _relink(groups: list[Any]) -> None:
    """Each active group prefetches the parameters of the next active one, in the order of the forward pass."""
    following = None
    for group in groups:
        if not group.frozen:
            group.next_param_gather_bucket_group = following
            following = group


def freeze_buckets(chunks: Iterable[Any], frozen: frozenset[str]) -> None:
    """Take the frozen parts of DDP-wrapped chunks off the network, and put the others back on it.

    Collectives: where parameters are gathered behind the optimizer step, the gathers that a newly frozen part is
    still owed.
    """
    for chunk in chunks:
        for groups in (chunk.bucket_groups, chunk.expert_parallel_bucket_groups):
            owned = [group for group in groups if isinstance(group, _OnePartGroup)]
            for group in owned:
                freezes = _part_of_group(group) in frozen
                if freezes and not group.frozen and group.ddp_config.overlap_param_gather:
                    with torch.no_grad():
                        group.start_param_sync(force_sync=True)
                group.frozen = freezes
                group.learn_again()
            if len(owned) == len(groups) and groups and groups[0].ddp_config.overlap_param_gather:
                _relink(groups)
