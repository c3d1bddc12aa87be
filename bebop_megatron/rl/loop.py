"""The loop: hands orders to rollout workers, batches to the learner and policies to the workers; replaces what dies.

Everything that has to survive lies in files (`ledger.py`, `journal.py`) or is computed again from the same random
numbers, so a killed worker costs its rollout's time, and a killed learner the steps since the last checkpoint.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.launcher import free_port
from bebop_megatron.rl.actors import LearnerActor, WorkerActor
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.journal import Journal, step_row
from bebop_megatron.rl.ledger import Ledger, Order
from bebop_megatron.rl.records import Event

# deaths in a row, without a result in between, after which it is no accident
_MOST_DEATHS = 3


@dataclass
class _Slot:
    """A worker and what it is doing; `order` None: loading, or a rollout of a policy that no longer exists."""

    name: str
    actor: Any
    reference: Any
    order: Order | None = None
    deaths: int = 0


@dataclass
class _Call:
    """A call to every process of the learner, and the export behind it: what was done, and the weights."""

    kind: str
    step: int
    references: list[Any]
    events: list[Any]
    shards: list[Any]


class Loop:
    """One run, on a Ray cluster that is up; `report` is called with every finished step."""

    def __init__(self, config: RLConfig, vocab_size: int, ray: Any, report: Any = lambda row: None) -> None:
        self.config, self.vocab_size, self.ray, self.report = config, vocab_size, ray, report
        self.journal = Journal(config)
        self.rollout_folder = Path(config.output) / "rollouts"
        self.resumed_at = self.journal.resume_step()
        self.ledger = Ledger.resume(config, self.rollout_folder, self.resumed_at)
        self.lineage, self.learner_deaths = 0, 0
        self.weights: dict[int, list[Any]] = {}
        self.calls: list[_Call] = []
        self.commits: list[int] = []
        self.pids: dict[str, int] = {}
        self.learners: list[Any] = []
        self.training: int | None = None
        self.seen: set[Any] = set()
        self.last_end = time.time()

    def run(self) -> None:
        """Train to the last step.

        Raises:
            RuntimeError: workers or learner die again and again.
            ValueError: whatever is wrong with checkpoint, task or settings.
        """
        if self.ledger.version >= self.config.steps:
            return
        self._start_learner(self.ledger.version)
        self.slots = [self._start_worker(f"worker-{index}") for index in range(self.config.workers)]
        while self.ledger.version < self.config.steps or self.calls:
            self._feed_workers()
            self._feed_learner()
            self._next_event()
            self._commit()

    # workers

    def _start_worker(self, name: str, deaths: int = 0) -> _Slot:
        actor = self.ray.remote(WorkerActor).options(num_cpus=1, max_restarts=0).remote(name, self.config)
        return _Slot(name, actor, actor.load.remote(), deaths=deaths)

    def _feed_workers(self) -> None:
        for slot in self.slots:
            if slot.reference is not None or not self.weights:
                continue
            order = self.ledger.take()
            if order is None:
                return
            slot.order = order
            policy = (self.lineage, order.version)
            slot.reference = slot.actor.rollout.remote(order, policy, self.weights[order.version])

    def _worker_event(self, slot: _Slot) -> None:
        reference, slot.reference = slot.reference, None
        order, slot.order = slot.order, None
        try:
            result = self.ray.get(reference)
        except self.ray.exceptions.RayActorError as error:
            if slot.deaths + 1 >= _MOST_DEATHS:
                raise RuntimeError(f"{slot.name} died {_MOST_DEATHS} times in a row: {error}") from error
            now = time.time()
            self.journal.record(Event(slot.name, "died", now, now, self.ledger.version))
            if order is not None:
                self.ledger.give_back(order.number)
            self.slots[self.slots.index(slot)] = self._start_worker(slot.name, slot.deaths + 1)
            return
        if isinstance(result, int):
            self.pids[slot.name] = result
            return
        slot.deaths = 0
        self.journal.record(*result.events)
        # None: the learner went back behind the policy that decoded this
        if order is not None:
            self.ledger.finish(result)

    # learner

    def _start_learner(self, step: int) -> None:
        world, port = self.config.learner_processes, free_port()
        actor = self.ray.remote(LearnerActor).options(num_cpus=1, max_restarts=0)
        self.learners = [actor.remote(self.config, self.vocab_size, step, rank, world, port) for rank in range(world)]
        self.training = None
        self._call("load", step, [learner.load.remote() for learner in self.learners])

    def _call(self, kind: str, step: int, references: list[Any]) -> None:
        """Remember a call; those that change the policy are followed by an export."""
        exported = [learner.export.options(num_returns=2).remote() for learner in self.learners if kind != "save"]
        events = [event for event, _ in exported]
        self.calls.append(_Call(kind, step, references, events, [shards for _, shards in exported]))

    def _feed_learner(self) -> None:
        step = self.ledger.version
        if self.training is not None or not self.weights or step >= self.config.steps or not self.ledger.ready(step):
            return
        self.training = step
        batch = self.ray.put(self.ledger.batch(step))
        self._call("step", step, [learner.step.remote(step, batch) for learner in self.learners])

    def _learner_event(self) -> None:
        call = self.calls[0]
        try:
            results = self.ray.get(call.references)
            # the shards stay where they are
            events = self.ray.get(call.events)
        except (self.ray.exceptions.RayActorError, self.ray.exceptions.RayTaskError) as error:
            self._replace_learner(error)
            return
        self.calls.pop(0)
        self.journal.record(*events)
        if call.kind == "load":
            self.pids |= {f"learner-{rank}": pid for rank, pid in enumerate(results)}
            self.weights[call.step] = call.shards
            self.last_end = time.time()
        elif call.kind == "step":
            self._step_done(call, results)
        else:
            self.journal.record(*results)
            self.commits.append(call.step)

    def _step_done(self, call: _Call, results: list[dict[str, Any]]) -> None:
        step = call.step
        self.training = None
        self.learner_deaths = 0
        trained = next(result for result in results if result["values"])
        now = time.time()
        self.journal.record(*(result["event"] for result in results))
        row = step_row(self.config, step, self.ledger.batch(step), trained, now - self.last_end)
        self.last_end = now
        self.ledger.trained(step)
        self.weights[step + 1] = call.shards
        oldest = self.ledger.needed_version()
        self.weights = {version: shards for version, shards in self.weights.items() if version >= oldest}
        self.report(self.journal.write_step(row))
        interval = self.config.save_interval
        if step + 1 == self.config.steps or (interval and (step + 1) % interval == 0):
            self._call("save", step + 1, [learner.save.remote(step + 1) for learner in self.learners])

    def _replace_learner(self, error: Exception) -> None:
        """Go back to the last checkpoint that counts, in a new process."""
        self.learner_deaths += 1
        dead = isinstance(error, self.ray.exceptions.RayActorError)
        # with several processes, an error in one may be the death of another
        if self.learner_deaths >= _MOST_DEATHS or not (dead or self.config.learner_processes > 1):
            raise error
        for learner in self.learners:
            self.ray.kill(learner)
        step = self.journal.resume_step()
        now = time.time()
        self.journal.record(Event("learner-0", "died", now, now, max(0, step - 1)))
        self.ledger = Ledger.resume(self.config, self.rollout_folder, step, self.ledger.running.values())
        for slot in self.slots:
            if slot.order is not None and slot.order.number not in self.ledger.running:
                slot.order = None
        self.lineage += 1
        self.calls, self.commits, self.weights = [], [], {}
        self.seen.clear()
        self._start_learner(step)

    # both

    def _next_event(self) -> None:
        """Wait until a worker has a result or the learner has completed its oldest call, and deal with it."""
        slots = {slot.reference: slot for slot in self.slots if slot.reference is not None}
        call = [*self.calls[0].references, *self.calls[0].events] if self.calls else []
        open_ = [*slots, *(reference for reference in call if reference not in self.seen)]
        if not open_:
            raise RuntimeError("nothing runs and nothing can start: this is a bug in the order of rollouts")
        ready, _ = self.ray.wait(open_, num_returns=1, fetch_local=False)
        for reference in ready:
            if reference in slots:
                self._worker_event(slots[reference])
            else:
                self.seen.add(reference)
        if call and self.seen.issuperset(call):
            self.seen.clear()
            self._learner_event()

    def _commit(self) -> None:
        while self.commits and self.ledger.committed(self.commits[0]):
            step = self.commits.pop(0)
            self.journal.commit(step)
            self.ledger.forget(step)
