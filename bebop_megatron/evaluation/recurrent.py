"""States of gated delta net layers in which every row of the batch has its own length and can go back.

A recurrent state cannot forget a token. So a row keeps its state at the last token known to stay, and beside it the
inputs of the rule for the tokens of the newest chunk, some of which verification may reject. The next call says by
its position how many were accepted: they are run through the rule once more, the rejected ones with step size 0 and
decay 1, which leaves the state as it is. As with keys and values, going back is a matter of the length alone.

Keeping the state after every token of a chunk would save that second run, and cost gamma + 1 more states: for
Qwen3-Next 2 MiB each, per row and layer, against 50 KiB for a token's inputs.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_megatron.evaluation.cache import Call
from bebop_megatron.mcore.delta_net import DeltaNetParts, Projection, RuleInputs


def _masked(inputs: RuleInputs, keep: Tensor) -> RuleInputs:
    """Tokens outside `keep` [b, t] leave the state as it is."""
    g, beta = (torch.where(keep[..., None], x, 0.0) for x in (inputs.g, inputs.beta))
    return RuleInputs(inputs.query, inputs.key, inputs.value, g, beta)


def _window(mixed: Tensor, start: Tensor, size: int) -> Tensor:
    """`size` entries of every row from its own `start` on: mixed [b, n, c], start [b] -> [b, size, c]."""
    index = start[:, None] + torch.arange(size, device=mixed.device)
    return mixed.gather(1, index[..., None].expand(-1, -1, mixed.shape[2]))


class CachedDeltaNet(torch.nn.Module):
    """Stands where a gated delta net mixer stood.

    Shape: hidden [t, b, h] -> ([t, b, h], bias).
    Memory, per row: one state, heads/tp * d_k * d_v float32; kernel - 1 inputs of the convolution, c/tp each; and for
    every token of the longest chunk not known to stay (gamma + 1) c/tp + heads/tp * (d_k + d_v + 2) elements.
    """

    def __init__(self, call: Call, layer: Any, *, batch_size: int) -> None:
        super().__init__()
        self.call, self.layer, self.batch_size = call, layer, batch_size
        self.parts = DeltaNetParts(layer)
        # everything by row; empty until the first call tells sizes
        self.stored: dict[str, Tensor] = {}

    def move(self, source: int, target: int) -> None:
        """Copy row `source` over row `target`."""
        for buffer in self.stored.values():
            buffer[target] = buffer[source]

    def _storage(self, mixed: Tensor) -> dict[str, Tensor]:
        if not self.stored:
            b = self.batch_size
            self.stored = {
                "length": mixed.new_zeros(b, dtype=torch.int64),
                "state": self.parts.empty_state(b, mixed),
                "mixed": mixed.new_zeros(b, self.parts.reach, mixed.shape[2]),
            }
        return self.stored

    def _caught_up(self, rows: Any, known: Tensor) -> tuple[Tensor, Tensor]:
        """State and convolution inputs of `rows` after `known` [b] tokens."""
        stored = self.stored
        state, mixed = stored["state"][rows], stored["mixed"][rows]
        if "pending_key" in stored:
            accepted = known - stored["length"][rows]
            key, value, g, beta = (stored[f"pending_{name}"][rows] for name in ("key", "value", "g", "beta"))
            keep = torch.arange(key.shape[1], device=key.device) < accepted[:, None]
            # what a query would read is of no interest here
            inputs = _masked(RuleInputs(key, key, value, g, beta), keep)
            _, after = self.parts.rule(inputs, state, keep_state=True)
            assert after is not None
            state = after
            mixed = torch.cat([mixed, stored["pending_mixed"][rows]], 1)
            mixed = _window(mixed, accepted.clamp(min=0), self.parts.reach)
        # a row that starts anew holds the states of the sequence before
        fresh = known == 0
        return state.masked_fill(fresh[:, None, None, None], 0.0), mixed.masked_fill(fresh[:, None, None], 0.0)

    def _remember(self, rows: Tensor, projection: Projection, inputs: RuleInputs) -> None:
        """Keep what the next call may have to run again."""
        new = {
            "mixed": projection.mixed,
            "key": inputs.key,
            "value": inputs.value,
            "g": inputs.g,
            "beta": inputs.beta,
        }
        t = projection.mixed.shape[1]
        for name, value in new.items():
            name = f"pending_{name}"
            if name not in self.stored:
                self.stored[name] = value.new_zeros(self.batch_size, t, *value.shape[2:])
            elif self.stored[name].shape[1] < t:
                old = self.stored[name]
                self.stored[name] = F.pad(old, (0, 0) * (old.ndim - 2) + (0, t - old.shape[1]))
            self.stored[name][rows, :t] = value

    def forward(self, hidden_states: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor | None]:
        window, parts = self.call.window, self.parts
        projection = parts.project(hidden_states)
        stored = self._storage(projection.mixed)
        rows = slice(len(window.rows)) if window.whole else window.rows
        state, before = self._caught_up(rows, window.known)
        mixed = torch.cat([before, projection.mixed], 1)
        inputs = parts.rule_inputs(parts.convolve(mixed), projection)
        length = window.known
        if window.kept is None:
            out = parts.rule(inputs, state, keep_state=False)[0]
            self._remember(window.rows, projection, inputs)
        else:
            keep = torch.arange(mixed.shape[1] - parts.reach, device=mixed.device) < window.kept[:, None]
            out, after = parts.rule(_masked(inputs, keep), state, keep_state=True)
            assert after is not None
            state = after
            before = _window(mixed, window.kept, parts.reach)
            length = length + window.kept
        stored["state"][rows], stored["mixed"][rows], stored["length"][rows] = state, before, length
        return parts.output(out, projection.gate)
