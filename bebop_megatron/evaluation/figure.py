"""Draws acceptance by rule, loss and draft step; what every figure here is drawn with."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.results import EvaluationRow, by_setting, describe
from bebop_megatron.outputs import replacing

# Okabe-Ito: told apart under every common colour blindness; a loss keeps its colour in every figure
STYLES = {
    "ce": ("#999999", "o"),
    "kl": ("#56B4E9", "s"),
    "reverse-kl": ("#CC79A7", "^"),
    "tv-step": ("#E69F00", "v"),
    "tv": ("#D55E00", "D"),
    "lk": ("#009E73", "P"),
    "lk-hybrid": ("#0072B2", "X"),
}
SPARE_STYLES = (("#000000", "*"), ("#5B5EA6", ">"), ("#7F4F24", "<"), ("#F0E442", "h"))


def styles_of(losses: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Colour and marker of every head, known losses first."""
    known = [loss for loss in STYLES if loss in losses]
    others = [loss for loss in dict.fromkeys(losses) if loss not in STYLES]
    spare = {loss: SPARE_STYLES[index % len(SPARE_STYLES)] for index, loss in enumerate(others)}
    return {loss: STYLES[loss] for loss in known} | spare


def blank(rows: int, columns: int, width: float, height: float) -> tuple[Any, list[Any]]:
    """A figure of so many axes, each so many inches wide and high; no global state, no display."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width * columns, height * rows), layout="constrained")
    FigureCanvasAgg(figure)
    return figure, list(figure.subplots(rows, columns, squeeze=False).flatten())


def save(figure: Any, folder: Path, name: str) -> list[Path]:
    """Write a figure as PNG and SVG, each whole or not at all; returns the files."""
    files = []
    for kind in ("png", "svg"):
        file = folder / f"{name}.{kind}"
        with replacing(file) as partial:
            # no date inside: the same numbers give the same file
            figure.savefig(partial, dpi=160, format=kind, metadata={"Date": None} if kind == "svg" else None)
        files.append(file)
    return files


def plot_acceptance(rows: Sequence[EvaluationRow], path: str | Path) -> None:
    """Draw acceptance rates by rule and loss, and how they fall with the step; settings one below the other.

    Raises:
        ValueError: no rows, or a loss measured twice under one rule and setting.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    if not rows:
        raise ValueError("there are no rows to draw")
    styles = styles_of([row.loss for row in rows])
    rules = list(dict.fromkeys(row.rule for row in rows))
    groups = by_setting(rows)
    bars = max(2.6, 0.42 * len(styles) * len(rules) + 0.6)
    # a Figure of its own: no global state, no display
    figure = Figure(figsize=(bars + 2.4 * len(rules) + 0.8, 3.4 * len(groups) + 0.6), layout="constrained")
    FigureCanvasAgg(figure)
    for panel, group in zip(figure.subfigures(len(groups), 1, squeeze=False)[:, 0], groups, strict=True):
        axes = panel.subplots(1, 1 + len(rules), width_ratios=[bars] + [2.4] * len(rules))
        panel.suptitle(describe(group[0].setting), fontsize=9)
        _bars(axes[0], group, rules, styles)
        for axis, rule in zip(axes[1:], rules, strict=True):
            _curves(axis, [row for row in group if row.rule == rule], rule, styles)
    handles = [Line2D([], [], color=color, marker=marker, markersize=5) for color, marker in styles.values()]
    figure.legend(
        handles,
        list(styles),
        title="trained with",
        loc="outside upper center",
        ncols=len(styles),
        frameon=False,
        fontsize=8,
        title_fontsize=8,
    )
    with replacing(path) as partial:
        figure.savefig(partial, dpi=160, format="png")


def _bars(axis: Any, rows: list[EvaluationRow], rules: list[str], styles: dict[str, tuple[str, str]]) -> None:
    width = 0.84 / len(styles)
    highest = 0.0
    for row in rows:
        at = rules.index(row.rule) + (list(styles).index(row.loss) - (len(styles) - 1) / 2) * width
        height, error = 100 * row.accept_rate, 200 * (row.accept_rate_stderr or 0.0)
        axis.bar(at, height, 0.92 * width, color=styles[row.loss][0], edgecolor="black", linewidth=0.4)
        if error:
            axis.errorbar(at, height, yerr=error, color="black", capsize=2, linewidth=1)
        axis.annotate(
            f"{height:.1f}", (at, height + error), (0, 2), textcoords="offset points", ha="center", fontsize=7
        )
        highest = max(highest, height + error)
    axis.set_ylim(0, 1.12 * highest or 1)
    axis.set_xticks(range(len(rules)), rules)
    measured = any(row.accept_rate_stderr for row in rows)
    axis.set_ylabel("acceptance rate %" + (" (± 2 standard errors)" if measured else ""), fontsize=8)
    plain(axis)


def _curves(axis: Any, rows: list[EvaluationRow], rule: str, styles: dict[str, tuple[str, str]]) -> None:
    for row in rows:
        color, marker = styles[row.loss]
        steps = range(1, row.gamma + 1)
        axis.plot(steps, [100 * rate for rate in row.accept_rate_per_step], color=color, marker=marker, markersize=5)
        axis.set_xticks(steps)
    highest = max((rate for row in rows for rate in row.accept_rate_per_step), default=0.0)
    axis.set_ylim(0, 108 * highest or 1)
    axis.set_title(rule, fontsize=9)
    axis.set_xlabel("draft step", fontsize=8)
    axis.set_ylabel("accepted up to the step %", fontsize=8)
    plain(axis)


def plain(axis: Any) -> None:
    """Small ticks, a light grid, no frame on top and right."""
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
