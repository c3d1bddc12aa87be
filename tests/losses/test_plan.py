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
            targets = plan.needed[chunk.targets]
            assert len(targets) <= limit
            projected += targets.tolist()
            for part in chunk.drafts:
                entries = plan.order[part]
                assert 0 < len(entries) <= limit
                assert torch.equal(targets[plan.place[part] - chunk.targets.start], rows.flatten()[entries])
                seen += entries.tolist()
        assert sorted(seen) == valid.flatten().nonzero()[:, 0].tolist()
        wanted = set(rows[valid].tolist()) | set([] if extra is None else extra.tolist())
        assert sorted(wanted) == projected


def test_parts_are_as_large_whatever_the_depth():
    for k in (1, 3, 7):
        rows = torch.arange(50) + torch.arange(1, k + 1)[:, None]
        plan = make_plan(rows, torch.ones(k, 50, dtype=torch.bool), 20)
        assert [chunk.targets.stop - chunk.targets.start for chunk in plan.chunks][:2] == [20, 20]
        parts = [part for chunk in plan.chunks for part in chunk.drafts]
        assert max(part.stop - part.start for part in parts) == 20
        # besides the first and the last target rows, which fewer depths meet, every part is full
        assert [part.stop - part.start for part in plan.chunks[1].drafts] == [20] * k


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_without_a_target_entries_keep_their_order(limit):
    _, valid = tables(3, 20, 1, seed=0)
    plan = plan_without_target(valid, limit)
    parts = [plan.order[part].tolist() for chunk in plan.chunks for part in chunk.drafts]
    assert [entry for part in parts for entry in part] == valid.flatten().nonzero()[:, 0].tolist()
    assert max(map(len, parts)) <= limit
