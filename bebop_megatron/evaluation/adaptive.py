"""How many tokens to draft next, chosen from the acceptance seen so far.

Drafting g tokens yields 1 + sum_{j<=g} prod_{i<=j} a_i tokens on average, where a_i is how often step i is accepted,
and costs about 1 + g * draft_cost, in units of scoring one token. The g with most tokens per cost is used for the
whole batch. a_i is a running mean that forgets; a step long unseen drifts back to the estimate of the step before it
(the first one to 1), so that longer drafts are tried again now and then.

The choice knows nothing but verifications that are over. Whatever it is, the tokens that follow are distributed as
the target's: a rule that looked at the drafts it is about to verify could not say so.
"""

from __future__ import annotations

from itertools import accumulate
from operator import mul

import torch

from bebop_megatron.evaluation.verify import Verification

# evidence halves in about 14 verifications of the batch
_MEMORY = 0.95
# weight of the step before, in verifications of one row
_PRIOR = 1.0


class AdaptiveGamma:
    """Chooses 1..`most` drafts for the next verification."""

    def __init__(self, most: int, draft_cost: float) -> None:
        self.most, self.draft_cost = most, draft_cost
        self._reached, self._accepted = [0.0] * most, [0.0] * most

    def estimates(self) -> list[float]:
        """Acceptance of every step, given the steps before it."""
        before, out = 1.0, []
        for reached, accepted in zip(self._reached, self._accepted, strict=True):
            before = (accepted + _PRIOR * before) / (reached + _PRIOR)
            out.append(before)
        return out

    def choose(self) -> int:
        """The number of drafts with most expected tokens per cost; of equal ones the smallest."""
        prefixes = accumulate(self.estimates(), mul)
        lengths = accumulate(prefixes, initial=1.0)
        rates = [tokens / (1 + g * self.draft_cost) for g, tokens in enumerate(lengths)]
        return max(range(1, self.most + 1), key=lambda g: rates[g])

    def observe(self, out: Verification) -> None:
        """Learn from a verification; waits for the device.

        The probability of acceptance is counted instead of the outcome: the same mean with less noise.
        """
        steps = torch.arange(out.alpha.shape[1], device=out.alpha.device)
        reached = (out.num_accepted[:, None] >= steps).to(out.alpha.dtype)
        seen = torch.stack([reached.sum(0), (reached * out.alpha).sum(0)]).tolist()
        for values, new in zip((self._reached, self._accepted), seen, strict=True):
            values[:] = [_MEMORY * value for value in values]
            for step, value in enumerate(new):
                values[step] += value
