"""Key-value caches in which every row of the batch has its own length.

A `CachedAttention` stands where a model's core attention stood: it receives queries, keys and values of the
new tokens after projection, normalisation and rotation, so it is the same for grouped queries, gated
attention, latent attention, tensor parallelism, and for every backend's linear layers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Window:
    """What one forward call writes to the caches and may read from them.

    Shape: rows [b] int64, positions [b, t] int64, mask [b, 1, t, length] bool (True = attend), slots [b, t] int64,
    known [b] int64, kept [b] int64 or None. Every key written goes to its slot, by default the one of its position.
    `whole` says that `rows` are the first b rows, so that no copy is needed to read them. `known` tokens of a row were
    confirmed before the call; `kept` columns of the call are, from the first on (None: not known yet).
    """

    rows: Tensor
    positions: Tensor
    mask: Tensor
    whole: bool
    known: Tensor
    kept: Tensor | None = None
    slots: Tensor | None = None

    @property
    def length(self) -> int:
        """How many slots can be attended to."""
        return self.mask.shape[-1]


def make_window(
    positions: Tensor,
    *,
    length: int,
    last_key: Tensor | None = None,
    rows: Tensor | None = None,
    known: Tensor | None = None,
    kept: Tensor | None = None,
) -> Window:
    """Describe a call on tokens at `positions`, each of which attends to the slots up to `last_key`.

    Shape: positions [b, t] int64, last_key [b, t] (default: positions, that is causal), rows [b] (default:
    0..b-1), known and kept [b] (default: the first position, and not known). `length` is at least the
    largest `last_key` + 1; it is an argument because finding it would wait for the device.
    """
    limit = positions if last_key is None else last_key
    slots = torch.arange(length, device=positions.device)
    return Window(
        rows=torch.arange(positions.shape[0], device=positions.device) if rows is None else rows,
        positions=positions,
        mask=(slots <= limit[:, :, None])[:, None],
        whole=rows is None,
        known=positions[:, 0] if known is None else known,
        kept=kept,
    )


class Call:
    """The running forward call, seen by the caches of all layers."""

    def __init__(self) -> None:
        self._window: Window | None = None

    @property
    def window(self) -> Window:
        """What the call reads and writes."""
        assert self._window is not None, "a model with caches was run outside its decoder"
        return self._window

    @contextmanager
    def on(self, window: Window) -> Iterator[None]:
        """Run a forward call on `window`."""
        self._window = window
        try:
            yield
        finally:
            self._window = None


class CachedAttention(torch.nn.Module):
    """Attention over a cache of `batch_size` rows with `capacity` slots each.

    Shape: query [t, b, heads/tp, d], key [t, b, groups/tp, d], value [t, b, groups/tp, dv]
    -> [t, b, heads/tp * dv].
    Memory: batch_size * capacity * groups/tp * (d + dv) elements of the keys' dtype, from the first call on.
    """

    def __init__(self, call: Call, *, batch_size: int, capacity: int, scale: float | None) -> None:
        super().__init__()
        self.call, self.batch_size, self.capacity, self.scale = call, batch_size, capacity, scale
        self.keys: Tensor | None = None
        self.values: Tensor | None = None

    def _storage(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        if self.keys is None or self.values is None:
            # zeros: a masked slot has weight 0, and 0 * NaN of unwritten memory would be NaN
            self.keys = key.new_zeros(self.batch_size, self.capacity, *key.shape[2:])
            self.values = value.new_zeros(self.batch_size, self.capacity, *value.shape[2:])
        return self.keys, self.values

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for buffer in (self.keys, self.values):
            if buffer is not None:
                buffer[target] = buffer[source]

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        window = self.call.window
        keys, values = self._storage(key, value)
        slots = window.positions if window.slots is None else window.slots
        keys[window.rows[:, None], slots] = key.transpose(0, 1)
        values[window.rows[:, None], slots] = value.transpose(0, 1)
        rows = slice(len(window.rows)) if window.whole else window.rows
        out = F.scaled_dot_product_attention(
            query.permute(1, 2, 0, 3),
            keys[rows, : window.length].transpose(1, 2),
            values[rows, : window.length].transpose(1, 2),
            attn_mask=window.mask,
            scale=self.scale,
            enable_gqa=query.shape[2] != key.shape[2],
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)
