"""Speculative decoding of a Megatron model with its own MTP head; prompts enter as soon as a row is free.

One iteration: the MTP head drafts gamma tokens per row; the backbone scores the last confirmed token and the
drafts in one chunk; verification accepts a prefix and adds one token; the MTP head writes its keys of depth 1
for what is now confirmed. A row's cache goes back by its length alone: slots behind it are overwritten before
anything attends to them.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.adaptive import AdaptiveGamma
from bebop_megatron.evaluation.cache import make_window
from bebop_megatron.evaluation.cached_model import CachedModel
from bebop_megatron.evaluation.draft import Draft, Drafter
from bebop_megatron.evaluation.filters import sample, target_probs
from bebop_megatron.evaluation.outcome import Continuation, GenerationResult, collect_records
from bebop_megatron.evaluation.rows import Rows
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.share import gathered, share_of
from bebop_megatron.evaluation.surgery import unwrapped
from bebop_megatron.evaluation.verify import verify


class SpeculativeDecoder:
    """Generates text with `model`, drafting with its MTP layers when `config.gamma` > 0.

    `vocab_size` is the true size: columns of the LM head beyond it are padding and are never drawn. Under
    tensor parallelism every rank calls `generate` with the same prompts and returns the same result.

    Raises:
        ValueError: a model that cannot be decoded this way, gamma > 0 without MTP layers, experts spread over
            the ranks that share the prompts.
    """

    def __init__(
        self, model: Any, config: DecodeConfig, *, vocab_size: int, data_parallel_group: Any | None = None
    ) -> None:
        self.model, self.config, self.vocab_size = unwrapped(model), config, vocab_size
        self.group, self.share = data_parallel_group, share_of(data_parallel_group)
        settings = self.model.config
        if self.share.size > 1 and settings.expert_model_parallel_size > settings.tensor_model_parallel_size:
            raise ValueError(
                f"experts are spread over {settings.expert_model_parallel_size} ranks, which then have to run equally "
                "often, but data-parallel ranks decode different texts: build the model with as many expert-parallel "
                "as tensor-parallel ranks at most"
            )
        if not 0 < vocab_size <= self.model.vocab_size:
            raise ValueError(f"vocab_size is {vocab_size:,}, but the model has {self.model.vocab_size:,} columns")
        # fails now, not after a long prefill
        self._attach(1)

    def _attach(self, capacity: int) -> tuple[CachedModel, Drafter | None]:
        model = CachedModel(self.model, batch_size=self.config.batch_size, capacity=capacity)
        return model, Drafter(model, self.config, self.vocab_size) if self.config.gamma else None

    def check(self, prompts: list[list[int]]) -> None:
        """See that all of these prompts can be continued.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, more positions than the model has.
        """
        self._capacity(prompts)

    def _capacity(self, prompts: list[list[int]]) -> int:
        """Slots that a row needs at most."""
        if not prompts:
            raise ValueError("no prompts to generate from")
        for index, prompt in enumerate(prompts):
            if not prompt:
                raise ValueError(f"prompt {index} is empty: generation needs at least one token to start from")
            if min(prompt) < 0 or max(prompt) >= self.vocab_size:
                raise ValueError(f"prompt {index} holds ids outside the vocabulary of {self.vocab_size:,} tokens")
        config, model = self.config, self.model
        longest = max(len(prompt) for prompt in prompts)
        needed = longest + config.max_new_tokens
        # learned positions exist for drafts behind the last token only if the table has them
        if getattr(model, "position_embedding_type", None) == "learned_absolute":
            needed += config.gamma
        if needed > model.max_sequence_length:
            raise ValueError(
                f"a prompt of {longest:,} tokens and max_new_tokens={config.max_new_tokens:,} "
                f"(gamma={config.gamma}) need {needed:,} positions, but the model has "
                f"{model.max_sequence_length:,}: shorten either"
            )
        return longest + config.max_new_tokens + config.gamma + 2

    def generate(
        self,
        prompts: list[list[int]],
        *,
        num_tokens: int | None = None,
        progress: Callable[[int], None] | None = None,
    ) -> GenerationResult:
        """Continue every prompt once; or, with `num_tokens`, prompts in turn until there are about so many.

        `progress` is told after every iteration how many tokens there are; with data-parallel ranks, how many
        there would be if all were as far.

        Collectives: Megatron's own of every forward pass; one all-gather of the results over the
        `data_parallel_group`.

        Raises:
            ValueError: an empty prompt, ids outside the vocabulary, more positions than the model has.
        """
        capacity = self._capacity(prompts)
        model, drafter = self._attach(capacity)
        told, size = progress or (lambda _: None), self.share.size
        with model.attached():
            run = _Run(self, model, drafter, capacity)
            result = run.generate(prompts, num_tokens, lambda tokens: told(tokens * size))
        return gathered(result, self.group)


class _Run:
    """One call of `generate`: the model with its caches, the rows, the random numbers."""

    def __init__(self, decoder: SpeculativeDecoder, model: CachedModel, drafter: Drafter | None, capacity: int) -> None:
        self.config, self.vocab_size = decoder.config, decoder.vocab_size
        self.model, self.drafter = model, drafter
        like = torch.empty(0, dtype=model.dtype, device=model.device)
        hidden_size = decoder.model.config.hidden_size
        self.rows = Rows(self.config, capacity=capacity, hidden_size=hidden_size, like=like)
        self.share = decoder.share
        # the ranks of a tensor-parallel group draw alike, data-parallel ranks do not
        seed = self.config.seed + self.share.rank * 1_000_003
        self.generator = torch.Generator(device=model.device).manual_seed(seed)
        self.adaptive = AdaptiveGamma(self.config.gamma, self.config.draft_cost) if self.config.adaptive_gamma else None
        self.records: list[dict[str, Tensor]] = []
        self.done: dict[int, tuple[Continuation, Tensor]] = {}

    def generate(
        self, prompts: list[list[int]], num_tokens: int | None, progress: Callable[[int], None]
    ) -> GenerationResult:
        config, rows, share = self.config, self.rows, self.share
        if num_tokens is not None:
            num_tokens = -(-num_tokens // share.size)
        start, admitted, produced = time.perf_counter(), 0, 0
        while True:
            # what runs is counted in full, so that the total overshoots by one sequence at most
            reserved = produced + rows.active * config.max_new_tokens
            free = config.batch_size - rows.active
            if num_tokens is None:
                count = min(free, share.count(len(prompts)) - admitted)
            else:
                count = min(free, max(0, -(-(num_tokens - reserved) // config.max_new_tokens)))
            if count > 0:
                indices = [share.sequence(index) % len(prompts) for index in range(admitted, admitted + count)]
                self._prefill(rows.add([(index, prompts[index]) for index in indices], admitted))
                admitted += count
                produced += self._harvest()
            elif rows.active:
                self._iterate()
                produced += self._harvest()
                progress(produced + rows.running)
            else:
                break
        order = sorted(self.done)
        return GenerationResult(
            sequences=[self.done[index][0] for index in order],
            # a rank may have no share at all
            counts=torch.stack([self.done[index][1] for index in order])
            if order
            else torch.zeros(0, config.gamma, 5, dtype=torch.float64),
            seconds=time.perf_counter() - start,
            records=collect_records(self.records),
        )

    def _harvest(self) -> int:
        """Take out finished sequences; returns how many tokens they have."""
        total = 0
        for index, sequence, counts in self.rows.take_finished(self.model.move_row):
            self.done[index] = (sequence, counts)
            total += len(sequence.tokens)
        return total

    def _target(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and filtered probabilities of the backbone: [t, b, h] -> twice [b, t, v]."""
        logits = self.model.logits(hidden)
        return logits, target_probs(logits, self.config, self.vocab_size)

    def _append(self, rows: slice, tokens: Tensor, given: Tensor, logits: Tensor, probs: Tensor) -> None:
        index = tokens[..., None]
        raw = None
        if self.config.raw_log_probs:
            raw = logits[..., : self.vocab_size].log_softmax(-1).gather(2, index).squeeze(2)
        self.rows.append(rows, tokens, given, probs.gather(2, index).squeeze(2).log(), raw)

    def _prefill(self, added: slice) -> None:
        """Fill the caches of new rows with their prompts and draw their first token, which needs no draft."""
        rows, device = self.rows, self.model.device
        last = rows.lengths[added] - 1
        cache_rows = torch.arange(added.start, added.stop, device=device)
        longest, size = max(rows.prompt_lengths[added]), self.config.prefill_chunk
        chunks = [slice(first, min(first + size, longest)) for first in range(0, longest, size)]
        positions = torch.arange(longest, device=device).expand(len(last), -1)
        at_last = (last, torch.arange(len(last), device=device))

        parts = []
        for chunk in chunks:
            # a shorter prompt ends before the chunk does
            window = make_window(
                positions[:, chunk],
                length=chunk.stop,
                rows=cache_rows,
                known=(last + 1).clamp(max=chunk.start),
                kept=(last + 1 - chunk.start).clamp(0, chunk.stop - chunk.start),
            )
            parts.append(self.model.backbone(rows.tokens[added, chunk], window))
        hidden = torch.cat(parts)
        logits, probs = self._target(hidden[at_last][None])
        first_token = sample(probs[:, 0], self.generator)[:, None]
        self._append(added, first_token, torch.ones_like(last), logits, probs)

        if self.drafter is None:
            return
        parts = []
        for chunk in chunks:
            tokens = rows.tokens[added, chunk.start + 1 : chunk.stop + 1]
            parts.append(
                self.drafter.confirm(hidden[chunk], tokens, positions[:, chunk], length=chunk.stop, rows=cache_rows)
            )
        rows.hidden[added] = torch.cat(parts)[at_last]

    def _draft(self, anchors: Tensor, gamma: int, length: int) -> Draft:
        if self.drafter is None:
            nothing = anchors.new_zeros(len(anchors), 0)
            return Draft(nothing, nothing.float()[..., None].expand(-1, -1, self.model.model.vocab_size))
        hidden = self.rows.hidden[None, : len(anchors)]
        return self.drafter.propose(hidden, anchors, gamma=gamma, length=length, generator=self.generator)

    def _iterate(self) -> None:
        """Draft, score, verify and confirm, once for every active row."""
        rows, config = self.rows, self.config
        active = slice(rows.active)
        # from verifications that are over: a choice that saw the drafts would change the distribution
        gamma = config.gamma if self.adaptive is None else self.adaptive.choose()
        last, length = rows.lengths[active] - 1, rows.longest + gamma
        draft = self._draft(last - 1, gamma, length)
        tokens = torch.cat([rows.tokens[active].gather(1, last[:, None]), draft.tokens], 1)
        positions = last[:, None] + torch.arange(gamma + 1, device=last.device)
        # without drafts nothing can be rejected
        kept = torch.ones_like(last) if gamma == 0 else None
        hidden = self.model.backbone(tokens, make_window(positions, length=length, kept=kept))
        logits, probs = self._target(hidden)
        out = verify(probs, draft.probs, draft.tokens, config.rule, generator=self.generator)

        rows.count(out)
        if self.adaptive is not None:
            self.adaptive.observe(out)
        if config.record:
            steps = {"tokens": draft.tokens, "accept_prob": out.accept_prob, "alpha": out.alpha}
            rows_now = {"sequence": rows.sequence[active].clone(), "anchor": last - 1}
            self.records.append({**rows_now, **steps, "num_accepted": out.num_accepted})
        # columns behind the last new token hold any id: nothing of them is kept
        confirmed = out.tokens.clamp(min=0)
        self._append(active, confirmed, out.num_accepted + 1, logits, probs)
        if self.drafter is not None:
            deeper = self.drafter.confirm(hidden, confirmed, positions, length=length)
            rows.hidden[active] = deeper[out.num_accepted, torch.arange(len(last), device=last.device)]
