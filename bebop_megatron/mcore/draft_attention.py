"""Attention of a later draft step: over the first step's keys up to the anchor, and over its own chain's few keys.

Both parts share one softmax. Scores of a block of queries are formed, used and dropped, forward and backward, so
memory grows with the sequence and not with its square; all that is saved is the output and one log-sum-exp per row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from bebop_megatron.mcore.anchors import Anchors

# bytes of scores that one block of queries may take
_BLOCK_BYTES = 256 << 20


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Scores and sums are at least float32."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def _grouped(x: Tensor, groups: int) -> Tensor:
    """[s, b, n, d] -> [b, g, n/g, s, d], a view."""
    return x.unflatten(2, (groups, -1)).permute(1, 2, 3, 0, 4)


def _per_group(x: Tensor) -> Tensor:
    """[s, b, g, d] -> [b, g, s, d], a view."""
    return x.permute(1, 2, 0, 3)


class _Blocks:
    """The scores of one block of queries after another; the same in the forward and the backward pass."""

    def __init__(self, query: Tensor, key: Tensor, anchors: Anchors, mask: Tensor | None, scale: float) -> None:
        self.groups, self.scale, self.mask, self.anchors = key.shape[2], scale, mask, anchors
        self.dtype = _wide(query.dtype)
        self.query, self.key = _grouped(query, self.groups), _per_group(key)
        row_bytes = query.shape[1] * query.shape[2] * key.shape[0] * torch.finfo(self.dtype).bits // 8
        self.spans = anchors.spans(max(16, _BLOCK_BYTES // max(1, row_bytes)), len(key))

    def rows(self, x: Tensor, start: int, stop: int) -> Tensor:
        """[b, g, r, s, d] -> [b, g, r * rows, d] in the dtype of the scores."""
        return x[..., start:stop, :].to(self.dtype).flatten(2, 3)

    def keys(self, x: Tensor, first: int, last: int) -> Tensor:
        """[b, g, s, d] -> [b, g, keys, d] in the dtype of the scores."""
        return x[:, :, first:last].to(self.dtype)

    def own(self, x: Tensor, start: int, stop: int) -> Tensor:
        """[s, b, g, d] -> [b, g, 1, rows, d] in the dtype of the scores."""
        return _per_group(x)[:, :, None, start:stop].to(self.dtype)

    def base_scores(self, q: Tensor, k: Tensor, span: tuple[int, int, int, int]) -> Tensor:
        """[b, g, r, rows, keys], minus infinity where the anchor does not see the key."""
        start, stop, first, last = span
        scores = (q @ k.transpose(-1, -2)).unflatten(2, (-1, stop - start)).mul_(self.scale)
        index = torch.arange(first, last, device=q.device)
        at, lower = self.anchors.position[start:stop, None], self.anchors.first[start:stop, None]
        hidden = (index > at) | (index < lower)
        if self.mask is not None:
            # Megatron's masks [b or 1, 1, s, s] mark what must not be seen
            hidden = hidden | self.mask[:, :, None, start:stop, first:last]
        return scores.masked_fill_(hidden, float("-inf"))

    def own_scores(self, q: Tensor, keys: tuple[Tensor, ...], start: int, stop: int) -> Tensor:
        """[b, g, r, rows, m] of the chain's own keys."""
        q = q.unflatten(2, (-1, stop - start))
        scores = [(q * self.own(key, start, stop)).sum(-1) for key in keys]
        return torch.stack(scores, -1).mul_(self.scale) if scores else q.new_empty((*q.shape[:-1], 0))


class _DraftAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        mask: Tensor | None,
        anchors: Anchors,
        scale: float,
        *own: Tensor,
    ) -> Tensor:
        own_keys, own_values = own[: len(own) // 2], own[len(own) // 2 :]
        blocks = _Blocks(query, key, anchors, mask, scale)
        values = _per_group(value)
        out = query.new_empty((*query.shape[:-1], value.shape[-1]))
        out_view = _grouped(out, blocks.groups)
        lse = query.new_empty(blocks.query.shape[:-1], dtype=blocks.dtype)
        for span in blocks.spans:
            start, stop, first, last = span
            q = blocks.rows(blocks.query, start, stop)
            base = blocks.base_scores(q, blocks.keys(blocks.key, first, last), span)
            extra = blocks.own_scores(q, own_keys, start, stop)
            total = torch.logsumexp(base, -1)
            if own_keys:
                total = torch.logaddexp(total, torch.logsumexp(extra, -1))
            base.sub_(total[..., None]).exp_()
            extra.sub_(total[..., None]).exp_()
            block = (base.flatten(2, 3) @ blocks.keys(values, first, last)).unflatten(2, (-1, stop - start))
            for j, own_value in enumerate(own_values):
                block += extra[..., j, None] * blocks.own(own_value, start, stop)
            out_view[..., start:stop, :] = block.to(out.dtype)
            lse[..., start:stop] = total
        ctx.save_for_backward(query, key, value, mask, out, lse, *own)
        ctx.anchors, ctx.scale = anchors, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, mask, out, lse, *own = ctx.saved_tensors
        own_keys, own_values = tuple(own[: len(own) // 2]), tuple(own[len(own) // 2 :])
        blocks = _Blocks(query, key, ctx.anchors, mask, ctx.scale)
        values, dtype = _per_group(value), blocks.dtype
        grad_view, out_view = _grouped(grads[0], blocks.groups), _grouped(out, blocks.groups)
        grad_query = torch.empty_like(query, memory_format=torch.contiguous_format)
        query_view = _grouped(grad_query, blocks.groups)
        grad_key = key.new_zeros(blocks.key.shape, dtype=dtype)
        grad_value = value.new_zeros(values.shape, dtype=dtype)
        grad_own = [torch.empty_like(x, memory_format=torch.contiguous_format) for x in own]
        for span in blocks.spans:
            start, stop, first, last = span
            size = (-1, stop - start)
            q, k = blocks.rows(blocks.query, start, stop), blocks.keys(blocks.key, first, last)
            g = blocks.rows(grad_view, start, stop)
            g_rows = g.unflatten(2, size)
            # sum over all keys of probability * its gradient: the softmax's own correction
            delta = (g_rows * out_view[..., start:stop, :].to(dtype)).sum(-1, keepdim=True)
            total = lse[..., start:stop, None]
            weight = blocks.base_scores(q, k, span).sub_(total).exp_()
            flat = weight.flatten(2, 3)
            grad_value[:, :, first:last] += flat.transpose(-1, -2) @ g
            slope = (g @ blocks.keys(values, first, last).transpose(-1, -2)).unflatten(2, size)
            slope = slope.sub_(delta).mul_(weight).mul_(ctx.scale).flatten(2, 3)
            grad_key[:, :, first:last] += slope.transpose(-1, -2) @ q
            grad_q = (slope @ k).unflatten(2, size)
            extra = blocks.own_scores(q, own_keys, start, stop).sub_(total).exp_()
            for j, (own_key, own_value) in enumerate(zip(own_keys, own_values, strict=True)):
                w = extra[..., j, None]
                own_slope = w * ((g_rows * blocks.own(own_value, start, stop)).sum(-1, keepdim=True) - delta)
                own_slope = own_slope * ctx.scale
                grad_q += own_slope * blocks.own(own_key, start, stop)
                _per_group(grad_own[j])[:, :, start:stop] = (own_slope * q.unflatten(2, size)).sum(2).to(query.dtype)
                value_grad = (w * g_rows).sum(2).to(value.dtype)
                _per_group(grad_own[len(own_keys) + j])[:, :, start:stop] = value_grad
            query_view[..., start:stop, :] = grad_q.to(query.dtype)
        back = lambda x: x.permute(2, 0, 1, 3)  # noqa: E731
        return (grad_query, back(grad_key).to(key.dtype), back(grad_value).to(value.dtype), None, None, None, *grad_own)


def draft_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    own_keys: tuple[Tensor, ...] = (),
    own_values: tuple[Tensor, ...] = (),
    *,
    anchors: Anchors,
    scale: float | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Attention of draft step i > 1, one query per anchor, with grouped queries.

    Row t attends to the keys of step 1 at anchors `anchors.first[t]` .. `anchors.position[t]`, and to row t of each of
    `own_keys`: the keys of steps 2..i of the same chain (none in mode `first-depth`).

    Shape: query [s, b, n, d], key [S, b, g, d], value [S, b, g, dv] of step 1, S = the sequence of all context-parallel
    ranks; own_keys and own_values: i-1 times [s, b, g, d] and [s, b, g, dv]; mask [b or 1, 1, s, S] bool, True = not
    seen -> [s, b, n, dv].
    Gradient: of every argument but the mask; d score = probability * (grad . value - grad . out), one softmax over
    both parts. Not differentiable twice.
    Memory: saves its arguments, the output and s * b * n float32; works in blocks of at most 256 MiB of scores.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    return _DraftAttention.apply(query, key, value, mask, anchors, scale, *own_keys, *own_values)  # pyright: ignore[reportReturnType]
