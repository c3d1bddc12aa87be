"""Alignment tables. Catches labels shifted twice, a mask one token early, chains that cross a document or its padding,
and a context-parallel rank that looks up a row of the wrong neighbour.
"""

import pytest
import torch

from bebop_megatron.alignment import ContextShard, Reach, align, document_ends
from bebop_megatron.losses.prefix import anchors


def by_definition(mask, depths, segments):
    """The rule of the package docstring, one entry at a time; segments [b, s], negative where nothing counts."""
    b, s = mask.shape
    rows = torch.zeros(depths, s * b, dtype=torch.long)
    valid = torch.zeros(depths, s * b, dtype=torch.bool)
    for i in range(1, depths + 1):
        for t in range(s):
            for j in range(b):
                chain = {int(segments[j, u]) for u in range(t, t + i + 1)} if t + i < s else {-1}
                valid[i - 1, t * b + j] = bool(len(chain) == 1 and min(chain) >= 0 and mask[j, t + i])
                rows[i - 1, t * b + j] = min(t + i, s - 1) * b + j
    return rows, valid


def segments_of(lengths, rooms):
    """Number of each position's document, -1 in its padding."""
    parts = [[i] * n + [-1] * (room - n) for i, (n, room) in enumerate(zip(lengths, rooms, strict=True))]
    return torch.tensor([number for part in parts for number in part])


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


def test_table_equals_the_definition_for_masks_and_documents():
    generator = torch.Generator().manual_seed(0)
    bounds = torch.tensor([[0, 4, 11, 11], [0, 11, 11, 11], [0, 1, 2, 11]])
    segments = torch.stack([segments_of(row.diff().tolist(), row.diff().tolist()) for row in bounds])
    for depths in (1, 3, 7):
        mask = torch.randint(0, 2, (3, 11), generator=generator)
        table = align(mask, depths, bounds)
        rows, valid = by_definition(mask, depths, segments)
        assert torch.equal(table.valid, valid)
        assert torch.equal(table.target_rows[valid], rows[valid])
        assert table.target_rows.min() >= 0
        assert table.target_rows.max() < 33


def test_padding_behind_a_document_is_never_a_target():
    lengths, rooms = [3, 8, 1, 2], [4, 8, 4, 4]
    mask = torch.ones(1, 20)
    table = align(mask, 3, cumulative(rooms)[None], cumulative(lengths)[None])
    assert torch.equal(table.valid, by_definition(mask, 3, segments_of(lengths, rooms)[None])[1])


def test_rows_behind_the_last_document_start_no_chain():
    assert document_ends(torch.arange(6), torch.tensor([[0, 2, 4]])).tolist() == [[2, 2, 4, 4, 0, 0]]


def test_labels_gathered_by_target_row_are_the_tokens_the_depth_predicts():
    tokens = torch.arange(10, 22).view(2, 6)
    # Megatron's labels: labels[t] is the token after position t
    labels = torch.cat([tokens[:, 1:], torch.full((2, 1), -100)], dim=1)
    table = align(torch.tensor([[1, 1, 1, 1, 1, 0]] * 2), 2)
    gathered = labels.t().reshape(-1)[table.target_rows]
    for i in (1, 2):
        for t in range(6 - i - 1):
            for j in (0, 1):
                assert table.valid[i - 1, t * 2 + j]
                assert gathered[i - 1, t * 2 + j] == tokens[j, t + i + 1]
    assert (gathered[table.valid] != -100).all()


def test_sequence_shorter_than_the_chain_has_no_full_anchor():
    table = align(torch.ones(1, 2), 3)
    assert table.valid.tolist() == [[True, False], [False, False], [False, False]]


def test_counts_follow_the_horizon():
    valid = torch.tensor([[1, 1, 0, 1], [1, 0, 1, 1], [1, 0, 1, 0]], dtype=torch.bool)
    assert anchors(valid, "full").tolist() == [1, 1, 1]
    assert anchors(valid, "partial").tolist() == [3, 3, 3]
    assert anchors(valid, "per-depth").tolist() == [3, 3, 2]


def test_zigzag_cuts_each_document_as_megatron_does():
    # Megatron: of each document's 4 chunks, rank 0 holds 0 and 3, rank 1 holds 1 and 2
    bounds = torch.tensor([0, 8, 12])
    assert ContextShard(bounds, 12, 2, 0).positions().tolist() == [0, 1, 6, 7, 8, 11]
    assert ContextShard(bounds, 12, 2, 1).positions().tolist() == [2, 3, 4, 5, 9, 10]


SHARDS = {
    "one-rank": ([24], 1, "zigzag"),
    "zigzag-2": ([24], 2, "zigzag"),
    "zigzag-4-short-chunks": ([24], 4, "zigzag"),
    "contiguous-2": ([24], 2, "contiguous"),
    "contiguous-4": ([24], 4, "contiguous"),
    "packed": ([8, 12, 4], 2, "zigzag"),
    "packed-with-empty-documents": ([8, 0, 12, 0, 4, 0], 2, "zigzag"),
    "many-short-documents": ([4] * 64, 2, "zigzag"),
    "one-long-among-short": ([4, 240, 4, 4], 2, "zigzag"),
    "packed-8": ([64, 16, 16], 4, "zigzag"),
}


@pytest.mark.parametrize("name", SHARDS)
@pytest.mark.parametrize("depths", [1, 3, 7])
def test_every_rank_finds_every_row_ahead_inside_its_own_rows_and_the_halo(name, depths):
    units, size, layout = SHARDS[name]
    bounds, length = cumulative(units), sum(units)
    shards = [ContextShard.of(length, bounds, size, rank, layout) for rank in range(size)]
    reaches = [Reach.of(shard, depths) for shard in shards]
    held = torch.cat([reach.position for reach in reaches])
    assert torch.equal(held.sort().values, torch.arange(length))
    # each rank's rows hold their position; the halo is what an all-gather of the exported rows brings
    halo = [r.position if r.exported is None else r.position[r.exported] for r in reaches]
    for shard, reach in zip(shards, reaches, strict=True):
        table = torch.cat([reach.position, *(halo if size > 1 else [])])
        assert reach.rows.min() >= 0
        found = table[reach.rows]
        ends = document_ends(reach.position, bounds[None])[0]
        for i in range(1, depths + 1):
            inside = reach.position + i < ends
            assert torch.equal(found[i - 1][inside], reach.position[inside] + i), (shard.rank, i)
    if size > 1:
        pieces = 1 if layout == "contiguous" else 2 * len(units)
        assert len(reaches[0].exported) == min(pieces * depths, length // size)


def test_rows_behind_the_last_document_of_a_shard_start_no_chain():
    bounds = torch.tensor([0, 8, 12])
    for rank in range(2):
        reach = Reach.of(ContextShard(bounds, 16, 2, rank), 2)
        assert reach.position.tolist()[6:] == [16, 16]
        assert document_ends(reach.position, bounds[None])[0].tolist() == [8] * 4 + [12] * 2 + [0] * 2


def test_halo_grows_with_the_depths_and_not_with_the_sequence():
    lengths = [1 << 10, 1 << 14]
    sizes = {len(Reach.of(ContextShard.of(n, None, 4, 1, "zigzag"), 5).exported) for n in lengths}
    assert sizes == {10}


def test_tables_are_built_without_a_loop_over_documents():
    # a million positions in 65,536 documents: hopeless if anything were done per document
    shard = ContextShard.of(1 << 20, torch.arange(0, (1 << 20) + 1, 16), 2, 1, "zigzag")
    with torch.profiler.profile() as profile:
        Reach.of(shard, 3)
    assert sum(event.count for event in profile.key_averages()) < 200
