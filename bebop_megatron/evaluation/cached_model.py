"""Runs a Megatron model on new tokens only, with every row of the batch at its own position."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.cache import CachedAttention, Call, Window
from bebop_megatron.evaluation.surgery import (
    gathered,
    refuse_unsupported,
    rotary_table,
    unwrapped,
    with_caches,
)

if TYPE_CHECKING:
    from bebop_megatron.evaluation.recurrent import CachedDeltaNet


class CachedModel:
    """Backbone, MTP layers and LM head of a Megatron model, on the rows and slots of a `Window`.

    Raises:
        ValueError: the model is split over pipeline or context ranks, or has layers without a cache that can
        go back.
    """

    def __init__(self, model: Any, *, batch_size: int, capacity: int) -> None:
        self.model = unwrapped(model)
        refuse_unsupported(self.model)
        self.batch_size, self.capacity = batch_size, capacity
        parameter = next(self.model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        # only padding columns can lie behind the last learned position
        learned = getattr(self.model, "position_embedding_type", None) == "learned_absolute"
        self._last_embedded = self.model.max_sequence_length - 1 if learned else capacity
        self._call = Call()
        self._caches: list[CachedAttention | CachedDeltaNet] = []
        self._table: Tensor | None = None

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Hold the caches in the model; nothing else may run the model meanwhile."""
        with torch.inference_mode(False), torch.no_grad():
            self._table = rotary_table(self.model, self.capacity)
        sizes = {"batch_size": self.batch_size, "capacity": self.capacity}
        with with_caches(self.model, self._call, **sizes) as self._caches, torch.inference_mode():
            yield
        self._caches = []

    def move_row(self, source: int, target: int) -> None:
        """Copy everything known about row `source` over row `target`."""
        for cache in self._caches:
            cache.move(source, target)

    def _rotary(self, window: Window) -> Tensor | None:
        return None if self._table is None else gathered(self._table, window.positions)

    def backbone(self, tokens: Tensor, window: Window) -> Tensor:
        """Final-normed hidden states of new tokens.

        Shape: tokens [b, t] int64 -> [t, b, h].
        Collectives: Megatron's own of a forward pass over the tensor-parallel group.
        """
        positions = window.positions.clamp(max=self._last_embedded)
        embedded = self.model.embedding(input_ids=tokens, position_ids=positions)
        with self._call.on(window):
            return self.model.decoder(hidden_states=embedded, attention_mask=None, rotary_pos_emb=self._rotary(window))

    def mtp(self, layer: int, hidden: Tensor, tokens: Tensor, window: Window) -> Tensor:
        """One application of an MTP layer: the hidden states of one draft step to those of the next.

        Shape: hidden [t, b, h] (backbone or previous step, final-normed), tokens [b, t] int64, the token
        after the last one that `hidden` knows of -> [t, b, h].
        Collectives: Megatron's own of one layer over the tensor-parallel group.
        """
        with self._call.on(window):
            return self.model.mtp.layers[layer].forward_single_position(
                hidden_states=hidden,
                next_token_ids=tokens,
                # of the tokens, for learned positions: one after the anchor's
                position_ids=(window.positions + 1).clamp(max=self._last_embedded),
                embedding=self.model.embedding,
                rotary_pos_emb=self._rotary(window),
            )

    def logits(self, hidden: Tensor) -> Tensor:
        """LM head over the whole vocabulary, padding columns included.

        Shape: hidden [t, b, h] -> [b, t, v padded] float32.
        Collectives: one all-gather over the tensor-parallel group.
        """
        model = self.model
        weight = model.shared_embedding_or_output_weight() if model.share_embeddings_and_output_weights else None
        logits, _ = model.output_layer(hidden, weight=weight, runtime_gather_output=True)
        if model.config.use_mup:
            logits = model._scale_logits(logits)
        return logits.transpose(0, 1).float()
