"""One rank's share of the row statistics and of the unweighted gradients, in PyTorch; `kernels.py` is its Triton twin.

Nothing here communicates: `statistics.py` adds up the ranks. Rows are worked on in blocks that fit into the cache of a
CPU, and comparisons that would make boolean tensors are written as arithmetic, which CPUs vectorise.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

# elements of one block: of a CPU's for each thread, small enough for its caches and large enough that calls do not
# count; elsewhere large enough to fill the device, and small beside a chunk
_BLOCK = 2**19
_DEVICE_BLOCK = 2**24
_TILE = 256
# what the scratch memory of a block holds
_DRAFT, _TARGET, _TERM, _REJECTED, _TOTAL = range(5)
# a mean logit below this can only come from a probability on a logit of -inf
_NEVER = -1e12


@dataclass(frozen=True)
class LocalRows:
    """n distributions over this rank's columns, as if they were the whole vocabulary.

    Shape: `values` [n, columns]: here the probabilities, in the Triton twin the logits as given; `scale` multiplies
    those. `top` [n] largest scaled logit, `column` [n] int64 the first that holds it, `log_sum` [n] log sum
    e^(logit - top), `mean` [n] expectation of logit - top. Of a draft that has a target, `cross` [n]: the same
    expectation under the target's probabilities; with `reverse`, `reverse_cross` [n]: that of the target's logit - top
    under the draft's. `label_logit` [n]: logit - top of the labels given, anything where another rank holds them.
    `logits` [n, columns]: logit - top, kept where `reverse_cross` needs it.
    """

    values: Tensor
    scale: float
    top: Tensor
    column: Tensor
    log_sum: Tensor
    mean: Tensor
    cross: Tensor
    reverse_cross: Tensor
    label_logit: Tensor
    logits: Tensor | None = None


@dataclass(frozen=True)
class Overlap:
    """This rank's part of alpha = sum min(p, q), S = sum q [q <= p] and 1 - S = sum q [q > p]: [n] each.

    One of the last two can be tiny, and then it is not the difference of 1 and the other.
    """

    alpha: Tensor
    covered: Tensor
    rejected: Tensor


def block_rows(n: int, columns: int, device: torch.device) -> int:
    """How many of n rows make a block."""
    elements = _BLOCK * torch.get_num_threads() if device.type == "cpu" else _DEVICE_BLOCK
    return max(1, min(elements // max(columns, 1), n))


def blocks(n: int, size: int) -> Iterator[slice]:
    """Slices of `size` rows, the last one shorter."""
    return (slice(begin, min(begin + size, n)) for begin in range(0, n, size))


def _first_largest(z: Tensor) -> Tensor:
    """Column [n] of each row's first maximum: z [n, columns]; tile by tile, an order faster than `argmax` on a CPU."""
    n, columns = z.shape
    tiles = columns // _TILE
    if tiles < 2:
        return z.argmax(-1)
    whole = tiles * _TILE
    tile = z[:, :whole].unflatten(1, (tiles, _TILE)).amax(-1).argmax(-1)
    inside = z[:, :whole].unflatten(1, (tiles, _TILE))[torch.arange(n, device=z.device), tile]
    best, offset = inside.max(-1)
    column = tile * _TILE + offset
    if whole == columns:
        return column
    rest, later = z[:, whole:].max(-1)
    return torch.where(rest > best, whole + later, column)


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
    """Softmax of each row within this rank's columns.

    Shape: logits [n, columns]; draft row i meets row `rows[i]` of `target`; label [n]: column of a label, or -1.
    Statistics are fp32 (fp64 for fp64).
    Memory: one block [n, columns] fp32, with `reverse` two; `overwrite` puts the first into `logits` if it fits.
    """
    n, columns = logits.shape
    wide = torch.promote_types(logits.dtype, torch.float32)
    values = logits if overwrite and logits.dtype == wide else torch.empty_like(logits, dtype=wide)
    kept = torch.empty_like(values) if reverse else None
    column = torch.zeros(n, dtype=torch.int64, device=logits.device)
    top, log_sum, mean, cross, reverse_cross, label_logit = logits.new_zeros(6, n, dtype=wide)
    lowest = torch.finfo(wide).min
    if columns == 0:
        top.fill_(-torch.inf)
    size = block_rows(n, columns, logits.device)
    scratch = _Scratch(values, size)
    for part in blocks(n, size) if columns else ():
        z = scratch.of(_TERM, part)
        softmax, given = values[part], logits[part]
        if given.dtype != wide or scale != 1:
            # converted first: a product of two types would be rounded to the narrow one
            given = z.copy_(given)
            if scale != 1:
                given.mul_(scale)
        torch.amax(given, -1, out=top[part])
        column[part] = _first_largest(given)
        # -inf becomes the lowest number, and that times a probability of 0 is 0; a row of nothing else has a share of 0
        torch.sub(given, top[part].clamp(min=lowest)[:, None], out=z).clamp_(min=lowest)
        torch.softmax(z, -1, out=softmax)
        # the largest logit is 0 now
        log_sum[part] = -softmax.gather(1, column[part][:, None])[:, 0].log()
        mean[part] = torch.linalg.vecdot(softmax, z)
        if target is not None and rows is not None:
            other = torch.index_select(target.values, 0, rows[part], out=scratch.of(_TARGET, part))
            cross[part] = torch.linalg.vecdot(other, z)
            if reverse:
                assert target.logits is not None
                reverse_cross[part] = torch.linalg.vecdot(softmax, target.logits[rows[part]])
        if label is not None:
            label_logit[part] = z.gather(1, label[part].clamp(min=0)[:, None])[:, 0]
        if kept is not None:
            kept[part] = z
    label_logit.masked_fill_(label_logit <= lowest, -torch.inf)
    for expectation in (cross, reverse_cross):
        expectation.masked_fill_(expectation < _NEVER, -torch.inf)
    return LocalRows(values, scale, top, column, log_sum, mean, cross, reverse_cross, label_logit, kept)


def probability_at(side: LocalRows, rows: Tensor, column: Tensor) -> Tensor:
    """Probability [n], within this rank's columns, of `column[i]` in row `rows[i]`."""
    return side.values[rows, column]


class _Scratch:
    """Memory for the blocks of one call: what is allocated for every block costs page faults."""

    def __init__(self, like: Tensor, rows: int) -> None:
        self._like, self._rows = like, rows
        self._space: dict[int, Tensor] = {}

    def of(self, number: int, part: slice) -> Tensor:
        if number not in self._space:
            self._space[number] = self._like.new_empty(self._rows, self._like.shape[1])
        return self._space[number][: part.stop - part.start]


def _draft_probabilities(side: LocalRows, share: Tensor | None, part: slice, scratch: _Scratch) -> Tensor:
    """True probabilities of a block of rows; a view of them where nothing has to be done."""
    own = side.values[part]
    return own if share is None else torch.mul(own, share[part][:, None], out=scratch.of(_DRAFT, part))


def _target_probabilities(side: LocalRows, share: Tensor | None, rows: Tensor, out: Tensor) -> Tensor:
    torch.index_select(side.values, 0, rows, out=out)
    return out if share is None else out.mul_(share[rows][:, None])


def overlap(
    draft: LocalRows,
    target: LocalRows,
    rows: Tensor,
    draft_share: Tensor | None,
    target_share: Tensor | None,
    tv: Tensor | None = None,
) -> Overlap:
    """Sums over this rank's columns; `*_share` [n]: the part of each distribution that lies here, None: all of it.

    `tv` [n, columns], only where all columns are here, receives the direction `tv` in passing: blocks are in the cache
    still. It may be the draft's values.
    """
    n, columns = draft.values.shape
    alpha, covered, rejected = draft.values.new_zeros(3, n)
    size = block_rows(n, columns, rows.device)
    scratch = _Scratch(draft.values, size)
    for part in blocks(n, size):
        q = _draft_probabilities(draft, draft_share, part, scratch)
        p = _target_probabilities(target, target_share, rows[part], scratch.of(_TARGET, part))
        c = scratch.of(_TERM, part)
        torch.sum(torch.minimum(p, q, out=c), -1, out=alpha[part])
        over = _where_rejected(q, p, c)
        torch.sum(over, -1, out=rejected[part])
        # the target's block is not needed any more
        under = torch.sub(q, over, out=p)
        torch.sum(under, -1, out=covered[part])
        if tv is not None:
            torch.mul(over, covered[part][:, None], out=tv[part]).sub_(under.mul_(rejected[part][:, None]))
    return Overlap(alpha, covered, rejected)


def _where_rejected(q: Tensor, p: Tensor, out: Tensor) -> Tensor:
    # q where q > p, 0 elsewhere: a tie counts as accepted; the derivative of a ReLU is such a choice without booleans
    return torch.ops.aten.threshold_backward.grad_input(q, torch.sub(q, p, out=out), 0, grad_input=out)


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

    Shape: covered, rejected [n], of all columns; log_ratio [n]: what turns the difference of kept logits into
    log(q/p) - KL(q||p); label [n]: column of the label, -1 where another rank holds it.
    Gradient: ce: q_j - [j = label]; kl: q_j - p_j; reverse-kl: q_j (log(q_j/p_j) - KL(q||p)); tv:
    -q_j ([q_j <= p_j] - S), which is q_j S where q_j > p_j and -q_j (1 - S) elsewhere.
    Memory: with `overwrite` the draft's values become the result.
    """
    n, columns = draft.values.shape
    out = draft.values if overwrite else torch.empty_like(draft.values)
    size = block_rows(n, columns, rows.device)
    scratch = _Scratch(draft.values, size)
    for part in blocks(n, size):
        q = _draft_probabilities(draft, draft_share, part, scratch)
        p = None
        if target is not None:
            p = _target_probabilities(target, target_share, rows[part], scratch.of(_TARGET, part))
        total = scratch.of(_TOTAL, part)
        for number, (name, coefficient) in enumerate(coefficients.items()):
            w = coefficient[part].to(q.dtype)[:, None]
            term = scratch.of(_TERM, part) if number else total
            if name == "ce":
                assert label is not None
                torch.mul(q, w, out=term)
                if columns:
                    here = label[part] >= 0
                    term.scatter_add_(1, label[part].clamp(min=0)[:, None], -torch.where(here[:, None], w, 0))
            elif name == "kl":
                assert p is not None
                torch.sub(q, p, out=term).mul_(w)
            elif name == "reverse-kl":
                assert target is not None
                assert draft.logits is not None
                assert target.logits is not None
                assert log_ratio is not None
                torch.sub(draft.logits[part], target.logits[rows[part]], out=term)
                # q = 0 hides a ratio that may not be finite
                term.add_(log_ratio[part][:, None]).mul_(q).masked_fill_(q == 0, 0).mul_(w)
            else:
                assert p is not None
                over = _where_rejected(q, p, scratch.of(_TARGET if len(coefficients) == 1 else _REJECTED, part))
                torch.sub(over, q, out=term).mul_((rejected[part] * w[:, 0])[:, None])
                term.addcmul_(over, (covered[part] * w[:, 0])[:, None])
            if number:
                total.add_(term)
        out[part] = total if coefficients else 0
    return out
