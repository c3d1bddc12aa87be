"""Acceptance that a full forward pass over finished text expects: no drafts, no verification, no rolled-back caches.

Anchor t of a text x_0 .. x_{n-1} stands for a verification that starts with x_{t+1} confirmed. Draft step i takes the
hidden state of step i-1 and the embedding of x_{t+i}; its target is the backbone's distribution p_{t+i}; what it drafts
is judged as x_{t+i+1}. Every anchor of a text is computed, in the decoder's attention mode; the backbone runs as in
training, without a cache.

Two statements hold exactly and are what a decoder is tested by (`agreement.py`):

(a) at a step that a decoder reached, the draft is accepted with probability `step(rule)`: the drafts before it were
    accepted, so they are the text;
(b) on text sampled from the target, a verification started at an anchor accepts its first i drafts with probability
    E[`prefix(rule)`], step i's acceptance weighted with what turns sampled text into accepted text.

On other text the product of the steps, `teacher_forced(rule)`, is an estimate without that guarantee.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.cached_model import CachedModel
from bebop_megatron.evaluation.draft import Drafter
from bebop_megatron.evaluation.estimate import Estimate, clustered_mean
from bebop_megatron.evaluation.full_forward import MEASURED, TextBatch
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.surgery import unwrapped
from bebop_megatron.evaluation.verify import RULES


@dataclass(frozen=True)
class ExpectedAcceptance:
    """Acceptance of every draft step at every anchor, text by text.

    Shape: sequence, anchor [n] int64: index of the text and position t. The rest is [n, gamma], column i-1 for step i:

    known           bool     row t+i lies in the text: the numbers without "next" mean something
    next_known      bool     so does the token x_{t+i+1}: those with "next" do, too
    alpha           float32  sum min(p, q): acceptance under rejection
    p_argmax_q      float32  p(argmax q): acceptance under target-only
    p_next, q_next  float32  probabilities of the text's x_{t+i+1}
    next_is_argmax  bool     x_{t+i+1} is what target-only would have drafted
    target_entropy, draft_entropy  float32  nats, of the distributions in force (temperature and filters applied)
    """

    sequence: Tensor
    anchor: Tensor
    known: Tensor
    next_known: Tensor
    alpha: Tensor
    p_argmax_q: Tensor
    p_next: Tensor
    q_next: Tensor
    next_is_argmax: Tensor
    target_entropy: Tensor
    draft_entropy: Tensor

    @property
    def gamma(self) -> int:
        """Draft steps computed."""
        return self.known.shape[1]

    @property
    def complete(self) -> Tensor:
        """Anchors all of whose steps are known: [n] bool."""
        return self.known.all(1)

    def select(self, anchors: Tensor) -> ExpectedAcceptance:
        """Some of the anchors.

        Shape: anchors [n] bool (a mask), or [m] int64 (indices).
        """
        return ExpectedAcceptance(**{field.name: getattr(self, field.name)[anchors] for field in fields(self)})

    def step(self, rule: str) -> Tensor:
        """Acceptance of step i, given that the text's tokens were accepted before it: [n, gamma] float32.

        Raises:
            ValueError: unknown rule.
        """
        if rule not in RULES:
            raise ValueError(f"unknown verification rule {rule!r}: choose one of {', '.join(sorted(RULES))}")
        return self.alpha if rule == "rejection" else self.p_argmax_q

    def prefix(self, rule: str) -> Tensor:
        """Unbiased for the probability that a verification accepts its first i drafts, on text sampled from the target.

        prod_{k<i} w_k * step_i, with w_k = min(1, q_k(x)/p_k(x)) under rejection and [x = argmax q_k] under
        target-only, x the text's token that step k drafts for. 0 where not known.

        Shape: -> [n, gamma] float64.
        """
        if rule == "target-only":
            weight = self.next_is_argmax.double()
        else:
            p, q = self.p_next.double(), self.q_next.double()
            # the comparison first: p = 0, text that the filters exclude, divides nothing
            weight = torch.where(q < p, q / p, 1.0)
        before = torch.cat([weight.new_ones(len(weight), 1), weight[:, :-1].cumprod(1)], 1)
        return (before * self.step(rule).double()).where(self.known, 0.0)

    def teacher_forced(self, rule: str) -> Tensor:
        """prod_{k<=i} step_k: the training metric's estimate, for any text: [n, gamma] float64, 0 where not known."""
        return self.step(rule).double().cumprod(1).where(self.known, 0.0)

    def rate_per_step(self, rule: str, *, teacher_forced: bool = False) -> list[Estimate]:
        """Prefix acceptance of steps 1..gamma, over complete anchors; texts are the independent units."""
        kept = self.complete
        values = (self.teacher_forced(rule) if teacher_forced else self.prefix(rule))[kept]
        return [clustered_mean(column, self.sequence[kept]) for column in values.unbind(1)]

    def accept_length(self, rule: str, *, gamma: int | None = None, teacher_forced: bool = False) -> Estimate:
        """1 + E[L] of verifications with `gamma` drafts (all that were computed), started at every complete anchor.

        A decoder starts fewer verifications where drafts are easy: to compare with one, `select` its anchors first.
        """
        kept = self.complete
        values = (self.teacher_forced(rule) if teacher_forced else self.prefix(rule))[kept, :gamma]
        return clustered_mean(1 + values.sum(1), self.sequence[kept])

    def accept_rate(self, rule: str, *, gamma: int | None = None, teacher_forced: bool = False) -> Estimate:
        """E[L] / gamma of the same."""
        gamma = self.gamma if gamma is None else gamma
        length = self.accept_length(rule, gamma=gamma, teacher_forced=teacher_forced)
        return length.scaled(1 / gamma, -1 / gamma)


def _check(
    model: Any, texts: Sequence[Sequence[int]], prompt_lengths: Sequence[int], config: DecodeConfig, vocab_size: int
) -> None:
    if config.gamma < 1:
        raise ValueError("expected acceptance needs at least one draft step: gamma is 0")
    if model.config.sequence_parallel:
        raise ValueError("expected acceptance needs a model without sequence parallelism: build it without")
    if len(prompt_lengths) != len(texts):
        raise ValueError(f"there are {len(texts)} texts, but {len(prompt_lengths)} prompt lengths")
    Drafter(CachedModel(model, batch_size=1, capacity=1), config, vocab_size)
    for module in model.mtp.modules():
        mixer = getattr(module, "mixer", None) or getattr(module, "self_attention", None)
        if mixer is not None and type(mixer).__name__ != "IdentityOp" and not hasattr(mixer, "core_attention"):
            raise ValueError(
                f"expected acceptance needs MTP layers that remember by keys and values, not {type(mixer).__name__}"
            )
    for index, text in enumerate(texts):
        if len(text) > model.max_sequence_length:
            raise ValueError(
                f"text {index} has {len(text):,} tokens, but the model has {model.max_sequence_length:,} positions"
            )
        if len(text) and (min(text) < 0 or max(text) >= vocab_size):
            raise ValueError(f"text {index} holds ids outside the vocabulary of {vocab_size:,} tokens")


def expected_acceptance(
    model: Any,
    texts: Sequence[Sequence[int]],
    config: DecodeConfig,
    *,
    vocab_size: int,
    prompt_lengths: Sequence[int] | None = None,
    batch_tokens: int = 4096,
    progress: Callable[[int], None] | None = None,
) -> ExpectedAcceptance:
    """Acceptance of `config.gamma` draft steps at every anchor of `texts`, by one full forward pass.

    Of `config` count gamma, temperature, filters and attention; both rules come out of one call, also where the text
    was produced under the other or without drafts. Anchors begin at `prompt_lengths - 1` (default: at the first
    token), as a decoder's do. `progress` is told how many tokens are done. Under tensor parallelism every rank calls
    this with the same texts and gets the same numbers.

    Shape: texts of n_j tokens -> sum_j max(0, n_j - max(1, prompt_length_j)) anchors, in the order of the texts.
    Collectives: Megatron's own of a forward pass and of gamma MTP layers, and one all-gather of logits per chunk and
    step, over the tensor-parallel group.
    Memory: keys and values of a batch of `batch_tokens` tokens (one text at least), and a few times 64 MiB of
    distributions, whatever the length of the text.

    Raises:
        ValueError: a model that cannot draft this way, ids outside the vocabulary, more positions than the model has.
    """
    model = unwrapped(model)
    lengths = [1] * len(texts) if prompt_lengths is None else list(prompt_lengths)
    _check(model, texts, lengths, config, vocab_size)
    first = [max(0, length - 1) for length in lengths]
    # neighbours in length share a batch, so that little is padding
    order = sorted(range(len(texts)), key=lambda index: len(texts[index]))
    found: dict[int, dict[str, Tensor]] = {}
    batch: list[int] = []
    done = 0
    for place, index in enumerate(order):
        if len(texts[index]) - 1 <= first[index]:
            continue
        batch.append(index)
        following = len(texts[order[place + 1]]) if place + 1 < len(order) else 0
        if following and (len(batch) + 1) * following <= batch_tokens:
            continue
        found |= _measured(model, texts, first, batch, config, vocab_size)
        done += sum(len(texts[i]) for i in batch)
        batch = []
        if progress is not None:
            progress(done)
    if batch:
        found |= _measured(model, texts, first, batch, config, vocab_size)
    return _assembled(found, first, config.gamma)


def _measured(
    model: Any,
    texts: Sequence[Sequence[int]],
    first: Sequence[int],
    batch: list[int],
    config: DecodeConfig,
    vocab_size: int,
) -> dict[int, dict[str, Tensor]]:
    """The numbers of some texts, each cut to its own anchors: [anchors, gamma]."""
    numbers = TextBatch(model, [texts[i] for i in batch], [first[i] for i in batch], config, vocab_size).measure()
    numbers = {name: value.cpu() for name, value in numbers.items()}
    return {
        index: {name: value[row, first[index] : len(texts[index]) - 1] for name, value in numbers.items()}
        for row, index in enumerate(batch)
    }


def _assembled(found: dict[int, dict[str, Tensor]], first: Sequence[int], gamma: int) -> ExpectedAcceptance:
    order = sorted(found)
    sizes = [len(found[index]["alpha"]) for index in order]
    anchors = [first[index] + torch.arange(size) for index, size in zip(order, sizes, strict=True)]
    step = torch.arange(1, gamma + 1)
    # an anchor's distance from the last anchor, which has one known step
    left = [size - torch.arange(size)[:, None] for size in sizes]
    known = torch.cat([*(step <= each for each in left), torch.zeros(0, gamma, dtype=torch.bool)])
    next_known = torch.cat([*(step < each for each in left), torch.zeros(0, gamma, dtype=torch.bool)])
    numbers = {}
    for name in MEASURED:
        value = torch.cat([*(found[index][name] for index in order), torch.zeros(0, gamma)]).float()
        numbers[name] = value.where(next_known if "next" in name else known, 0.0)
    numbers["next_is_argmax"] = numbers["next_is_argmax"] > 0
    nothing = torch.zeros(0, dtype=torch.int64)
    sequence = torch.tensor(order, dtype=torch.int64).repeat_interleave(torch.tensor(sizes, dtype=torch.int64))
    return ExpectedAcceptance(
        sequence=sequence, anchor=torch.cat([*anchors, nothing]), known=known, next_known=next_known, **numbers
    )
