"""The MTP head's inputs, moved ahead by one position per depth, inside documents and across context-parallel ranks.

Megatron's own shift loops over documents on the host, ends them where their padding is not, calls point to point
without naming a group, and knows one layout. Ours is the alignment's: one all-gather for everything that moves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from bebop_megatron.alignment import Reach
from bebop_megatron.mcore.attachment import attached, layout_of
from bebop_megatron.mcore.targets import ends_of, shard_of


def rolls(
    tensors: Sequence[Tensor | None], packed: Any, group: Any, layout: str, depths: int
) -> list[list[Tensor | None]]:
    """For each depth i, give every position what the i-th one behind it in its document holds, 0 where there is none.

    Shape: tensors [..., s/cp] of any integer type or bool, or None -> for each of k depths the same.
    Collectives: one all-gather over `group`, the context-parallel group.
    """
    given = [t for t in tensors if t is not None]
    local = given[0].shape[-1]
    shard = shard_of(packed, local, group, layout, given[0].device)
    reach = Reach.of(shard, depths)
    flat = [t.movedim(-1, 0).reshape(local, -1).long() for t in given]
    table = reach.extend(torch.cat(flat, dim=1), group)
    ends = ends_of(packed, reach, shard.length)[0]
    result: list[list[Tensor | None]] = []
    for depth, rows in enumerate(reach.rows, start=1):
        inside = reach.position + depth < ends
        moved = torch.where(inside[:, None], table[rows], 0).split([f.shape[1] for f in flat], dim=1)
        done = iter(
            m.reshape(local, *t.shape[:-1]).movedim(0, -1).to(t.dtype).contiguous()
            for m, t in zip(moved, given, strict=True)
        )
        result.append([None if t is None else next(done) for t in tensors])
    return result


def roll(tensors: Sequence[Tensor | None], packed: Any, group: Any, layout: str) -> list[Tensor | None]:
    """`rolls` by one position."""
    return rolls(tensors, packed, group, layout, 1)[0]


def with_rolled_inputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method of Megatron's MTP layer that shifts and embeds the ids of one depth.

    Without our objective, and where there is neither a packed batch nor context parallelism, the original runs.
    """

    @functools.wraps(original)
    def get_embeddings(
        self: Any,
        input_ids: Tensor,
        position_ids: Tensor,
        embedding: Callable[..., Tensor],
        hidden_states: Tensor,
        packed_seq_params: Any = None,
        padding_mask: Tensor | None = None,
    ) -> tuple[Any, ...]:
        if attached(self.config) is None or (packed_seq_params is None and self.cp_group.size() == 1):
            return original(
                self,
                input_ids=input_ids,
                position_ids=position_ids,
                embedding=embedding,
                hidden_states=hidden_states,
                packed_seq_params=packed_seq_params,
                padding_mask=padding_mask,
            )
        ids, positions, padding = roll(
            [input_ids, position_ids, padding_mask], packed_seq_params, self.cp_group, layout_of(self.config)
        )
        embedded = embedding(input_ids=ids, position_ids=positions)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
        hidden = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden.requires_grad:
            # recomputation returns a result with a gradient only if one of its inputs has one
            hidden.requires_grad_(True)
        return ids, positions, padding, embedded, hidden

    return get_embeddings
