"""Triton twin of `rows.py`: one program per row, which reads the logits as they are and writes no probability.

The matrix products hand over logits in half precision, and so they stay: each kernel reads them again and recomputes
the probabilities in fp32 (fp64 of fp64), because memory traffic is what these passes cost. All columns are read once in
a pass. New objectives choose coefficients of the four row directions (see `registry.py`); they add nothing here.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from bebop_megatron.losses.rows import LocalRows, Overlap

# columns a program works on at a time, and how many of them a thread holds: 16 bytes of a row in half precision
_BLOCK = 2048
_PER_THREAD = 8

_MINUS_INFINITY = tl.constexpr(-torch.inf)
# -inf becomes this, and this times a probability of 0 is 0
_LOWEST = tl.constexpr(torch.finfo(torch.float32).min)
# a mean logit below this can only come from a probability on a logit of -inf
_NEVER = tl.constexpr(-1e12)


@triton.jit
def _at_least_lowest(x):
    # a NaN has to stay one
    return tl.maximum(x, _LOWEST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def _logits(block, inside, scale):
    return tl.load(block, mask=inside, other=_MINUS_INFINITY).to(scale.dtype) * scale


@triton.jit
def _above(logit, top):
    # of a row without a finite logit, `top` is -inf
    return _at_least_lowest(logit - tl.maximum(top, _LOWEST))


@triton.jit
def _expectation(mean):
    return tl.where(mean < _NEVER, _MINUS_INFINITY, mean)


@triton.jit
def _normalise_rows(
    logits,  # [n, v/tp] in
    stride,
    scale,  # [1] in
    target,  # [m, v/tp] in, or None
    target_stride,
    target_scale,  # [1] in
    target_top,  # [m] in
    target_log_sum,  # [m] in
    target_column,  # [m] in
    rows,  # [n] in
    label,  # [n] in, or None
    stats,  # [6, n] out
    column,  # [n] out
    n,
    columns,
    REVERSE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits += row * stride
    scale = tl.load(scale)
    lanes = tl.arange(0, BLOCK)
    # sums stay apart by lane until the end: the largest logit is the only reduction inside the loop
    total = tl.zeros((BLOCK,), scale.dtype)
    moment = tl.zeros((BLOCK,), scale.dtype)
    cross = tl.zeros((BLOCK,), scale.dtype)
    reverse = tl.zeros((BLOCK,), scale.dtype)
    top = tl.full((), _MINUS_INFINITY, scale.dtype)
    block_of_top = 0
    if target is not None:
        target_row = tl.load(rows + row)
        target += target_row * target_stride
        target_scale = tl.load(target_scale)
        target_top = tl.load(target_top + target_row)
        target_log_sum = tl.load(target_log_sum + target_row)
        # where the target's weight lies, differences from this logit are small
        origin = _logits(logits + tl.load(target_column + target_row), True, scale)
        origin = tl.where(origin > _LOWEST, origin, 0)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        logit = _logits(logits + start + lanes, inside, scale)
        largest = tl.max(logit, 0)
        # strict > keeps the first of equal maxima
        if largest > top:
            # before the first finite logit there is nothing to rescale
            down = tl.where(top > _MINUS_INFINITY, top - largest, 0)
            shrink = tl.exp(down)
            moment = (moment + total * down) * shrink
            total = total * shrink
            if REVERSE:
                # not 0 * -inf, where columns with an infinite ratio turn out to have no probability
                reverse = tl.where(shrink > 0, reverse * shrink, 0)
            top = largest
            block_of_top = start
        above = _above(logit, top)
        weight = tl.exp(above)
        total += weight
        moment += weight * above
        if target is not None:
            target_above = _above(_logits(target + start + lanes, inside, target_scale), target_top)
            cross += tl.exp(target_above - target_log_sum) * _at_least_lowest(logit - origin)
            if REVERSE:
                reverse += weight * target_above
    norm = tl.sum(total, 0)
    # a row without a finite logit gets a share of 0 later, which must not meet an infinity or NaN here
    norm = tl.where(norm == 0, 1, norm)
    lanes += block_of_top
    logit = _logits(logits + lanes, lanes < columns, scale)
    first = tl.min(tl.where(logit == top, lanes, columns), 0)
    # a row of NaN has no largest logit
    tl.store(column + row, tl.where(first < columns, first, 0))
    stats += row
    tl.store(stats, top)
    tl.store(stats + n, tl.log(norm))
    tl.store(stats + 2 * n, tl.sum(moment, 0) / norm)
    top = tl.maximum(top, _LOWEST)
    expected = tl.zeros((), scale.dtype)
    if target is not None:
        expected = _expectation(tl.sum(cross, 0)) - (top - origin)
    tl.store(stats + 3 * n, expected)
    expected = tl.zeros((), scale.dtype)
    if REVERSE:
        expected = _expectation(tl.sum(reverse, 0) / norm)
    tl.store(stats + 4 * n, expected)
    of_label = tl.zeros((), scale.dtype)
    if label is not None:
        place = tl.load(label + row)
        of_label = _logits(logits + place, place >= 0, scale) - top
    tl.store(stats + 5 * n, of_label)


@triton.jit
def _overlap_of_rows(
    draft,  # [n, v/tp] in
    draft_stride,
    draft_scale,  # [1] in
    draft_top,  # [n] in
    draft_log_sum,  # [n] in
    draft_share,  # [n] in, or None
    target,  # [m, v/tp] in
    target_stride,
    target_scale,  # [1] in
    target_top,  # [m] in
    target_log_sum,  # [m] in
    target_share,  # [m] in, or None
    rows,  # [n] in
    sums,  # [3, n] out
    n,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    target_row = tl.load(rows + row)
    draft += row * draft_stride
    draft_scale = tl.load(draft_scale)
    draft_top = tl.load(draft_top + row)
    draft_log_sum = tl.load(draft_log_sum + row)
    target += target_row * target_stride
    target_scale = tl.load(target_scale)
    target_top = tl.load(target_top + target_row)
    target_log_sum = tl.load(target_log_sum + target_row)
    if draft_share is not None:
        draft_share = tl.load(draft_share + row)
    if target_share is not None:
        target_share = tl.load(target_share + target_row)
    lanes = tl.arange(0, BLOCK)
    alpha = tl.zeros((BLOCK,), draft_scale.dtype)
    covered = tl.zeros((BLOCK,), draft_scale.dtype)
    rejected = tl.zeros((BLOCK,), draft_scale.dtype)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        q = tl.exp(_above(_logits(draft + start + lanes, inside, draft_scale), draft_top) - draft_log_sum)
        p = tl.exp(_above(_logits(target + start + lanes, inside, target_scale), target_top) - target_log_sum)
        if draft_share is not None:
            q *= draft_share
        if target_share is not None:
            p *= target_share
        # a tie counts as accepted
        over = q > p
        alpha += tl.where(over, p, q)
        covered += tl.where(over, 0, q)
        rejected += tl.where(over, q, 0)
    sums += row
    tl.store(sums, tl.sum(alpha, 0))
    tl.store(sums + n, tl.sum(covered, 0))
    tl.store(sums + 2 * n, tl.sum(rejected, 0))


@triton.jit
def _direction_of_rows(
    draft,  # [n, v/tp] in
    draft_stride,
    draft_scale,  # [1] in
    draft_top,  # [n] in
    draft_log_sum,  # [n] in
    draft_share,  # [n] in, or None
    target,  # [m, v/tp] in, or None
    target_stride,
    target_scale,  # [1] in
    target_top,  # [m] in
    target_log_sum,  # [m] in
    target_share,  # [m] in, or None
    rows,  # [n] in
    ce,  # [n] in, or None
    kl,  # [n] in, or None
    reverse_kl,  # [n] in, or None
    tv,  # [n] in, or None
    covered,  # [n] in
    rejected,  # [n] in
    log_ratio,  # [n] in, or None
    label,  # [n] in, or None
    out,  # [n, v/tp] out; may be draft
    out_stride,
    columns,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    draft += row * draft_stride
    out += row * out_stride
    draft_scale = tl.load(draft_scale)
    draft_top = tl.load(draft_top + row)
    draft_log_sum = tl.load(draft_log_sum + row)
    if draft_share is not None:
        draft_share = tl.load(draft_share + row)
    if target is not None:
        target_row = tl.load(rows + row)
        target += target_row * target_stride
        target_scale = tl.load(target_scale)
        target_top = tl.load(target_top + target_row)
        target_log_sum = tl.load(target_log_sum + target_row)
        if target_share is not None:
            target_share = tl.load(target_share + target_row)
    # what all columns of the row share, column by column times q
    if ce is not None:
        ce = tl.load(ce + row)
        label = tl.load(label + row)
    if kl is not None:
        kl = tl.load(kl + row)
    if reverse_kl is not None:
        reverse_kl = tl.load(reverse_kl + row)
        log_ratio = tl.load(log_ratio + row)
    if tv is not None:
        tv = tl.load(tv + row)
        if_over = tv * tl.load(covered + row)
        if_not = -tv * tl.load(rejected + row)
    lanes = tl.arange(0, BLOCK)
    for start in range(0, columns, BLOCK):
        inside = start + lanes < columns
        above = _above(_logits(draft + start + lanes, inside, draft_scale), draft_top)
        q = tl.exp(above - draft_log_sum)
        if draft_share is not None:
            q *= draft_share
        total = tl.zeros((BLOCK,), draft_scale.dtype)
        if ce is not None:
            total += ce * (q - tl.where(start + lanes == label, 1, 0))
        if target is not None:
            target_above = _above(_logits(target + start + lanes, inside, target_scale), target_top)
            p = tl.exp(target_above - target_log_sum)
            if target_share is not None:
                p *= target_share
            if kl is not None:
                total += kl * (q - p)
            if reverse_kl is not None:
                # q = 0 hides a ratio that may not be finite
                total += tl.where(q == 0, 0, reverse_kl * q * (above - target_above + log_ratio))
            if tv is not None:
                total += q * tl.where(q > p, if_over, if_not)
        tl.store(out + start + lanes, total.to(out.dtype.element_ty), mask=inside)


def _launch(kernel: Any, n: int, columns: int, like: Tensor, *arguments: Any, **constants: Any) -> None:
    """Run a program for each of n rows, on the device of `like`."""
    block = min(_BLOCK, max(256, triton.next_power_of_2(columns)))
    with torch.cuda.device_of(like):
        kernel[(n,)](*arguments, BLOCK=block, num_warps=max(1, block // (32 * _PER_THREAD)), **constants)


def _scale(side: LocalRows) -> Tensor:
    # an argument that is a Python float would be rounded to fp32, and a constant compiled in again for every value
    return torch.full_like(side.top[:1], side.scale)


def _side(side: LocalRows, share: Tensor | None) -> tuple[Any, ...]:
    return side.values, side.values.stride(0), _scale(side), side.top, side.log_sum, share


def local_rows(
    logits: Tensor,
    scale: float = 1.0,
    *,
    target: LocalRows | None = None,
    rows: Tensor | None = None,
    label: Tensor | None = None,
    reverse: bool = False,
    overwrite: bool = False,
) -> LocalRows:
    """Softmax of each row within this rank's columns, of which only the statistics are written.

    Shape: as in `rows.local_rows`; `values` are the logits themselves, `logits` is always None.
    Memory: nothing of size n x columns, unless the columns are not next to each other: then a copy that has them so.
    """
    n, columns = logits.shape
    if logits.stride(1) != 1:
        logits = logits.contiguous()
    wide = torch.promote_types(logits.dtype, torch.float32)
    stats = torch.empty(6, n, dtype=wide, device=logits.device)
    column = torch.empty(n, dtype=torch.int64, device=logits.device)
    done = LocalRows(logits, scale, stats[0], column, *stats[1:].unbind())
    if columns == 0:
        column.zero_()
        stats.zero_()
        stats[0] = -torch.inf
    elif n:
        meets: tuple[Any, ...] = (None,) * 6
        if target is not None:
            assert rows is not None
            meets = target.values, target.values.stride(0), _scale(target), target.top, target.log_sum, target.column
        arguments = (logits, logits.stride(0), _scale(done), *meets, rows, label, stats, column, n, columns)
        _launch(_normalise_rows, n, columns, logits, *arguments, REVERSE=reverse and target is not None)
    return done


def probability_at(side: LocalRows, rows: Tensor, column: Tensor) -> Tensor:
    """Probability [n], within this rank's columns, of `column[i]` in row `rows[i]`."""
    top = side.top[rows]
    logit = side.values[rows, column].to(top.dtype) * side.scale
    return torch.exp(logit - top - side.log_sum[rows])


def overlap(
    draft: LocalRows, target: LocalRows, rows: Tensor, draft_share: Tensor | None, target_share: Tensor | None
) -> Overlap:
    """Sums over this rank's columns: see `rows.overlap`."""
    n, columns = draft.values.shape
    if not n or not columns:
        return Overlap(*draft.top.new_zeros(3, n))
    sums = draft.top.new_empty(3, n)
    sides = *_side(draft, draft_share), *_side(target, target_share)
    _launch(_overlap_of_rows, n, columns, draft.values, *sides, rows, sums, n, columns)
    return Overlap(*sums)


def direction(
    draft: LocalRows,
    target: LocalRows | None,
    rows: Tensor,
    draft_share: Tensor | None,
    target_share: Tensor | None,
    coefficients: dict[str, Tensor],
    covered: Tensor,
    rejected: Tensor,
    log_ratio: Tensor | None,
    label: Tensor | None,
    *,
    overwrite: bool = False,
) -> Tensor:
    """Sum of the row directions `ce`, `kl`, `reverse-kl` and `tv`, each times its coefficient [n] -> [n, columns].

    Shape, Gradient: as in `rows.direction`; the result has the type of the logits.
    Memory: with `overwrite` the draft's logits become the result.
    """
    n, columns = draft.values.shape
    out = draft.values if overwrite else torch.empty(n, columns, dtype=draft.values.dtype, device=rows.device)
    if not n or not columns:
        return out
    # `ce` alone needs no target, even where there is one
    sides = *_side(draft, draft_share), *((None,) * 6)
    if target is not None and coefficients.keys() - {"ce"}:
        sides = *_side(draft, draft_share), *_side(target, target_share)
    weights = [coefficients.get(name) for name in ("ce", "kl", "reverse-kl", "tv")]
    weights = [None if w is None else w.to(draft.top.dtype).contiguous() for w in weights]
    rest = covered, rejected, log_ratio, label, out, out.stride(0), columns
    _launch(_direction_of_rows, n, columns, draft.values, *sides, rows, *weights, *rest)
    return out
