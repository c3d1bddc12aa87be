"""Acceptance against entropy, from sums alone.

Caught here: a line of the wrong orientation, fits that do not add up over ranks, values of rows that are not valid, a
point on an edge in the wrong bin, slopes out of rounding noise, a split whose parts are not the whole.
"""

from __future__ import annotations

import math

import numpy
import pytest
import torch

from bebop_megatron.entropy import EntropyCurve, Split, fit_line, split, split_change


def points(num=500, seed=0):
    generator = torch.Generator().manual_seed(seed)
    entropy = 6 * torch.rand(num, generator=generator)
    acceptance = (0.9 - 0.1 * entropy + 0.1 * torch.randn(num, generator=generator)).clamp(0, 1)
    return entropy, acceptance


def test_line_equals_numpys():
    entropy, acceptance = points()
    curve = EntropyCurve()
    curve.update(entropy, acceptance)
    fit = curve.fit()
    x, y = entropy.double().numpy(), acceptance.double().numpy()
    (slope, intercept), covariance = numpy.polyfit(x, y, 1, cov=True)
    assert fit.slope == pytest.approx(slope, rel=1e-9)
    assert fit.intercept == pytest.approx(intercept, rel=1e-9)
    assert fit.r == pytest.approx(numpy.corrcoef(x, y)[0, 1], rel=1e-9)
    assert fit.stderr == pytest.approx(math.sqrt(covariance[0, 0]), rel=1e-9)
    assert fit.num == 500
    assert curve.mean() == pytest.approx((x.mean(), y.mean()))


def test_states_add_up_and_invalid_rows_are_never_read():
    entropy, acceptance = points(90)
    valid = torch.rand(90, generator=torch.Generator().manual_seed(1)) < 0.6
    whole = EntropyCurve()
    whole.update(entropy[valid], acceptance[valid])
    total = EntropyCurve().state()
    for part in torch.arange(90).view(3, 30):
        curve = EntropyCurve()
        ok = valid[part]
        curve.update(entropy[part].where(ok, torch.nan).view(3, 10), acceptance[part].view(3, 10), ok.view(3, 10))
        total = total + curve.state()
    again = EntropyCurve.from_state(total)
    torch.testing.assert_close(again.state(), whole.state(), rtol=1e-12, atol=0)
    assert [(b.low, b.count) for b in again.bins()] == [(b.low, b.count) for b in whole.bins()]


def test_bins_hold_the_mean_of_their_points():
    curve = EntropyCurve((0.0, 1.0, 2.0))
    # rounding makes an entropy of 0 negative; a point on an edge belongs to the bin above
    curve.update(torch.tensor([-1e-7, 0.5, 1.0, 9.0]), torch.tensor([1.0, 0.5, 0.25, 0.125]))
    assert [(b.low, b.high, b.count, b.mean) for b in curve.bins()] == [
        (0.0, 1.0, 2, 0.75),
        (1.0, 2.0, 1, 0.25),
        (2.0, math.inf, 1, 0.125),
    ]


def test_no_line_without_spread():
    curve = EntropyCurve()
    assert curve.fit() is None
    assert curve.mean() is None
    assert curve.bins() == []
    curve.update(torch.full((1000,), 0.1), torch.rand(1000))
    assert curve.fit() is None
    flat = fit_line([(1.0, 0.3), (2.0, 0.3), (3.0, 0.3)])
    assert flat.slope == pytest.approx(0)
    assert math.isnan(flat.r)
    assert math.isnan(fit_line([(1.0, 0.3), (2.0, 0.4)]).stderr)


def test_split_is_slope_times_entropy_and_the_rest():
    # the first three lie on 1 - 0.2 H; then the head falls behind by 0.1 at an entropy of 2
    history = [(1.0, 0.8), (1.5, 0.7), (1.25, 0.75), (2.0, 0.5)]
    parts = split(history, fitted_on=3)
    assert parts[0] == Split(0.0, 0.0)
    assert (parts[3].entropy_part, parts[3].mismatch_part) == pytest.approx((-0.2, -0.1))
    for (_, acceptance), part in zip(history, parts, strict=True):
        assert part.entropy_part + part.mismatch_part == pytest.approx(acceptance - 0.8)
    other = split(history, fitted_on=3, reference=(1.5, 0.7))
    assert (other[3].entropy_part, other[3].mismatch_part) == pytest.approx((-0.1, -0.1))
    assert split_change(-0.5, (1.0, 2.0), (3.0, 2.0)) == Split(-1.0, 1.0)


def test_bad_inputs_are_named():
    with pytest.raises(ValueError, match="first 1 of 2 points"):
        split([(1.0, 0.8), (2.0, 0.7)], fitted_on=1)
    with pytest.raises(ValueError, match="must ascend"):
        EntropyCurve((0.0, 2.0, 1.0))
    with pytest.raises(ValueError, match=r"is \[12\]"):
        EntropyCurve.from_state(torch.zeros(5), (0.0, 1.0, 2.0))
