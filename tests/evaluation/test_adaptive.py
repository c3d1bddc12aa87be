"""The number of drafts follows acceptance and cost, and comes back to what it had given up.

Catches: a deep step whose estimate freezes once it is no longer drafted, an estimate that never forgets, a choice that
ignores the cost.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.evaluation.adaptive import AdaptiveGamma
from bebop_megatron.evaluation.settings import parse_gamma
from bebop_megatron.evaluation.verify import Verification


def _feed(choice: AdaptiveGamma, rates: list[float], times: int, seed: int = 0) -> list[int]:
    """Verifications of four rows in which step i is accepted with probability rates[i]; returns the choices."""
    generator, gammas = torch.Generator().manual_seed(seed), []
    for _ in range(times):
        gamma = choice.choose()
        alpha = torch.tensor(rates[:gamma]).expand(4, -1)
        accepted = (torch.rand(4, gamma, generator=generator) < alpha).long().cumprod(1).sum(1)
        choice.observe(Verification(accepted, torch.zeros(4, gamma + 1), alpha, alpha))
        gammas.append(gamma)
    return gammas


def _best(rates: list[float], cost: float) -> int:
    tokens, prefix, values = 1.0, 1.0, []
    for gamma, rate in enumerate(rates, start=1):
        prefix *= rate
        tokens += prefix
        values.append(tokens / (1 + gamma * cost))
    return 1 + max(range(len(values)), key=values.__getitem__)


@pytest.mark.parametrize(
    ("rates", "cost"),
    [([0.9] * 5, 0.1), ([0.7] * 5, 0.2), ([0.3] * 5, 0.2), ([0.8, 0.8, 0.1, 0.9, 0.9], 0.15), ([0.5] * 5, 1.0)],
)
def test_choice_settles_on_the_best_gamma(rates, cost):
    gammas = _feed(AdaptiveGamma(5, cost), rates, 400)
    best = _best(rates, cost)
    # now and then a longer one is tried
    assert sum(gamma == best for gamma in gammas[100:]) > 240, (best, gammas[100:])


def test_estimates_are_the_rates():
    choice = AdaptiveGamma(3, 0.0)
    _feed(choice, [0.9, 0.6, 0.4], 200)
    assert choice.estimates() == pytest.approx([0.9, 0.6, 0.4], abs=0.02)
    assert AdaptiveGamma(3, 0.2).choose() == 3


def test_choice_follows_a_change_in_either_direction():
    choice = AdaptiveGamma(5, 0.2)
    assert set(_feed(choice, [0.95] * 5, 60)[-20:]) == {5}
    low = _feed(choice, [0.2] * 5, 200)[-50:]
    assert sum(low) / 50 < 1.5
    high = _feed(choice, [0.95] * 5, 300)[-50:]
    assert sum(high) / 50 > 4


@pytest.mark.parametrize(
    ("text", "value"), [("3", (3, False)), ("0", (0, False)), ("adaptive", (5, True)), ("adaptive:8", (8, True))]
)
def test_gamma_is_a_number_or_adaptive(text, value):
    assert parse_gamma(text) == value


@pytest.mark.parametrize("text", ["", "three", "-1", "adaptive:", "adaptive:x", "adaptive8", "3:4"])
def test_other_gammas_are_refused(text):
    with pytest.raises(ValueError, match="a number, adaptive, or adaptive:MOST"):
        parse_gamma(text)
