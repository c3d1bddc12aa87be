"""Which rollout is due, which is running, which waits to be trained on: the bounded queue, on paper and on disk.

Rollouts have numbers; a step takes the next `rollouts_per_step` of them, in order, so that short completions do not
overtake long ones. Rollout n of step s may start once the policy has been trained for s - staleness steps, and is then
never staler than that when step s trains on it: nothing has to be thrown away.

Whatever is finished lies in a file until a checkpoint is behind it. A checkpoint of step k counts once every rollout
of an older policy that later steps need has arrived ("committed"): a run that resumes there finds what it would have
had, and rollouts of policies that no longer exist are decoded anew.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from bebop_megatron.outputs import write_text
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.records import Rollout


@dataclass(frozen=True)
class Order:
    """A rollout to be decoded: its number, its step, and the version of the policy that decodes it."""

    number: int
    step: int
    version: int


@dataclass
class Ledger:
    """The state of the queue; `version` counts the steps that the newest policy has been trained for."""

    config: RLConfig
    folder: Path
    version: int = 0
    next_number: int = 0
    returned: list[Order] = field(default_factory=list)
    running: dict[int, Order] = field(default_factory=dict)
    finished: dict[int, Rollout] = field(default_factory=dict)

    @classmethod
    def resume(cls, config: RLConfig, folder: Path, step: int, running: Iterable[Order] = ()) -> Ledger:
        """The queue as it was when step `step` was next: what is on disk, without what a later policy decoded.

        `running` is what workers that outlived the learner are decoding; of later policies it is forgotten.
        """
        folder.mkdir(parents=True, exist_ok=True)
        first = step * config.rollouts_per_step
        kept = {order.number: order for order in running if order.version <= step and order.number >= first}
        ledger = cls(config, folder, version=step, next_number=first, running=kept)
        for path in sorted(folder.glob("*.json")):
            rollout = Rollout.from_json(path.read_text())
            if rollout.number < first:
                continue
            if rollout.version > step:
                path.unlink()
                continue
            ledger.finished[rollout.number] = rollout
        return ledger

    def step_of(self, number: int) -> int:
        """The step that trains on a rollout."""
        return number // self.config.rollouts_per_step

    def numbers(self, step: int) -> range:
        """The rollouts of a step."""
        count = self.config.rollouts_per_step
        return range(step * count, (step + 1) * count)

    def take(self) -> Order | None:
        """The next rollout that may start now; None where all have to wait."""
        if self.returned:
            order = self.returned.pop(0)
        else:
            while self.next_number in self.finished or self.next_number in self.running:
                self.next_number += 1
            step = self.step_of(self.next_number)
            config = self.config
            held = (len(self.running) + len(self.finished) + 1) * config.groups_per_rollout
            if step >= config.steps or step - self.version > config.staleness:
                return None
            # the step that is next is always let in: nothing else can make room
            if config.queue and held > config.queue and step > self.version:
                return None
            version = max(0, step - config.staleness) if config.weights == "exact" else self.version
            order = Order(self.next_number, step, version)
            self.next_number += 1
        self.running[order.number] = order
        return order

    def give_back(self, number: int) -> None:
        """A worker died: its rollout is decoded again, by the same policy with the same random numbers."""
        self.returned.append(self.running.pop(number))
        self.returned.sort(key=lambda order: order.number)

    def finish(self, rollout: Rollout) -> None:
        """Keep a rollout, on disk first."""
        write_text(self.folder / f"{rollout.number:08d}.json", rollout.to_json())
        del self.running[rollout.number]
        self.finished[rollout.number] = rollout

    def ready(self, step: int) -> bool:
        """Whether everything that a step trains on is there."""
        return all(number in self.finished for number in self.numbers(step))

    def batch(self, step: int) -> list[Rollout]:
        """What a step trains on."""
        return [self.finished[number] for number in self.numbers(step)]

    def trained(self, step: int) -> None:
        """The policy has been trained on a step: its rollouts leave the queue, their files stay for a while."""
        for number in self.numbers(step):
            del self.finished[number]
        self.version = step + 1

    def needed_version(self) -> int:
        """The oldest policy that a rollout may still ask for."""
        orders = [*self.running.values(), *self.returned]
        due, step = self.version, self.step_of(self.next_number)
        if self.config.weights == "exact" and step < self.config.steps:
            due = min(due, max(0, step - self.config.staleness))
        return min([due, *(order.version for order in orders)])

    def committed(self, step: int) -> bool:
        """Whether a checkpoint of `step` completed steps can be resumed from: no older policy is needed any more."""
        return self.needed_version() >= step

    def forget(self, step: int) -> None:
        """Remove the files of rollouts before `step`, which a committed checkpoint has behind it."""
        for path in self.folder.glob("*.json"):
            if int(path.stem) < step * self.config.rollouts_per_step:
                path.unlink()
