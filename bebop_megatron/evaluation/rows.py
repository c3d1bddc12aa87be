"""The sequences being decoded: rows 0..n-1 of a batch, each with its own length, none waiting for another."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from bebop_megatron.evaluation.outcome import Continuation
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.verify import Verification


class Rows:
    """State of the running sequences, on the device.

    Shape: tokens, log_probs, raw_log_probs [batch_size, capacity]; lengths, limits, sequence [batch_size]
    int64: confirmed tokens, length to stop at, index of the sequence; hidden [batch_size, h]: output of draft
    step 1 at the last anchor; counts [batch_size, gamma, 5] float64. The rows in use are always the first
    `active`.
    """

    def __init__(self, config: DecodeConfig, *, capacity: int, hidden_size: int, like: Tensor) -> None:
        b, self.config, self.active = config.batch_size, config, 0
        self.tokens = like.new_zeros(b, capacity, dtype=torch.int64)
        self.log_probs = like.new_zeros(b, capacity, dtype=torch.float32)
        self.raw_log_probs = like.new_zeros(b, capacity if config.raw_log_probs else 0, dtype=torch.float32)
        self.lengths, self.limits, self.sequence = (like.new_zeros(b, dtype=torch.int64) for _ in range(3))
        self.hidden = like.new_zeros(b, hidden_size)
        self.counts = like.new_zeros(b, config.gamma, 5, dtype=torch.float64)
        self.finished = like.new_zeros(b, dtype=torch.bool)
        self.stops = torch.tensor(config.stop_tokens, dtype=torch.int64, device=like.device)
        # known on the host: length of the longest row, tokens generated in all rows
        self.longest, self.running = 0, 0
        self.prompts: list[int] = [0] * b
        self.prompt_lengths: list[int] = [0] * b

    def add(self, prompts: list[tuple[int, list[int]]], first_sequence: int) -> slice:
        """Give `prompts` (index, tokens) the rows behind the active ones; returns those rows."""
        added = slice(self.active, self.active + len(prompts))
        for row, (index, tokens) in enumerate(prompts, self.active):
            self.tokens[row, : len(tokens)] = torch.tensor(tokens, device=self.tokens.device)
            self.prompts[row], self.prompt_lengths[row] = index, len(tokens)
        lengths = torch.tensor([len(tokens) for _, tokens in prompts], device=self.tokens.device)
        self.lengths[added] = lengths
        self.limits[added] = lengths + self.config.max_new_tokens
        self.sequence[added] = torch.arange(first_sequence, first_sequence + len(prompts), device=lengths.device)
        self.counts[added] = 0
        self.finished[added] = False
        self.active = added.stop
        return added

    def append(self, rows: slice, tokens: Tensor, given: Tensor, log_probs: Tensor, raw: Tensor | None) -> None:
        """Confirm new tokens, up to the first stop token and the length limit.

        Shape: tokens, log_probs, raw [n, t]; given [n] int64: how many of each row's tokens count.
        """
        column = torch.arange(tokens.shape[1], device=tokens.device)
        lengths = self.lengths[rows]
        stop = torch.isin(tokens, self.stops) & (column < given[:, None])
        before_stop = stop.long().cumsum(1) - stop.long() == 0
        kept = (before_stop & (column < given[:, None])).sum(1)
        kept = torch.minimum(kept, self.limits[rows] - lengths)
        places = lengths[:, None] + column
        # what lies behind the new length is overwritten by the next call
        self.tokens[rows].scatter_(1, places, tokens)
        self.log_probs[rows].scatter_(1, places, log_probs)
        if raw is not None:
            self.raw_log_probs[rows].scatter_(1, places, raw)
        grown = lengths + kept
        self.finished[rows] = stop.any(1) | (grown >= self.limits[rows])
        self.lengths[rows] = grown

    def count(self, out: Verification) -> None:
        """Add one verification of every active row, of any number of drafts up to gamma, to its acceptance counts."""
        drafts = out.alpha.shape[1]
        step = torch.arange(drafts, device=out.num_accepted.device)
        reached = out.num_accepted[:, None] >= step
        accepted = out.num_accepted[:, None] > step
        values = [reached, accepted, reached * out.accept_prob, reached * out.alpha, torch.ones_like(reached)]
        self.counts[: self.active, :drafts] += torch.stack([value.double() for value in values], -1)

    def take_finished(self, move_row: Callable[[int, int], None]) -> list[tuple[int, Continuation, Tensor]]:
        """Remove what is finished: (index of the sequence, the sequence, its counts [gamma, 5]).

        The last row moves into each gap; `move_row(source, target)` does the same to what lives elsewhere.
        The one place that waits for the device.
        """
        rows = slice(self.active)
        state = torch.stack([self.lengths[rows], self.finished[rows].long(), self.sequence[rows]])
        lengths, finished, sequence = state.tolist()
        done = []
        for row in reversed(range(self.active)):
            if not finished[row]:
                continue
            done.append((sequence[row], self._sequence(row, lengths[row]), self.counts[row].to("cpu", copy=True)))
            self.active -= 1
            lengths[row] = lengths[self.active]
            if row != self.active:
                self._move(self.active, row)
                move_row(self.active, row)
        lengths = lengths[: self.active]
        self.longest = max(lengths, default=0)
        self.running = sum(lengths) - sum(self.prompt_lengths[: self.active])
        return done

    def _sequence(self, row: int, length: int) -> Continuation:
        new = slice(self.prompt_lengths[row], length)
        tokens = self.tokens[row, new].tolist()
        return Continuation(
            prompt=self.prompts[row],
            tokens=tokens,
            log_probs=self.log_probs[row, new].tolist(),
            raw_log_probs=self.raw_log_probs[row, new].tolist() if self.config.raw_log_probs else None,
            finish="stop" if tokens and tokens[-1] in self.config.stop_tokens else "length",
        )

    def _move(self, source: int, target: int) -> None:
        for values in vars(self).values():
            if (isinstance(values, Tensor) and values is not self.stops) or isinstance(values, list):
                values[target] = values[source]
