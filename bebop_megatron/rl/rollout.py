"""A rollout worker: decodes groups of completions with the policy it was given, and has them rewarded.

Nothing here knows of Ray: `loop.py` makes an actor of it, tests call it.
"""

from __future__ import annotations

import hashlib
import itertools
import time
from collections.abc import Iterator
from typing import Any

import torch

from bebop_megatron.evaluation import RULES, DecodeConfig, GenerationResult, SpeculativeDecoder, expected_acceptance
from bebop_megatron.evaluation.loading import load_model
from bebop_megatron.evaluation.outcome import ACCEPTED, REACHED
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.ledger import Order
from bebop_megatron.rl.records import Event, Group, Probe, Rollout
from bebop_megatron.rl.reward import Scorer
from bebop_megatron.rl.task import Codec, Problem, Task
from bebop_megatron.rl.tasks import make_task
from bebop_megatron.rl.weights import Shards, load_shards


def problem_stream(task: Task, seed: int) -> Iterator[Problem]:
    """Problems without end.

    Raises:
        ValueError: a task without problems.
    """
    while True:
        empty = True
        for problem in task.problems(seed):
            empty = False
            yield problem
        if empty:
            raise ValueError("the task has no problems")


class ProblemList:
    """Problem n of a task, whoever asks and in whatever order."""

    def __init__(self, task: Task, seed: int) -> None:
        self._stream = problem_stream(task, seed)
        self._known: list[Problem] = []

    def get(self, first: int, count: int) -> list[Problem]:
        """Problems first .. first + count - 1."""
        missing = first + count - len(self._known)
        self._known += itertools.islice(self._stream, max(0, missing))
        return self._known[first : first + count]


def sampling_seed(seed: int, number: int) -> int:
    """Random numbers of a rollout: its own, and the same whoever decodes it."""
    return int.from_bytes(hashlib.sha256(f"rollout {seed} {number}".encode()).digest()[:7])


def decode_config(config: RLConfig, stop_tokens: tuple[int, ...], number: int) -> DecodeConfig:
    """How a rollout is decoded."""
    return DecodeConfig(
        rule="rejection" if config.rule == "off" else config.rule,
        gamma=config.drafts,
        temperature=config.temperature,
        attention=config.attention,
        max_new_tokens=config.max_new_tokens,
        batch_size=config.groups_per_rollout * config.group_size,
        stop_tokens=stop_tokens,
        seed=sampling_seed(config.seed, number),
    )


class RolloutWorker:
    """Holds a model of its own; `model` has to be in evaluation mode."""

    def __init__(self, name: str, config: RLConfig, task: Task, codec: Codec, model: Any) -> None:
        self.name, self.config, self.task, self.codec, self.model = name, config, task, codec, model
        self.problems = ProblemList(task, config.seed)
        self.scorer = Scorer(task, config.reward_timeout)
        self._events: list[Event] = []

    def close(self) -> None:
        """End the process that computes rewards."""
        self.scorer.close()

    def set_weights(self, shards: list[Shards]) -> None:
        """Become the policy with these weights, those of all processes of the learner."""
        load_shards(self.model, shards)

    def note(self, event: str, begin: float, step: int) -> None:
        """Something that this worker has been doing since `begin` goes into the trace."""
        self._events.append(Event(self.name, event, begin, time.time(), step))

    def rollout(self, order: Order) -> Rollout:
        """Decode and reward the groups of a rollout."""
        config, began = self.config, time.time()
        problems = self.problems.get(order.number * config.groups_per_rollout, config.groups_per_rollout)
        prompts = [self.codec.encode(problem.prompt) for problem in problems]
        result = self._decode(order, [prompt for prompt in prompts for _ in range(config.group_size)])
        self.note("decode", began, order.step)
        seconds = time.time() - began
        failures, rewarding = self.scorer.failures, time.time()
        groups = [
            self._group(problem, prompt, result, index)
            for index, (problem, prompt) in enumerate(zip(problems, prompts, strict=True))
        ]
        self.note("reward", rewarding, order.step)
        probe = self._probe(groups, order.step)
        events, self._events = self._events, []
        return Rollout(
            number=order.number,
            version=order.version,
            groups=groups,
            seconds=seconds,
            reached=result.counts[:, :, REACHED].sum(0).tolist(),
            accepted=result.counts[:, :, ACCEPTED].sum(0).tolist(),
            failed_rewards=self.scorer.failures - failures,
            reward_error=self.scorer.last_error,
            probe=probe,
            events=events,
        )

    def _decode(self, order: Order, prompts: list[list[int]]) -> GenerationResult:
        settings = decode_config(self.config, self.codec.stop_tokens, order.number)
        decoder = SpeculativeDecoder(self.model, settings, vocab_size=self.codec.vocab_size)
        return decoder.generate(prompts)

    def _group(self, problem: Problem, prompt: list[int], result: GenerationResult, index: int) -> Group:
        size = self.config.group_size
        sequences = result.sequences[index * size : (index + 1) * size]
        rewards = []
        for sequence in sequences:
            stopped = sequence.finish == "stop"
            text = self.codec.decode(sequence.tokens[:-1] if stopped else sequence.tokens)
            rewards.append(self.scorer.score(problem, text))
        return Group(problem, prompt, [s.tokens for s in sequences], [s.log_probs for s in sequences], rewards)

    def _probe(self, groups: list[Group], step: int) -> Probe | None:
        """Expected acceptance under both rules, whichever the rollout was decoded with, or none."""
        if not self.config.probe or not getattr(self.model.config, "mtp_num_layers", None):
            return None
        began = time.time()
        chosen = [(group.prompt, tokens) for group in groups for tokens in group.completions]
        stride = max(1, len(chosen) // self.config.probe)
        chosen = chosen[::stride][: self.config.probe]
        settings = DecodeConfig(
            gamma=self.config.gamma, temperature=self.config.temperature, attention=self.config.attention
        )
        found = expected_acceptance(
            self.model,
            [prompt + tokens for prompt, tokens in chosen],
            settings,
            vocab_size=self.codec.vocab_size,
            prompt_lengths=[len(prompt) for prompt, _ in chosen],
        )
        kept = found.complete
        self.note("probe", began, step)
        return Probe(
            anchors=int(kept.sum()),
            accepted={rule: float(found.prefix(rule)[kept].sum()) for rule in RULES},
            # of the first step: the policy's entropy at the token that a verification begins with
            entropy=float(found.target_entropy[kept, 0].double().sum()) if len(found.anchor) else 0.0,
        )


def load_worker(name: str, config: RLConfig) -> RolloutWorker:
    """A worker with the checkpoint that the run starts from.

    Raises:
        ValueError: whatever is wrong with the checkpoint, the task or the tokenizer.
    """
    torch.set_num_threads(config.threads)
    task = make_task(config.task)
    codec = task.codec(config.tokenizer)
    loaded = load_model(config.load, with_mtp=config.drafts > 0 or config.probe > 0, tensor_parallel=1)
    return RolloutWorker(name, config, task, codec, loaded.model)
