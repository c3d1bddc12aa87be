"""The policy loss and the micro-batches it is computed on.

Catches: a wrong gradient of the entropy, probability on padding columns, importance weights that are not truncated or
that carry a gradient, tokens of a prompt or of padding that count, a mean that depends on how a step is cut.
"""

from __future__ import annotations

import math
import random

import pytest
import torch

from bebop_megatron.rl.batch import Sample, micro_batches, samples_of
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.grpo import advantages, log_prob_and_entropy, policy_loss
from bebop_megatron.rl.records import Group, Rollout
from bebop_megatron.rl.task import Problem


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_value_and_gradient_equal_those_of_a_dense_softmax(temperature):
    torch.manual_seed(0)
    logits = torch.randn(2, 3, 11, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 9, (2, 3))
    weights = torch.randn(2, 2, 3, dtype=torch.float64)
    dense = (logits[..., :9] / temperature).log_softmax(-1)
    expected = (dense.gather(-1, labels[..., None])[..., 0], -(dense.exp() * dense).sum(-1))
    (grad,) = torch.autograd.grad(sum((w * e).sum() for w, e in zip(weights, expected, strict=True)), logits)
    given = logits.detach().float().requires_grad_()
    found = log_prob_and_entropy(given, labels, vocab_size=9, temperature=temperature)
    for value, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(value.double(), wanted.detach(), rtol=1e-5, atol=1e-5)
    sum((w.float() * f).sum() for w, f in zip(weights, found, strict=True)).backward()
    torch.testing.assert_close(given.grad.double(), grad, rtol=1e-4, atol=1e-5)
    assert (given.grad[..., 9:] == 0).all()


def test_advantages_compare_within_a_group():
    assert advantages([1.0, 1.0, 1.0], True) == [0, 0, 0]
    assert advantages([0.0, 1.0], False) == [-0.5, 0.5]
    values = advantages([0.0, 0.0, 0.0, 4.0], True)
    assert sum(values) == pytest.approx(0, abs=1e-12)
    assert math.sqrt(sum(v * v for v in values) / 4) == pytest.approx(1)


def test_importance_weights_are_truncated_and_carry_no_gradient():
    log_prob = torch.tensor([[0.0, 0.0, 5.0]], requires_grad=True)
    behaviour, weight = torch.tensor([[0.5, -3.0, math.nan]]), torch.tensor([[0.5, 0.5, 0.0]])
    out = policy_loss(log_prob, torch.ones(1, 3), behaviour, torch.tensor([[2.0]]), weight, truncation=2.0)
    out.loss.backward()
    # r = exp(-0.5), and exp(3) cut to 2
    torch.testing.assert_close(log_prob.grad, -0.5 * 2 * torch.tensor([[math.exp(-0.5), 2.0, 0.0]]))
    assert float(out.truncated) == 0.5
    assert float(out.entropy) == 1


def test_the_entropy_bonus_raises_entropy_and_the_penalty_pulls_back():
    entropy = torch.ones(1, 2, requires_grad=True)
    log_prob = torch.full((1, 2), -1.0, requires_grad=True)
    behaviour, weight = torch.tensor([[-1.5, -1.0]]), torch.full((1, 2), 0.5)
    out = policy_loss(log_prob, entropy, behaviour, torch.zeros(1, 1), weight, truncation=2, kl=0.1, entropy_bonus=0.3)
    out.loss.backward()
    torch.testing.assert_close(entropy.grad, torch.full((1, 2), -0.15))
    torch.testing.assert_close(log_prob.grad, 0.1 * 0.5 * torch.tensor([[1 - math.exp(-0.5), 0.0]]))


def _samples(number):
    draw = random.Random(number)
    found = []
    for _ in range(number):
        tokens = [draw.randrange(1, 9) for _ in range(draw.randrange(4, 12))]
        found.append(Sample(tokens, [-0.1 * token for token in tokens[2:]], draw.gauss(0, 1), 0))
    return found


@pytest.mark.parametrize(("size", "replicas", "one_length"), [(8, 1, False), (2, 1, False), (2, 2, True)])
def test_the_loss_does_not_depend_on_how_a_step_is_cut(size, replicas, one_length):
    samples = _samples(8)
    total, counted, lengths = 0.0, 0.0, set()
    for rank in range(replicas):
        own = micro_batches(samples, micro_batch_size=size, replicas=replicas, rank=rank, one_length=one_length)
        for batch in own:
            lengths.add(batch["tokens"].shape[1])
            # any function of token and advantage will do
            value = batch["tokens"] * batch["advantage"][:, None] + batch["behaviour"]
            # Megatron's two divisions
            total += float((value * batch["weight"]).sum()) / len(own) / replicas
            counted += float(batch["weight"].sum()) / len(own) / replicas
    expected = [
        token * sample.advantage + log_prob
        for sample in samples
        for token, log_prob in zip(sample.tokens[2:], sample.log_probs, strict=True)
    ]
    assert total == pytest.approx(sum(expected) / len(expected), rel=1e-5)
    assert counted == pytest.approx(1)
    assert len(lengths) == 1 or not one_length


def test_samples_carry_their_groups_advantage_and_their_staleness():
    group = Group(Problem("p", "a"), [5, 6], [[1], [2, 3]], [[-1.0], [-2.0, -3.0]], [0.0, 1.0])
    (low, high) = samples_of([Rollout(0, 4, [group], 1.0, [], [])], step=6, normalise=False)
    assert (low.tokens, high.tokens) == ([5, 6, 1], [5, 6, 2, 3])
    assert (low.advantage, high.advantage) == (-0.5, 0.5)
    assert low.staleness == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rule": "greedy"}, "--rule must be one of"),
        ({"groups": 3, "groups_per_rollout": 2}, "multiple of --groups-per-rollout"),
        ({"group_size": 1, "micro_batch_size": 1}, "at least 2"),
        ({"staleness": -1}, "--staleness must be at least 0"),
        ({"queue": 2}, "cannot hold the 8 groups"),
        ({"micro_batch_size": 7}, "must divide the 64 completions"),
        ({"strategy": "joint"}, "add --mtp-lr"),
        ({"mtp_lr": 1e-3}, "no effect with --mtp-strategy frozen"),
        ({"mtp_schedule": "mtp:1,none:1"}, "belongs to --mtp-strategy alternating"),
        ({"truncation": 0.5}, "--importance-truncation must be at least 1"),
    ],
)
def test_bad_settings_say_so(change, message):
    with pytest.raises(ValueError, match=message):
        RLConfig(**change)


def test_the_command_line_is_the_config():
    config = RLConfig.from_arguments(
        [
            "--load",
            "c",
            "--task",
            "letters",
            "--output",
            "o",
            "--rule",
            "off",
            "--no-normalise",
            "--",
            "--adam-eps",
            "1",
        ]
    )
    assert (config.drafts, config.normalise, config.megatron) == (0, False, ("--adam-eps", "1"))
    with pytest.raises(ValueError, match="--task is missing"):
        RLConfig.from_arguments(["--load", "c", "--output", "o"])
