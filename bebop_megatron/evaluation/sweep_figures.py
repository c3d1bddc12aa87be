"""The figures of a report: steps, temperatures, entropy, numbers of drafts. Each as PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.entropy import EntropyCurve
from bebop_megatron.evaluation.estimate import Estimate
from bebop_megatron.evaluation.figure import blank, plain, save, styles_of
from bebop_megatron.evaluation.speed import Speed
from bebop_megatron.evaluation.sweep import Outcome

# a bin with fewer tokens is noise
_LEAST_IN_BIN = 20


def _canvas(columns: int, caption: str, width: float = 3.9, height: float = 3.7) -> tuple[Any, list[Any]]:
    figure, axes = blank(1, columns, width, height)
    figure.supxlabel(_wrapped(caption, int(width * columns * 15)), fontsize=6.5, color="#555555")
    return figure, axes


def _wrapped(text: str, width: int) -> str:
    import textwrap

    return "\n".join(textwrap.wrap(text, width))


def _legend(figure: Any, styles: dict[str, tuple[str, str]], more: Sequence[tuple[str, dict[str, Any]]] = ()) -> None:
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], color=c, marker=m, markersize=5, label=label) for label, (c, m) in styles.items()]
    handles += [Line2D([], [], label=label, **look) for label, look in more]
    figure.legend(handles=handles, loc="outside upper center", ncols=min(4, len(handles)), frameon=False, fontsize=8)


def _save(figure: Any, path: Path) -> list[str]:
    return [file.name for file in save(figure, path.parent, path.stem)]


def _bars(axis: Any, xs: Sequence[float], estimates: Sequence[Estimate], scale: float, **look: Any) -> None:
    ys = [scale * estimate.value for estimate in estimates]
    ends = [estimate.interval() for estimate in estimates]
    below = [max(0.0, y - scale * low) if low == low else 0.0 for y, (low, _) in zip(ys, ends, strict=True)]
    above = [max(0.0, scale * high - y) if high == high else 0.0 for y, (_, high) in zip(ys, ends, strict=True)]
    axis.errorbar(xs, ys, yerr=[below, above], capsize=2, linewidth=1.4, elinewidth=0.9, markersize=5, **look)


def _of_json(estimate: dict[str, Any]) -> Estimate:
    nan = float("nan")
    value, stderr = (nan if estimate[name] is None else estimate[name] for name in ("value", "stderr"))
    return Estimate(value, stderr, estimate["clusters"])


_EXPECTED = (
    "expected by a full forward pass",
    {"color": "#444444", "linestyle": "none", "marker": "_", "markersize": 15, "markeredgewidth": 1.6},
)


def _panels(
    outcomes: Sequence[Outcome],
    caption: str,
    draw: Callable[[Any, list[Outcome], tuple[str, str]], None],
    *,
    xlabel: str,
    ylabel: str,
) -> Any:
    """One panel per rule on one scale, one line per head."""
    styles = styles_of([outcome.cell["label"] for outcome in outcomes])
    rules = list(dict.fromkeys(outcome.config["rule"] for outcome in outcomes))
    figure, axes = _canvas(len(rules), caption)
    for axis, rule in zip(axes, rules, strict=True):
        for label, style in styles.items():
            mine = [o for o in outcomes if (o.cell["label"], o.config["rule"]) == (label, rule)]
            if mine:
                draw(axis, mine, style)
        axis.set_title(rule, fontsize=9)
        axis.set_xlabel(xlabel, fontsize=8)
        axis.set_ylabel(ylabel, fontsize=8)
        plain(axis)
    top = max(axis.get_ylim()[1] for axis in axes)
    for axis in axes:
        axis.set_ylim(0, min(1.06 * top, 101))
    return figure, styles


def plot_steps(outcomes: Sequence[Outcome], path: Path, caption: str) -> list[str]:
    """Acceptance up to each draft step, decoded and expected."""

    def draw(axis: Any, mine: list[Outcome], style: tuple[str, str]) -> None:
        (outcome,) = mine
        steps = list(range(1, outcome.gamma + 1))
        _bars(axis, steps, outcome.rate_per_step, 100, color=style[0], marker=style[1])
        if outcome.expected is not None:
            values = [100 * _of_json(each).value for each in outcome.expected["rate_per_step"]]
            axis.plot(steps, values, **(_EXPECTED[1] | {"color": style[0]}))
        axis.set_xticks(steps)
        axis.set_xlim(0.6, outcome.gamma + 0.4)

    figure, styles = _panels(
        outcomes, caption, draw, xlabel="draft step", ylabel="accepted up to the step, % of verifications"
    )
    _legend(figure, styles, [_EXPECTED])
    return _save(figure, path)


def plot_temperatures(outcomes: Sequence[Outcome], path: Path, caption: str) -> list[str]:
    """Acceptance rate by sampling temperature, decoded and expected."""

    def draw(axis: Any, mine: list[Outcome], style: tuple[str, str]) -> None:
        mine = sorted(mine, key=lambda outcome: outcome.config["temperature"])
        xs = [outcome.config["temperature"] for outcome in mine]
        _bars(axis, xs, [outcome.accept_rate for outcome in mine], 100, color=style[0], marker=style[1])
        expected = [
            (x, 100 * _of_json(o.expected["accept_rate"]).value) for x, o in zip(xs, mine, strict=True) if o.expected
        ]
        axis.plot(*zip(*expected, strict=True), **(_EXPECTED[1] | {"color": style[0]}))
        axis.set_xticks(xs, [f"{x:g}" for x in xs])

    figure, styles = _panels(
        outcomes, caption, draw, xlabel="temperature of target and drafts", ylabel="acceptance rate E[L]/gamma, %"
    )
    _legend(figure, styles, [_EXPECTED])
    return _save(figure, path)


def plot_entropy(outcomes: Sequence[Outcome], path: Path, caption: str) -> list[str]:
    """Acceptance of a draft against the entropy of its target: means in bins, and the line through all tokens."""
    curves = {
        (outcome.cell["label"], outcome.config["rule"]): outcome.expected["entropy"][outcome.config["rule"]]
        for outcome in outcomes
        if outcome.expected
    }
    return plot_entropy_curves(curves, path, caption)


def plot_entropy_curves(curves: dict[tuple[str, str], dict[str, Any]], path: Path, caption: str) -> list[str]:
    """The same from what `entropy_summary` found, by (head, rule)."""
    styles = styles_of([label for label, _ in curves])
    rules = list(dict.fromkeys(rule for _, rule in curves))
    figure, axes = _canvas(len(rules), caption)
    for axis, rule in zip(axes, rules, strict=True):
        for label, (color, marker) in styles.items():
            if (label, rule) in curves:
                _entropy_line(axis, curves[label, rule], label, color, marker)
        axis.set_title(rule, fontsize=9)
        axis.set_xlabel("entropy of the target, nats", fontsize=8)
        axis.set_ylabel("acceptance of a draft step, %", fontsize=8)
        axis.set_ylim(0, 101)
        axis.set_xlim(left=0)
        axis.legend(fontsize=6.5, frameon=False, title="slope of the line, points per nat", title_fontsize=6.5)
        plain(axis)
    _legend(
        figure,
        styles,
        [
            ("mean of a bin", {"color": "#444444", "marker": "o", "linestyle": "none", "markersize": 4}),
            ("line through all tokens", {"color": "#444444", "linestyle": "--", "linewidth": 1}),
        ],
    )
    return _save(figure, path)


def _entropy_line(axis: Any, found: dict[str, Any], label: str, color: str, marker: str) -> None:
    curve = EntropyCurve.from_state(torch.tensor(found["state"], dtype=torch.float64))
    bins = [each for each in curve.bins() if each.count >= _LEAST_IN_BIN]
    if not bins:
        return
    # the last bin is open: as wide as the one before
    middles = [(each.low + min(each.high, each.low + 2)) / 2 for each in bins]
    axis.plot(middles, [100 * each.mean for each in bins], color=color, marker=marker, markersize=4.5, linewidth=1.2)
    fit, slope = curve.fit(), _of_json(found["slope"])
    if fit is None:
        return
    low, high = slope.interval()
    ends = [0.0, max(middles)]
    text = f"{label}: {100 * slope.value:.1f} ({100 * low:.1f} to {100 * high:.1f}), r = {fit.r:.2f}"
    line = [100 * (fit.intercept + fit.slope * x) for x in ends]
    axis.plot(ends, line, color=color, linestyle="--", linewidth=1, label=text)


def plot_gammas(found: Sequence[Speed], path: Path, caption: str) -> list[str]:
    """Accept length beside the one that would break even, and speed beside that without drafts, by drafts."""
    styles = styles_of([speed.label for speed in found])
    rules = list(dict.fromkeys(speed.rule for speed in found))
    figure, axes = _canvas(3, f"{caption} Bars of speeds: range over the rounds.", width=3.7, height=4.0)
    looks = {rule: "-" if index == 0 else ":" for index, rule in enumerate(rules)}
    for label, (color, marker) in styles.items():
        for rule in rules:
            mine = sorted((s for s in found if (s.label, s.rule) == (label, rule)), key=lambda speed: speed.gamma)
            if mine:
                _gamma_lines(axes, mine, {"color": color, "marker": marker, "linestyle": looks[rule]})
    axes[0].set_ylabel("accept length, tokens per verification", fontsize=8)
    axes[0].set_title("thin: the length that would break even", fontsize=8)
    # lengths that no head reaches would squeeze those that are reached
    reached = max(speed.accept_length.value for speed in found)
    needed = max(speed.break_even_length for speed in found)
    axes[0].set_ylim(1, 1 + 1.1 * (min(max(reached, needed), 2 * reached) - 1))
    axes[1].set_ylabel("tokens/s", fontsize=8)
    axes[1].set_title("0: the same engine without drafts", fontsize=8)
    axes[2].axhline(1, color="#444444", linewidth=0.9)
    axes[2].set_ylabel("tokens/s over tokens/s without drafts", fontsize=8)
    axes[2].set_title("above 1: speculation pays", fontsize=8)
    for axis, first in zip(axes, (1, 0, 1), strict=True):
        axis.set_xlabel("gamma, drafts per verification", fontsize=8)
        axis.set_xticks([gamma for gamma in [0, *sorted({speed.gamma for speed in found})] if gamma >= first])
        plain(axis)
    for axis in axes[1:]:
        axis.set_ylim(bottom=0)
    _legend(figure, styles, [(rule, {"color": "#444444", "linestyle": look}) for rule, look in looks.items()])
    return _save(figure, path)


def _gamma_lines(axes: Sequence[Any], mine: Sequence[Speed], look: dict[str, Any]) -> None:
    """One head under one rule, in all three panels."""
    xs, color = [speed.gamma for speed in mine], look["color"]
    _bars(axes[0], xs, [speed.accept_length for speed in mine], 1, **look)
    axes[0].plot(xs, [speed.break_even_length for speed in mine], color=color, linewidth=0.8, dashes=(2, 2))
    alone = mine[0].baseline_tokens_per_second
    axes[1].plot([0, *xs], [alone, *(speed.tokens_per_second for speed in mine)], linewidth=1.4, markersize=5, **look)
    ratios = [speed.speedup for speed in mine]
    spread = [
        [ratio - min(speed.ratios) for ratio, speed in zip(ratios, mine, strict=True)],
        [max(speed.ratios) - ratio for ratio, speed in zip(ratios, mine, strict=True)],
    ]
    axes[2].errorbar(xs, ratios, yerr=spread, capsize=2, linewidth=1.4, elinewidth=0.9, markersize=5, **look)


def plot_changes(changes: Sequence[dict[str, Any]], path: Path, caption: str) -> list[str]:
    """Change of acceptance since the first point, and its two parts; one panel per rule."""
    figure, axes = _canvas(len(changes), caption, width=4.4)
    looks = {
        "change": ("change of acceptance", {"color": "#000000", "marker": "o"}),
        "entropy_part": ("explained by entropy", {"color": "#0072B2", "marker": "s", "linestyle": "--"}),
        "mismatch_part": ("mismatch", {"color": "#D55E00", "marker": "^", "linestyle": ":"}),
    }
    for axis, change in zip(axes, changes, strict=True):
        points = change["points"]
        numbered = all(point["name"].isdigit() for point in points)
        xs = [int(point["name"]) for point in points] if numbered else list(range(len(points)))
        size = 4 if len(points) <= 30 else 0
        for name, (_, look) in looks.items():
            axis.plot(xs, [point[name] for point in points], markersize=size, linewidth=1.3, **look)
        axis.axhline(0, color="#888888", linewidth=0.7)
        if numbered:
            axis.set_xlabel("iteration", fontsize=8)
        else:
            axis.set_xticks(xs, [point["name"] for point in points], rotation=20)
        axis.set_title(f"{change['rule']}, slope {change['slope']:+.3f} per nat", fontsize=8)
        axis.set_ylabel("change since the first point", fontsize=8)
        plain(axis)
    _legend(figure, {}, list(looks.values()))
    return _save(figure, path)
