"""The queue of rollouts, without anything that decodes or trains.

Catches: a rollout that is staler than allowed when it is trained on, trained on twice or never after workers and
learner died, or decoded by a policy that no longer exists; a checkpoint that counts before what it needs is on disk; a
queue without a bound; results that depend on who was faster.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.ledger import Ledger
from bebop_megatron.rl.records import Event, Group, Probe, Rollout
from bebop_megatron.rl.task import Problem

CONFIG = RLConfig(groups=4, groups_per_rollout=2, group_size=2, micro_batch_size=2, steps=12, save_interval=3)


def _rollout(order, lineage=0):
    """The policy's lineage stands for its weights: a run that went back has others, unless results are exact."""
    group = Group(Problem("p", "a"), [1], [[2], [3]], [[-0.5], [-1 / 3]], [0.0, float(lineage)])
    probe = Probe(3, {"rejection": 1.5, "target-only": 0.25}, 0.1)
    return Rollout(
        order.number, order.version, [group], 0.1, [4.0], [2.0], 0, "", probe, [Event("w", "decode", 1, 2, 0)]
    )


def test_a_rollout_survives_its_file_exactly():
    rollout = _rollout(Ledger(CONFIG, None).take())
    assert Rollout.from_json(rollout.to_json()) == rollout


@pytest.mark.parametrize("weights", ["exact", "newest"])
@pytest.mark.parametrize("staleness", [0, 1, 3])
def test_rollouts_start_no_earlier_than_staleness_allows(tmp_path, weights, staleness):
    ledger = Ledger(replace(CONFIG, weights=weights, staleness=staleness), tmp_path)
    for step in range(CONFIG.steps):
        started = []
        while (order := ledger.take()) is not None:
            started.append(order)
            ledger.finish(_rollout(order))
        # everything up to step + staleness has been let in, nothing later
        assert ledger.next_number == 2 * min(CONFIG.steps, step + staleness + 1)
        assert all(0 <= order.step - order.version <= staleness for order in started)
        assert ledger.ready(step)
        assert [rollout.number for rollout in ledger.batch(step)] == [2 * step, 2 * step + 1]
        ledger.trained(step)
    assert ledger.take() is None


def test_the_queue_is_bounded(tmp_path):
    ledger = Ledger(replace(CONFIG, staleness=5, queue=6), tmp_path)
    held = 0
    while ledger.take() is not None:
        held += CONFIG.groups_per_rollout
    assert held == 6


def test_what_a_dead_worker_was_decoding_comes_next(tmp_path):
    ledger = Ledger(CONFIG, tmp_path)
    orders = [ledger.take() for _ in range(3)]
    ledger.give_back(1)
    ledger.give_back(0)
    assert [ledger.take(), ledger.take()] == orders[:2]
    assert ledger.take().number == 3


def _simulate(folder, config, seed, deaths):
    """A run with two workers and a learner in random order of events; returns what each step was trained on."""
    draw, trained, lineage, commits, committed = random.Random(seed), {}, 0, [], 0
    ledger, workers = Ledger.resume(config, folder, 0), {}
    policies = {0: 0}
    while ledger.version < config.steps:
        while len(workers) < 2 and (order := ledger.take()) is not None:
            workers[len(trained) * 1000 + order.number + 7 * lineage] = (order, policies[order.version])
        event = draw.random()
        if deaths and event < 0.1 and workers:
            order, _ = workers.pop(draw.choice(list(workers)))
            if ledger.running.get(order.number) is order:
                ledger.give_back(order.number)
        elif deaths and event < 0.16:
            lineage += 1
            commits = []
            ledger = Ledger.resume(config, folder, committed, ledger.running.values())
            policies = {version: made for version, made in policies.items() if version <= committed}
            trained = {step: batch for step, batch in trained.items() if step < committed}
        elif event < 0.6 and workers:
            order, made = workers.pop(draw.choice(list(workers)))
            if ledger.running.get(order.number) is order:
                ledger.finish(_rollout(order, made))
        elif ledger.ready(ledger.version):
            step = ledger.version
            trained[step] = ledger.batch(step)
            assert all(0 <= step - rollout.version <= config.staleness for rollout in trained[step])
            # decoded by the very policies that this run has had
            assert all(rollout.groups[0].rewards[1] == policies[rollout.version] for rollout in trained[step])
            ledger.trained(step)
            policies[step + 1] = lineage
            if (step + 1) % config.save_interval == 0:
                commits.append(step + 1)
        while commits and ledger.committed(commits[0]):
            committed = commits.pop(0)
            ledger.forget(committed)
    return {step: [(rollout.number, rollout.version) for rollout in batch] for step, batch in trained.items()}


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_deaths_of_workers_and_learner_lose_nothing_and_repeat_nothing(tmp_path, staleness):
    exact = replace(CONFIG, staleness=staleness)
    expected = {step: [(2 * step + i, max(0, step - staleness)) for i in range(2)] for step in range(CONFIG.steps)}
    for seed in range(15):
        assert _simulate(tmp_path / f"a{seed}", exact, seed, deaths=True) == expected
        newest = _simulate(tmp_path / f"b{seed}", replace(exact, weights="newest"), seed, deaths=True)
        assert {step: [number for number, _ in batch] for step, batch in newest.items()} == {
            step: [number for number, _ in batch] for step, batch in expected.items()
        }


def test_a_checkpoint_counts_once_older_policies_are_not_needed(tmp_path):
    ledger = Ledger(replace(CONFIG, staleness=1), tmp_path)
    orders = [ledger.take() for _ in range(4)]
    for order in orders[:3]:
        ledger.finish(_rollout(order))
    ledger.trained(0)
    # rollout 3 belongs to step 1 and is being decoded by policy 0
    assert not ledger.committed(1)
    ledger.finish(_rollout(orders[3]))
    assert ledger.committed(1)
    again = Ledger.resume(ledger.config, tmp_path, 1)
    assert again.ready(1)
    assert again.take().version == 1
