"""Normalisation counts. Catches 1/cp, local instead of global counts, and 0/0 of a batch without targets."""

import pytest
import torch

from bebop_megatron.alignment import align
from bebop_megatron.losses.prefix import anchors
from bebop_megatron.reduction import StepCounts, batch_counts, local_counts


def test_counts_of_a_step_are_the_sum_over_its_batches():
    masks = [torch.ones(2, 8), torch.zeros(2, 8), torch.tensor([[0, 0, 1, 1, 1, 0, 1, 1.0]] * 2)]
    for horizon in ("full", "partial", "per-depth"):
        total = batch_counts([{"loss_mask": m} for m in masks], 3, horizon)
        expected = sum(anchors(align(m, 3).valid, horizon).double() for m in masks)
        assert total[0] == 0
        assert total[1] == sum(m.sum() for m in masks)
        assert torch.equal(total[2:], expected)


def test_documents_of_a_packed_batch_are_not_crossed():
    batch = {"loss_mask": torch.ones(1, 8), "cu_seqlens": torch.tensor([[0, 3, 8]], dtype=torch.int32)}
    assert batch_counts([batch], 2, "full")[2:].tolist() == [4, 4]


def test_padded_documents_end_where_their_padding_starts():
    batch = {
        "loss_mask": torch.ones(1, 8),
        "cu_seqlens": torch.tensor([[0, 3, 5]]),
        "cu_seqlens_padded": torch.tensor([[0, 4, 8]]),
    }
    assert batch_counts([batch], 2, "full")[2:].tolist() == [1, 1]
    assert batch_counts([batch], 2, "per-depth")[2:].tolist() == [3, 1]


def test_batch_without_labels_has_a_mask_of_tokens():
    # the label of row t is token t+1: one position less, and the mask moves with it
    batch = {"loss_mask": torch.tensor([[1, 1, 1, 1, 1, 0]]), "tokens": torch.zeros(1, 6)}
    assert batch_counts([batch], 2, "per-depth")[2:].tolist() == [3, 2]
    assert batch_counts([batch | {"labels": torch.zeros(1, 6)}], 2, "per-depth")[2:].tolist() == [4, 3]


def test_unreadable_batches_are_reported_not_guessed():
    assert batch_counts([None, {"tokens": 1}], 2, "full")[0] == 2


def test_no_anchor_anywhere_gives_zero_not_nan():
    counts = StepCounts(torch.tensor([0.0, 2.0]).double(), torch.tensor(0.0).double(), 4)
    assert counts.mean_scale().tolist() == [0.0, 0.5]
    assert counts.megatron_divisor(per_token_loss=True, replicas=2) == 1
    assert counts.megatron_divisor(per_token_loss=False, replicas=2) == 8


def test_local_counts_are_megatrons_own_normalisation():
    mask = torch.tensor([[1, 1, 0, 1, 1.0]])
    counts = local_counts(align(mask, 2).valid, mask.sum(), "per-depth")
    assert counts.anchors.tolist() == [3, 2]
    assert counts.tokens == 4


@pytest.mark.parametrize("key", ["cu_seqlens_q", "cu_seqlens_argmin", "cu_seqlens_unpadded"])
def test_packed_batches_of_megatron_bridge_are_not_counted_as_whole_sequences(key):
    plain = {"loss_mask": torch.ones(1, 8), "tokens": torch.zeros(1, 8), "labels": torch.zeros(1, 8)}
    bounds = torch.tensor([[0, 4, 8]], dtype=torch.int32)
    assert batch_counts([plain], 2, "full")[0] == 0
    assert batch_counts([plain | {key: bounds}], 2, "full")[0] == 1
