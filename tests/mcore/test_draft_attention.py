"""Draft-step attention against one dense softmax over all depths' keys, in float64, values and every gradient.

Catches: two partial softmaxes merged wrongly, a block boundary off by one, gradients of grouped keys that miss a head.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.mcore import draft_attention as subject
from bebop_megatron.mcore.anchors import Anchors
from tests.mcore.drafting import visible

DEPTHS, LENGTHS = 4, [7, 1, 30, 12]


def make_anchors():
    end = torch.tensor(LENGTHS).cumsum(0)
    document = torch.arange(len(LENGTHS)).repeat_interleave(torch.tensor(LENGTHS))
    position, first = torch.arange(int(end[-1])), (end - torch.tensor(LENGTHS))[document]
    return Anchors(position, first, None, None, (position, first))


def inputs(b, n, g, d, dv, dtype):
    generator = torch.Generator().manual_seed(3)
    s = sum(LENGTHS)
    make = lambda heads, size: [  # noqa: E731
        torch.randn(s, b, heads, size, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
        for _ in range(DEPTHS)
    ]
    return make(n, d), make(g, d), make(g, dv)


def dense(query, key, value, anchors, mode, scale, mask=None):
    """Depths 2..k by one softmax over all k * s keys: [k - 1, s, b, n, dv]."""
    q, k, v = (torch.cat(x).double() for x in (query, key, value))
    share = q.shape[2] // k.shape[2]
    k, v = k.repeat_interleave(share, 2), v.repeat_interleave(share, 2)
    seen = visible(DEPTHS, anchors.position, anchors.first, mode)
    if mask is not None:
        seen = seen & ~mask.repeat(DEPTHS, DEPTHS)
    scores = torch.einsum("sbnd,tbnd->bnst", q, k).mul(scale).masked_fill(~seen, -torch.inf)
    out = torch.einsum("bnst,tbnd->sbnd", scores.softmax(-1), v)
    return out.unflatten(0, (DEPTHS, -1))[1:]


def ours(query, key, value, anchors, mode, scale, mask=None):
    outputs = []
    for i in range(1, DEPTHS):
        own = (key[1 : i + 1], value[1 : i + 1]) if mode == "chain" else ((), ())
        outputs.append(
            subject.draft_attention(
                query[i],
                key[0],
                value[0],
                tuple(own[0]),
                tuple(own[1]),
                anchors=anchors,
                scale=scale,
                mask=None if mask is None else mask[None, None],
            )
        )
    return torch.stack(outputs)


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("block", [1, 1 << 30], ids=["many-blocks", "one-block"])
@pytest.mark.parametrize(("n", "g", "dv"), [(4, 2, 8), (3, 3, 5), (4, 1, 8)])
def test_values_and_gradients_equal_a_dense_softmax(monkeypatch, mode, block, n, g, dv):
    monkeypatch.setattr(subject, "_BLOCK_BYTES", block)
    anchors, leaves = make_anchors(), inputs(2, n, g, 8, dv, torch.float64)
    flat = [x for group in leaves for x in group]
    # the query, key and value of depth 1 that only depth 1 uses have no gradient here
    used = [x for x in flat if x is not leaves[0][0]]
    if mode == "first-depth":
        used = [*leaves[0][1:], leaves[1][0], leaves[2][0]]
    results = []
    for function in (ours, dense):
        out = function(*leaves, anchors, mode, 0.3)
        slope = torch.randn(out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        results.append((out, torch.autograd.grad(out, used, slope)))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-12, atol=1e-12)
    for actual, expected in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-11, atol=1e-12)


def test_explicit_mask_hides_keys_of_both_kinds_of_blocks(monkeypatch):
    monkeypatch.setattr(subject, "_BLOCK_BYTES", 1)
    anchors, leaves = make_anchors(), inputs(1, 2, 2, 8, 8, torch.float64)
    s = sum(LENGTHS)
    # every anchor keeps its own key
    mask = (torch.rand(s, s, generator=torch.Generator().manual_seed(2)) < 0.3) & ~torch.eye(s, dtype=torch.bool)
    torch.testing.assert_close(
        ours(*leaves, anchors, "chain", 0.3, mask), dense(*leaves, anchors, "chain", 0.3, mask), rtol=1e-12, atol=1e-12
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_narrow_types_accumulate_in_float32(dtype):
    anchors, leaves = make_anchors(), inputs(1, 4, 2, 8, 8, dtype)
    out, expected = (f(*leaves, anchors, "chain", 0.3) for f in (ours, dense))
    assert out.dtype == dtype
    # one rounding of the result, none of scores or weights
    tolerance = 2.0**-8 if dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance / 8)
    grads = [
        torch.autograd.grad(f(*leaves, anchors, "chain", 0.3).double().sum(), leaves[1][0])[0] for f in (ours, dense)
    ]
    assert (grads[0] - grads[1]).abs().max() <= 4 * tolerance * grads[1].abs().max()


def test_saved_memory_grows_with_the_sequence_and_not_with_its_square():
    saved = {}
    for length in (64, 128):
        position, zero = torch.arange(length), torch.zeros(length, dtype=torch.int64)
        anchors = Anchors(position, zero, None, None, (position, zero))
        make = lambda heads, s=length: torch.randn(s, 1, heads, 8, requires_grad=True)  # noqa: E731
        query, key, value, own = make(4), make(2), make(2), ((make(2),), (make(2),))
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, n=length: saved.setdefault(n, []).append(x.numel()) or x, lambda x: x
        ):
            subject.draft_attention(query, key, value, *own, anchors=anchors)
    # query and output, keys and values of step 1 and of the chain, one log-sum-exp for each row and head
    assert sum(saved[128]) == 2 * sum(saved[64]) == 128 * (2 * 4 * 8 + 2 * 2 * 8 + 2 * 2 * 8 + 4)
