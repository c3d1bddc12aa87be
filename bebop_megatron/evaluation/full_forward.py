"""A full forward pass over finished texts, draft steps included: every anchor of a text at once, in the decoder's mode.

The backbone runs as in training, without a cache. The MTP head runs through the decoder's own modules, with keys of
depth 1 in the slots of their positions, and the keys of a chain's later steps in slots behind the text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.cache import Window, make_window
from bebop_megatron.evaluation.cached_model import CachedModel
from bebop_megatron.evaluation.filters import draft_probs, target_probs
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.patching import Patcher

# what is measured at every (anchor, step); `ExpectedAcceptance` says what each is
MEASURED = ("alpha", "p_argmax_q", "p_next", "q_next", "next_is_argmax", "target_entropy", "draft_entropy")
# of one chunk's distributions; several of that size live at once
_CHUNK_BYTES = 64 << 20


@contextmanager
def _backbone_only(model: Any) -> Iterator[None]:
    """Have `model(...)` return the backbone's final-normed hidden states, in evaluation mode."""
    patcher = Patcher()
    training = [module for module in model.modules() if module.training]
    try:
        model.eval()
        # as on a pipeline stage that neither drafts nor projects
        patcher.set(model, "post_process", False)
        patcher.set(model, "mtp_process", False)
        yield
    finally:
        patcher.restore()
        for module in training:
            module.training = True


def backbone_hidden(model: Any, tokens: Tensor) -> Tensor:
    """Final-normed hidden states of Megatron's own forward pass, without a cache.

    Shape: tokens [b, s] int64 -> [s, b, h].
    Collectives: Megatron's own of a forward pass over the tensor-parallel group.
    Memory: what Megatron's attention needs for whole sequences.
    """
    b, s = tokens.shape
    positions = torch.arange(s, device=tokens.device).expand(b, -1)
    if getattr(model, "position_embedding_type", None) == "mrope":
        # text advances all three coordinates together
        positions = positions.expand(3, b, -1)
    # Megatron's masks mark what must not be seen
    mask = torch.ones(1, 1, s, s, dtype=torch.bool, device=tokens.device).triu(1)
    # no inference mode: Megatron remembers rotary tables, and training could not use them afterwards
    with _backbone_only(model), torch.no_grad():
        return model(tokens, positions, mask)


def target_rows(start: int, stop: int, gamma: int) -> Tensor:
    """Rows whose distributions are the targets of anchors start .. stop-1: entry j+i-1 is for anchor start+j, step i.

    Shape: -> [stop - start + gamma - 1] int64; those behind the text are never counted.
    """
    return torch.arange(start + 1, stop + gamma)


class TextBatch:
    """A batch of texts of different lengths, padded behind, and the numbers of their anchors."""

    def __init__(
        self, model: Any, texts: Sequence[Sequence[int]], first: Sequence[int], config: DecodeConfig, vocab_size: int
    ) -> None:
        self.config, self.vocab_size = config, vocab_size
        device = next(model.parameters()).device
        self.lengths = torch.tensor([len(text) for text in texts], device=device)
        self.longest, self.first = max(map(len, texts)), min(first)
        # steps reach behind the last token; what stands there is never counted
        self.tokens = torch.zeros(len(texts), self.longest + config.gamma, dtype=torch.int64, device=device)
        for row, text in enumerate(texts):
            self.tokens[row, : len(text)] = torch.tensor(text, device=device)
        self.hidden = backbone_hidden(model, self.tokens[:, : self.longest])
        width = model.vocab_size
        self.chunk = max(16, min(self.longest, _CHUNK_BYTES // (4 * width * len(texts))))
        chain = self.chunk * max(0, config.gamma - 1)
        self.model = CachedModel(model, batch_size=len(texts), capacity=self.longest + config.gamma + chain)

    def measure(self) -> dict[str, Tensor]:
        """Every number of `ExpectedAcceptance` at anchors 0 .. longest - 2: [b, anchors, gamma]."""
        parts = []
        with self.model.attached():
            for start in range(0, self.longest - 1, self.chunk):
                parts.append(self._chunk(start, min(start + self.chunk, self.longest - 1)))
        return {name: torch.cat([part[name] for part in parts], 1) for name in parts[0]}

    def _window(self, start: int, stop: int, step: int) -> Window:
        """Step i > 1 of a chunk: keys of depth 1 up to each anchor, then the anchor's own of steps 2..i.

        The chunk's own keys lie behind the text, step by step, and make room for the next chunk's.
        """
        size = stop - start
        anchors = torch.arange(start, stop, device=self.tokens.device)
        base = self.longest + self.config.gamma
        own = torch.arange(size, device=anchors.device)
        slot = torch.arange(base + (step - 1) * self.chunk, device=anchors.device)
        mask = slot <= anchors[:, None]
        if self.config.attention == "chain":
            mask |= (slot >= base) & ((slot - base) % self.chunk == own[:, None])
        window = make_window((anchors + step - 1).expand(len(self.tokens), -1), length=len(slot))
        return replace(
            window,
            mask=mask.expand_as(window.mask),
            slots=(base + (step - 2) * self.chunk + own).expand_as(window.positions),
        )

    def _chunk(self, start: int, stop: int) -> dict[str, Tensor]:
        config, size = self.config, stop - start
        anchors = torch.arange(start, stop, device=self.tokens.device).expand(len(self.tokens), -1)
        hidden = self.hidden[start:stop]
        hidden = self.model.mtp(0, hidden, self.tokens[:, start + 1 : stop + 1], make_window(anchors, length=stop))
        if stop <= self.first:
            # a prompt only leaves its keys behind
            return {name: torch.zeros(*anchors.shape, config.gamma, device=hidden.device) for name in MEASURED}
        rows = target_rows(start, stop, config.gamma).clamp(max=self.longest - 1).to(hidden.device)
        target = target_probs(self.model.logits(self.hidden[rows]), config, self.vocab_size)
        steps = []
        for step in range(1, config.gamma + 1):
            if step > 1:
                fed = self.tokens[:, start + step : stop + step]
                hidden = self.model.mtp(0, hidden, fed, self._window(start, stop, step))
            logits = self.model.logits(hidden)
            q = draft_probs(logits, config, self.vocab_size)
            best = logits[..., : self.vocab_size].argmax(-1)
            p = target[:, step - 1 : step - 1 + size]
            steps.append(_measures(p, q, best, self.tokens[:, start + step + 1 : stop + step + 1]))
        return {name: torch.stack([measured[name] for measured in steps], -1) for name in steps[0]}


def _measures(p: Tensor, q: Tensor, best: Tensor, following: Tensor) -> dict[str, Tensor]:
    """Shape: p and q [..., v], best (argmax q) and following [...] int64 -> each [...]."""
    at = lambda probs, token: probs.gather(-1, token[..., None]).squeeze(-1)  # noqa: E731
    return {
        "alpha": torch.minimum(p, q).sum(-1).clamp(max=1),
        "p_argmax_q": at(p, best),
        "p_next": at(p, following),
        "q_next": at(q, following),
        "next_is_argmax": (best == following).to(p.dtype),
        "target_entropy": torch.special.entr(p).sum(-1),
        "draft_entropy": torch.special.entr(q).sum(-1),
    }
