"""Draws the study: acceptance against step and entropy, reward, time, and a trace of who works when; PNG and SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.figure import blank, plain, save
from benchmarks.rl_study.plan import BASELINE
from benchmarks.rl_study.results import (
    arms_of,
    over_seeds,
    seeds_of,
    series,
    slope,
    smooth,
    speed,
    trace_of,
)
from benchmarks.rl_study.tables import GOAL
from benchmarks.study.results import Row, select

# Okabe-Ito: told apart under every common colour blindness
STYLES = {
    BASELINE: ("#000000", "-"),
    "to-ce": ("#56B4E9", "--"),
    "rs-ce": ("#999999", "-"),
    "rs-tv-frozen": ("#D55E00", "-"),
    "rs-tv-online-tv": ("#009E73", "-"),
    "rs-tv-online-ce": ("#CC79A7", "-"),
}
# one colour for an event in every trace
_EVENTS = {
    "decode": "#D55E00",
    "reward": "#E69F00",
    "probe": "#F0E442",
    "weights": "#56B4E9",
    "train": "#009E73",
    "export": "#0072B2",
    "save": "#CC79A7",
    "died": "#000000",
}
_TRACE_SECONDS = 30.0


def _drafting(rows: Sequence[Row]) -> list[str]:
    return [arm for arm in arms_of(rows) if arm != BASELINE]


def _curves(axis: Any, rows: Sequence[Row], arms: Sequence[str], name: str, label: str, seeds: bool = False) -> None:
    """A field over the steps: each arm's mean over seeds, and thin, if asked for, each seed."""
    for arm in arms:
        color, style = STYLES[arm]
        for seed in seeds_of(rows, arm) if seeds else ():
            steps, numbers = series(select(rows, seed=seed), arm, name)
            axis.plot(steps, smooth(numbers), color=color, linewidth=0.5, alpha=0.45)
        steps, numbers = series(rows, arm, name)
        axis.plot(steps, smooth(numbers), color=color, linestyle=style, linewidth=1.4, label=arm)
    axis.set_xlabel("RL step (thin: seeds)" if seeds else "RL step", fontsize=8)
    axis.set_ylabel(f"{label} (mean of five steps)", fontsize=8)
    axis.legend(fontsize=6, frameon=False)
    plain(axis)


def _acceptance(axis: Any, rows: Sequence[Row]) -> None:
    _curves(axis, rows, _drafting(rows), "accept_length", "accept length")


def _entropy(axis: Any, rows: Sequence[Row]) -> None:
    _curves(axis, rows, arms_of(rows), "entropy", "nats per token")


def _reward(axis: Any, rows: Sequence[Row]) -> None:
    _curves(axis, rows, arms_of(rows), "reward", "reward", seeds=True)


def _slopes(axis: Any, rows: Sequence[Row]) -> None:
    for arm in _drafting(rows):
        found, (color, style) = [row for row in select(rows, arm=arm) if row["accept_length"] is not None], STYLES[arm]
        entropy = [row["entropy"] for row in found]
        axis.plot(entropy, [row["accept_length"] for row in found], ".", color=color, markersize=3, alpha=0.5)
        fit = slope(rows, arm)
        if fit is not None:
            ends = (min(entropy), max(entropy))
            label = f"{arm} ({fit.slope.value:+.2f} per nat)"
            axis.plot(
                ends,
                [fit.intercept + fit.slope.value * x for x in ends],
                color=color,
                linestyle=style,
                linewidth=1.4,
                label=label,
            )
    axis.set_xlabel("entropy of the policy, nats per token", fontsize=8)
    axis.set_ylabel("accept length of the step", fontsize=8)
    axis.legend(fontsize=6, frameon=False)
    plain(axis)


def _times(axis: Any, rows: Sequence[Row]) -> None:
    arms = arms_of(rows)
    names = ("step_seconds", "rollout_seconds", "learner_seconds")
    for number, (name, color) in enumerate(zip(names, ("#0072B2", "#D55E00", "#009E73"), strict=True)):
        for at, arm in enumerate(arms):
            value = getattr(speed(rows, arm), name)
            label = name.removesuffix("_seconds") if at == 0 else None
            axis.bar(at + (number - 1) * 0.27, value, 0.25, color=color, edgecolor="black", linewidth=0.4, label=label)
    axis.set_xticks(range(len(arms)), [arm.replace("rs-tv-", "rs-tv-\n") for arm in arms])
    axis.set_ylabel("seconds a step (median)", fontsize=8)
    axis.legend(fontsize=6, frameon=False)
    plain(axis)
    axis.tick_params(axis="x", labelsize=6)


def _speedup(axis: Any, rows: Sequence[Row]) -> None:
    arms = _drafting(rows)
    for at, arm in enumerate(arms):
        found = speed(rows, arm)
        for shift, ratio, color, label in (
            (-0.2, found.end_to_end, "#0072B2", "end to end"),
            (0.2, found.rollout, "#D55E00", "decoding, for each token"),
        ):
            if ratio is None:
                continue
            axis.bar(
                at + shift,
                ratio.value,
                0.36,
                color=color,
                edgecolor="black",
                linewidth=0.4,
                label=label if at == 0 else None,
            )
            axis.annotate(
                f"{ratio.value:.2f}",
                (at + shift, ratio.value),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=6,
            )
        length = over_seeds(rows, arm, "accept_length")
        if length is not None:
            axis.plot(at, length.value, "kD", markersize=4, label="accept length" if at == 0 else None)
    axis.axhline(GOAL, color="black", linestyle=":", linewidth=1, label=f"goal, {GOAL}")
    axis.axhline(1, color="black", linewidth=0.8)
    axis.set_xticks(range(len(arms)), [arm.replace("rs-tv-", "rs-tv-\n") for arm in arms])
    axis.set_ylabel(f"times as fast as {BASELINE}", fontsize=8)
    # above the axes: bars and marks fill them
    axis.legend(fontsize=6, frameon=False, ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0))
    plain(axis)
    axis.tick_params(axis="x", labelsize=6)


def _trace(axis: Any, events: Sequence[dict[str, Any]], title: str) -> None:
    start, found = trace_of(events, _TRACE_SECONDS)
    actors = sorted({event["actor"] for event in found})
    named: set[str] = set()
    for event in sorted(found, key=lambda event: event["begin"]):
        kind = event["event"]
        fresh = kind not in named
        named.add(kind)
        axis.barh(
            actors.index(event["actor"]),
            event["end"] - event["begin"],
            0.6,
            left=event["begin"] - start,
            color=_EVENTS.get(kind, "#999999"),
            edgecolor="black",
            linewidth=0.2,
            label=kind if fresh else None,
        )
    axis.set_yticks(range(len(actors)), actors)
    axis.set_xlim(0, _TRACE_SECONDS)
    axis.set_xlabel("seconds, from the middle of the run", fontsize=8)
    axis.set_title(title, fontsize=9)
    axis.legend(fontsize=6, frameon=False, ncols=6, loc="lower center", bbox_to_anchor=(0.5, 1.12))
    axis.tick_params(labelsize=7)
    axis.spines[["top", "right"]].set_visible(False)


def draw(rows: Sequence[Row], events: dict[str, list[dict[str, Any]]], folder: Path, prefix: str = "") -> list[Path]:
    """Draw what was measured, and the traces by arm; returns the files."""
    plans: dict[str, list[Any]] = {"acceptance": [_acceptance, _slopes]} if _drafting(rows) else {}
    plans["reward"] = [_reward, _entropy]
    if BASELINE in arms_of(rows):
        plans["time"] = [_times, _speedup]
    files = []
    for name, panels in plans.items():
        figure, axes = blank(1, len(panels), 4.8, 3.4)
        for axis, panel in zip(axes, panels, strict=True):
            panel(axis, rows)
        files += save(figure, folder, prefix + name)
    found = {arm: mine for arm, mine in events.items() if mine}
    if found:
        figure, axes = blank(len(found), 1, 9.6, 1.9)
        for axis, (arm, mine) in zip(axes, found.items(), strict=True):
            _trace(axis, mine, arm)
        files += save(figure, folder, prefix + "trace")
    return files
