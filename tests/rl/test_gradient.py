"""Speculation leaves the policy gradient as it is.

Catches: rollouts whose distribution is not the policy's, log-probabilities of the draft, of another temperature or of
another position, an importance weight that is not 1 on policy; and that a verifier which is wrong would be noticed.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bebop_megatron.evaluation import decode
from bebop_megatron.evaluation.verify import Verification
from bebop_megatron.rl.batch import micro_batches, samples_of
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.grpo import log_prob_and_entropy, policy_loss
from bebop_megatron.rl.ledger import Order
from bebop_megatron.rl.rollout import RolloutWorker
from bebop_megatron.rl.tasks.letters import Letters
from tests.evaluation import tiny

GROUPS, SIZE = 160, 4
CONFIG = RLConfig(
    groups=GROUPS,
    groups_per_rollout=GROUPS,
    group_size=SIZE,
    micro_batch_size=GROUPS * SIZE,
    max_new_tokens=8,
    temperature=0.8,
    gamma=3,
    probe=0,
)
TASK = Letters(6)
CODEC = TASK.codec(None)
DIRECTIONS = 4


class _InProcess:
    """Rewards without a process of their own."""

    failures, last_error = 0, ""

    def score(self, problem, text):
        return TASK.reward(problem, text)


@pytest.fixture(scope="module")
def model():
    if torch.cuda.is_available():
        pytest.skip("checks the CPU platform, and a CUDA device is present")
    with tiny.megatron_world():
        yield tiny.build(sharpness=0.6, seed=3).eval()


def _rollout(model, seed, **changes):
    worker = RolloutWorker("worker", replace(CONFIG, seed=seed, **changes), TASK, CODEC, model)
    worker.scorer = _InProcess()
    # the same problems whatever the seed, other random numbers
    worker.problems = RolloutWorker("worker", CONFIG, TASK, CODEC, model).problems
    return worker.rollout(Order(0, 0, 0))


def _log_probs(model, batch):
    tokens = batch["tokens"]
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
    logits = model(tokens, torch.arange(length).expand_as(tokens), mask, runtime_gather_output=True)
    return log_prob_and_entropy(
        logits[:, :-1], tokens[:, 1:], vocab_size=CODEC.vocab_size, temperature=CONFIG.temperature
    )


def _batch(rollout):
    """One row for each completion, in order."""
    samples = samples_of([rollout], 0, normalise=False)
    order = sorted(range(len(samples)), key=lambda index: len(samples[index].tokens))
    (batch,) = micro_batches(samples, micro_batch_size=len(samples))
    inverse = torch.tensor(order).argsort()
    return {name: value[inverse] for name, value in batch.items()}


@torch.no_grad()
def _gradients(model, rollout):
    """The loss's derivatives along random directions of all parameters, by central differences.

    Shape: -> [groups, directions] float64.
    """
    batch, generator, found = _batch(rollout), torch.Generator().manual_seed(5), []
    parameters = [p for name, p in model.named_parameters() if not name.startswith("mtp.")]
    kept = [parameter.clone() for parameter in parameters]
    weight = batch["loss_mask"][:, 1:] * batch["advantage"][:, None]
    for _ in range(DIRECTIONS):
        steps = [5e-3 * torch.randn(p.shape, generator=generator) for p in parameters]
        sides = []
        for sign in (1, -1):
            for parameter, value, step in zip(parameters, kept, steps, strict=True):
                parameter.copy_(value + sign * step)
            sides.append(_log_probs(model, batch)[0].double())
        found.append(-((sides[0] - sides[1]) / 1e-2 * weight).sum(1).view(GROUPS, SIZE).sum(1))
    for parameter, value in zip(parameters, kept, strict=True):
        parameter.copy_(value)
    return torch.stack(found, 1)


def _furthest(first, second):
    """The largest difference of the means, in standard errors."""
    error = (first.var(0) / len(first) + second.var(0) / len(second)).sqrt()
    return float(((first.mean(0) - second.mean(0)) / error).abs().max())


@pytest.fixture(scope="module")
def plain(model):
    return torch.cat([_gradients(model, _rollout(model, seed, rule="off")) for seed in range(3)])


@pytest.mark.parametrize("rule", ["rejection", "target-only"])
def test_the_gradient_of_speculative_rollouts_is_that_of_plain_ones(model, plain, rule):
    found = torch.cat([_gradients(model, _rollout(model, 10 + seed, rule=rule)) for seed in range(3)])
    # four directions: one in 4,000 would exceed this by chance
    assert _furthest(plain, found) < 4.0
    # their spread is the same as well
    assert ((found.var(0) / plain.var(0)).log().abs() < 0.5).all()


def test_a_biased_verifier_is_noticed(model, plain, monkeypatch):
    right = decode.verify

    def accepts_everything(target_probs, draft_probs, draft_tokens, rule, generator=None):
        out = right(target_probs, draft_probs, draft_tokens, rule, generator=generator)
        tokens = torch.cat([draft_tokens, out.tokens.max(1).values[:, None]], 1)
        return Verification(
            torch.full_like(out.num_accepted, draft_tokens.shape[1]), tokens, out.accept_prob, out.alpha
        )

    monkeypatch.setattr(decode, "verify", accepts_everything)
    found = torch.cat([_gradients(model, _rollout(model, 10 + seed)) for seed in range(3)])
    assert _furthest(plain, found) > 6.0


@pytest.mark.parametrize("rule", ["rejection", "target-only", "off"])
def test_log_probabilities_of_rollouts_are_the_learners(model, rule):
    rollout = _rollout(model, 1, rule=rule)
    batch = _batch(rollout)
    with torch.no_grad():
        log_prob, entropy = _log_probs(model, batch)
        counted = batch["weight"][:, 1:] > 0
        torch.testing.assert_close(log_prob[counted], batch["behaviour"][:, 1:][counted], rtol=1e-4, atol=1e-5)
        out = policy_loss(
            log_prob,
            entropy,
            batch["behaviour"][:, 1:],
            batch["advantage"][:, None],
            batch["weight"][:, 1:],
            truncation=2.0,
        )
    assert float(out.importance) == pytest.approx(1, abs=1e-5)
    assert float(out.kl) == pytest.approx(0, abs=1e-7)
    assert bool(rollout.reached) == (rule != "off")
