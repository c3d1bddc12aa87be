"""Draws time over the bare products and peak memory against the number of depths."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.figure import blank
from bebop_megatron.outputs import replacing
from benchmarks.loss.contenders import LABELS
from benchmarks.loss.results import MIB, contenders_of, gradient_bytes, time_ratio

# Okabe-Ito: told apart under every common colour blindness
STYLES = {
    "ours": ("#D55E00", "D"),
    "autograd": ("#999999", "o"),
    "kept": ("#56B4E9", "s"),
    "liger": ("#009E73", "^"),
}
_FLOOR = "#000000"


def plot(data: dict[str, Any], path: Path) -> None:
    """Write the figure as PNG."""
    figure, (time, memory) = blank(1, 2, 4.8, 4.4)
    _time(time, data)
    _memory(memory, data)
    handles, labels = time.get_legend_handles_labels()
    more, names = memory.get_legend_handles_labels()
    extra = [(h, n) for h, n in zip(more, names, strict=True) if n not in labels]
    figure.legend(
        [*handles, *(h for h, _ in extra)],
        [*labels, *(n for _, n in extra)],
        loc="outside lower center",
        ncols=3,
        frameon=False,
        fontsize=8,
    )
    environment = data["environment"]
    hardware = environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"
    figure.suptitle(
        f"End-to-end TV loss and its hidden-state gradient, from hidden states\n{hardware}, torch "
        f"{environment['torch']}, {environment['date']}",
        fontsize=9,
    )
    with replacing(path) as partial:
        figure.savefig(partial, dpi=160, format="png")


def _sizes(case: dict[str, Any]) -> str:
    return f"n={case['n']:,}, h={case['h']:,}, V={case['v']:,}, {case['dtype']}"


def _time(axis: Any, data: dict[str, Any]) -> None:
    points = [one for one in data["timed"] if one["sweep"] == "depths"]
    for name in contenders_of(data):
        found = [(one["case"]["k"], time_ratio(one["seconds"], name)) for one in points]
        found = [(k, ratio) for k, ratio in found if ratio is not None]
        color, marker = STYLES[name]
        spread = [[r.middle - r.low for _, r in found], [r.high - r.middle for _, r in found]]
        axis.errorbar(
            [k for k, _ in found],
            [r.middle for _, r in found],
            yerr=spread,
            color=color,
            marker=marker,
            markersize=5,
            capsize=2,
            label=LABELS[name],
        )
    axis.axhline(1, color=_FLOOR, linewidth=1, label="bare matrix products")
    axis.axhline(1.2, color=STYLES["ours"][0], linewidth=1, linestyle=":", label="limit for ours, 1.2")
    axis.set_ylim(bottom=0)
    axis.set_ylabel("time / time of the bare products (median, p20 to p80)", fontsize=8)
    _plain(axis, points)


def _memory(axis: Any, data: dict[str, Any]) -> None:
    points = data["weighed"]
    for name in contenders_of(data):
        found = [(one["case"]["k"], one["peak_bytes"].get(name)) for one in points]
        found = [(k, peak) for k, peak in found if peak is not None]
        color, marker = STYLES[name]
        axis.plot(
            [k for k, _ in found],
            [peak / MIB for _, peak in found],
            color=color,
            marker=marker,
            markersize=5,
            label=LABELS[name],
        )
    axis.plot(
        [one["case"]["k"] for one in points],
        [gradient_bytes(one["case"]) / MIB for one in points],
        color=_FLOOR,
        linewidth=1,
        linestyle="--",
        label="hidden-state gradients alone",
    )
    axis.set_yscale("log")
    axis.set_ylabel("peak memory beyond the inputs, MiB", fontsize=8)
    _plain(axis, points)


def _plain(axis: Any, points: list[dict[str, Any]]) -> None:
    axis.set_title(_sizes(points[0]["case"]), fontsize=8)
    axis.set_xlabel("depths K", fontsize=8)
    axis.set_xticks(sorted({one["case"]["k"] for one in points}))
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color="#DDDDDD", linewidth=0.6)
    axis.set_axisbelow(True)
