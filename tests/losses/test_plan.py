"""Chunks of the fused objective: every entry once, every target row once, never more rows than fit.

Catches: an entry that is dropped at a cut, a target row projected for every depth, a row with too many entries.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.losses.plan import make_plan, plan_without_target


def tables(k, n, m, seed, share=0.8):
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, m, (k, n), generator=g), torch.rand(k, n, generator=g) < share


@pytest.mark.parametrize("limit", [1, 3, 7, 16, 1000])
@pytest.mark.parametrize(("k", "n", "m"), [(1, 1, 1), (3, 20, 23), (7, 9, 4), (2, 30, 1), (4, 0, 5)])
def test_every_valid_entry_meets_its_row_once(k, n, m, limit):
    rows, valid = tables(k, n, m, seed=limit)
    looked_at = torch.arange(0, m, 2)
    for extra in (None, looked_at):
        plan = make_plan(rows, valid, limit, extra)
        seen, projected = [], []
        for chunk in plan.chunks:
            entries, targets = plan.order[chunk.entries], plan.needed[chunk.targets]
            assert max(len(entries), len(targets)) <= limit
            place = plan.place[chunk.entries] - chunk.targets.start
            assert torch.equal(targets[place], rows.flatten()[entries])
            seen += entries.tolist()
            projected += targets.tolist()
        assert sorted(seen) == valid.flatten().nonzero()[:, 0].tolist()
        wanted = set(rows[valid].tolist()) | set([] if extra is None else extra.tolist())
        assert set(projected) == wanted
        if limit > k * n:
            assert len(projected) == len(wanted)


def test_a_target_row_is_projected_once_where_anchors_follow_each_other():
    k, n = 3, 50
    rows = torch.arange(n) + torch.arange(1, k + 1)[:, None]
    for limit in (5, 9, 40, 1000):
        plan = make_plan(rows, torch.ones(k, n, dtype=torch.bool), limit)
        projected = [row for chunk in plan.chunks for row in plan.needed[chunk.targets].tolist()]
        assert projected == list(range(1, n + k))


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_without_a_target_entries_keep_their_order(limit):
    _, valid = tables(3, 20, 1, seed=0)
    plan = plan_without_target(valid, limit)
    parts = [plan.order[chunk.entries].tolist() for chunk in plan.chunks]
    assert [entry for part in parts for entry in part] == valid.flatten().nonzero()[:, 0].tolist()
    assert max(map(len, parts)) <= limit
