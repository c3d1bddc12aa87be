"""Alignment tables. Catches labels shifted twice, a mask one token early, chains that cross a document."""

import torch

from bebop_megatron.alignment import align, packed_segments
from bebop_megatron.losses.prefix import anchors


def by_definition(mask, depths, segments):
    """The rule of the module docstring, one entry at a time."""
    b, s = mask.shape
    rows = torch.zeros(depths, s * b, dtype=torch.long)
    valid = torch.zeros(depths, s * b, dtype=torch.bool)
    for i in range(1, depths + 1):
        for t in range(s):
            for j in range(b):
                inside = t + i < s and len({int(segments[j, u]) for u in range(t, t + i + 1)}) == 1
                valid[i - 1, t * b + j] = bool(inside and mask[j, t + i])
                rows[i - 1, t * b + j] = min(t + i, s - 1) * b + j
    return rows, valid


def test_table_equals_the_definition_for_masks_and_documents():
    generator = torch.Generator().manual_seed(0)
    for depths in (1, 3, 7):
        mask = torch.randint(0, 2, (3, 11), generator=generator)
        segments = torch.stack([packed_segments(torch.tensor(c), 11)[0] for c in ([0, 4, 11], [0, 11], [0, 1, 2, 11])])
        table = align(mask, depths, segments)
        rows, valid = by_definition(mask, depths, segments)
        assert torch.equal(table.valid, valid)
        assert torch.equal(table.target_rows[valid], rows[valid])
        assert table.target_rows.min() >= 0
        assert table.target_rows.max() < 33


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
