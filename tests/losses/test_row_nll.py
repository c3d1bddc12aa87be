"""The language-model loss that rides on the target's projection. Catches padding left out of the sum, a row of another
chunk or of a neighbour, a loss of rows that nobody asked for, and a changed objective.
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from bebop_megatron.losses import fused_linear_objective

K, N, H, VOCAB, PADDED = 3, 37, 16, 53, 64


def problem():
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, VOCAB, (N,), generator=generator)
    labels[::4] = -1
    return {
        "draft_hidden": torch.randn(K, N, H, generator=generator, requires_grad=True),
        # rows of a neighbour behind one's own
        "target_hidden": torch.randn(N + K, H, generator=generator),
        "weight": torch.randn(PADDED, H, generator=generator) / 4,
        "target_rows": torch.arange(N) + torch.arange(1, K + 1)[:, None],
        "valid": torch.rand(K, N, generator=generator) < 0.6,
        "vocab_size": VOCAB,
        "logit_scale": 0.7,
    }, labels


@pytest.mark.parametrize("chunk", [None, 16, 5])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_equals_cross_entropy_over_the_padded_vocabulary(chunk, temperature):
    inputs, labels = problem()
    options = {"chunk_tokens": chunk, "target_temperature": temperature}
    out = fused_linear_objective(**inputs, **options, row_labels=labels)
    logits = inputs["target_hidden"][:N] @ inputs["weight"].t() * inputs["logit_scale"]
    expected = cross_entropy(logits, labels.clamp(min=0), reduction="none").where(labels >= 0, 0.0)
    torch.testing.assert_close(out.row_nll, expected)
    assert not out.row_nll.requires_grad


def test_leaves_the_objective_and_its_gradient_as_they_were():
    inputs, labels = problem()
    grads = []
    for extra in ({}, {"row_labels": labels}):
        out = fused_linear_objective(**inputs, **extra)
        (grad,) = torch.autograd.grad(out.loss, inputs["draft_hidden"])
        grads.append((out.loss.detach(), grad))
    torch.testing.assert_close(grads[0], grads[1])
    assert fused_linear_objective(**inputs).row_nll is None


def test_rows_that_hold_nan_and_are_not_asked_for_do_no_harm():
    inputs, labels = problem()
    inputs["valid"] = torch.zeros(K, N, dtype=torch.bool)
    inputs["target_hidden"][:N][labels < 0] = torch.nan
    out = fused_linear_objective(**inputs, row_labels=labels)
    assert out.row_nll.isfinite().all()
    assert out.row_nll[labels < 0].eq(0).all()


def test_labels_that_do_not_fit_are_refused():
    inputs, labels = problem()
    with pytest.raises(ValueError, match="row_labels must be"):
        fused_linear_objective(**inputs, row_labels=labels[:-1])
