"""A task whose reward fails now and then, for runs of the loop."""

from __future__ import annotations

from bebop_megatron.rl.task import Problem
from bebop_megatron.rl.tasks.letters import Letters


class Raising(Letters):
    """Has no reward for a completion that begins with b."""

    def reward(self, problem: Problem, completion: str) -> float:
        """The share of the letter, or an error."""
        if completion.startswith("b"):
            raise KeyError("no such thing")
        return super().reward(problem, completion)
