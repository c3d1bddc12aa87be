"""Drafts tokens with the MTP head, exactly as an inference engine does.

Step i at anchor t takes the hidden state of step i-1 and the embedding of x_{t+i}, sits at rotary position t+i-1 and
predicts x_{t+i+1}. It writes its key to slot t+i-1. In mode `chain` it attends to every slot up to there: keys of
depth 1 up to the anchor, then the chain's own. In mode `first-depth` it attends to slots up to the anchor only. The
keys of steps 2, 3, ... are temporary: once the tokens are confirmed, `confirm` overwrites them with keys of depth 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.evaluation.cache import make_window
from bebop_megatron.evaluation.cached_model import CachedModel
from bebop_megatron.evaluation.filters import draft_probs, sample
from bebop_megatron.evaluation.settings import DecodeConfig


@dataclass(frozen=True)
class Draft:
    """Tokens to verify, and what they were drawn from (None: the likeliest, under target-only).

    Shape: tokens [b, gamma] int64, probs [b, gamma, v] float32.
    """

    tokens: Tensor
    probs: Tensor | None


class Drafter:
    """The MTP layers of a model as a source of drafts.

    Raises:
        ValueError: the model has no MTP layers, or several distinct ones and gamma above 1.
    """

    def __init__(self, model: CachedModel, config: DecodeConfig, vocab_size: int) -> None:
        layers = getattr(getattr(model.model, "mtp", None), "layers", None)
        if not layers:
            raise ValueError(
                f"gamma={config.gamma} needs MTP layers to draft with, and the model has none: use gamma=0, "
                "or a model trained with --mtp-num-layers"
            )
        if len(layers) > 1 and config.gamma > 1:
            raise ValueError(
                f"the model has {len(layers)} distinct MTP layers. Keys of depth 1 belong to the first, "
                f"so attention mode {config.attention!r} is defined for one repeated layer only "
                "(--mtp-use-repeated-layer): use gamma=1"
            )
        self.model, self.config, self.vocab_size = model, config, vocab_size

    def confirm(
        self, hidden: Tensor, tokens: Tensor, positions: Tensor, *, length: int, rows: Tensor | None = None
    ) -> Tensor:
        """Run step 1 on confirmed anchors, which writes their keys of depth 1.

        Shape: hidden [t, b, h] of the backbone at anchors `positions` [b, t], tokens [b, t] the tokens after
        them -> [t, b, h]. Columns behind a row's last confirmed anchor may hold anything: their slots are
        written again before anything attends to them.
        """
        return self.model.mtp(0, hidden, tokens, make_window(positions, length=length, rows=rows))

    def propose(self, hidden: Tensor, anchors: Tensor, *, gamma: int, length: int, generator: torch.Generator) -> Draft:
        """Draft `gamma` tokens per row.

        Shape: hidden [1, b, h], what `confirm` gave at the anchors [b] int64. `length` covers anchors +
        gamma.
        """
        anchor = anchors[:, None]
        tokens, probs = [], []
        for step in range(1, gamma + 1):
            if step > 1:
                last_key = None if self.config.attention == "chain" else anchor
                window = make_window(anchor + step - 1, length=length, last_key=last_key)
                hidden = self.model.mtp(0, hidden, tokens[-1][:, None], window)
            logits = self.model.logits(hidden)[:, 0]
            if self.config.rule == "rejection":
                probs.append(draft_probs(logits, self.config, self.vocab_size))
                tokens.append(sample(probs[-1], generator))
            else:
                tokens.append(logits[:, : self.vocab_size].argmax(-1))
        return Draft(torch.stack(tokens, 1), torch.stack(probs, 1) if probs else None)
