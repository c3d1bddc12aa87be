"""Draws the study: the main comparison, temperature, entropy, depths, and the smaller arms; PNG and SVG."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.figure import STYLES, blank, plain, save
from benchmarks.study.plan import RULES
from benchmarks.study.results import Row, difference, over_seeds, select, values
from benchmarks.study.tables import PAPER, losses_of

# draws one domain's rows into axes
Panel = Callable[[Any, Sequence[Row], str], None]
_RULE_LINES = {"rejection": "-", "target-only": "--"}


def _bars(axis: Any, groups: Sequence[str], bars: Sequence[tuple[str, str, list[Any]]]) -> None:
    """Bars side by side in each group, with intervals; `bars` holds (label, colour, an estimate for each group)."""
    width = 0.84 / max(1, len(bars))
    for number, (label, color, estimates) in enumerate(bars):
        for group, estimate in enumerate(estimates):
            if estimate is None:
                continue
            at = group + (number - (len(bars) - 1) / 2) * width
            error = 100 * (estimate.half_width or 0.0)
            axis.bar(
                at,
                100 * estimate.value,
                0.92 * width,
                color=color,
                edgecolor="black",
                linewidth=0.4,
                label=label if group == 0 else None,
            )
            if error:
                axis.errorbar(at, 100 * estimate.value, yerr=error, color="black", capsize=2, linewidth=1)
            axis.annotate(
                f"{100 * estimate.value:.1f}",
                (at, 100 * estimate.value + error),
                (0, 2),
                textcoords="offset points",
                ha="center",
                fontsize=7.5,
            )
    axis.set_xticks(range(len(groups)), groups, fontsize=8)
    axis.set_ylim(bottom=0)
    axis.set_ylabel("acceptance rate % (95% interval)", fontsize=8)
    plain(axis)


def _main(axis: Any, rows: Sequence[Row], domain: str) -> None:
    mine = select(rows, arm="main", domain=domain)
    bars = [
        (loss, STYLES[loss][0], [over_seeds(select(mine, loss=loss, rule=rule)) for rule in RULES])
        for loss in losses_of(mine)
    ]
    _bars(axis, RULES, bars)
    axis.set_title(f"{domain}: objective and rule", fontsize=9)


def _temperature(axis: Any, rows: Sequence[Row], domain: str) -> None:
    mine = select(rows, arm="temperature", domain=domain)
    for rule in RULES:
        for loss in losses_of(mine):
            found = sorted(select(mine, loss=loss, rule=rule), key=lambda row: row["temperature"])
            color, marker = STYLES[loss]
            axis.errorbar(
                [row["temperature"] for row in found],
                [100 * row["accept_rate"] for row in found],
                yerr=[196 * (row["stderr"] or 0.0) for row in found],
                color=color,
                marker=marker,
                markersize=4,
                linestyle=_RULE_LINES[rule],
                linewidth=1,
                label=f"{loss}, {rule}",
            )
    axis.set_xlabel("serving temperature", fontsize=8)
    axis.set_ylabel("acceptance rate %", fontsize=8)
    axis.set_title(f"{domain}: temperature", fontsize=9)
    plain(axis)


def _entropy(axis: Any, rows: Sequence[Row], domain: str) -> None:
    for rule in RULES:
        for loss in losses_of(rows):
            found = select(rows, arm="temperature", domain=domain, loss=loss, rule=rule, temperature=1.0)
            if not found or not found[0].get("entropy"):
                continue
            entropy, (color, marker) = found[0]["entropy"], STYLES[loss]
            bins = [each for each in entropy["bins"] if each["points"] >= 20]
            fit = entropy["first"]
            slope = f" ({100 * fit['slope']:+.1f}/nat)" if fit else ""
            axis.plot(
                [each["entropy"] for each in bins],
                [100 * each["acceptance"] for each in bins],
                color=color,
                marker=marker,
                markersize=4,
                linestyle=_RULE_LINES[rule],
                linewidth=1,
                label=f"{loss}, {rule}{slope}",
            )
    axis.set_xlabel("entropy of the target, nats", fontsize=8)
    axis.set_ylabel("expected acceptance of step 1, %", fontsize=8)
    axis.set_title(f"{domain}: entropy, temperature 1", fontsize=9)
    plain(axis)


def _depth(axis: Any, rows: Sequence[Row], domain: str) -> None:
    mine = select(rows, arm="depth", domain=domain)
    depths, gammas = sorted(values(mine, field="train_k")), sorted(values(mine, field="gamma"))
    table = [
        [next((row["accept_length"] for row in select(mine, train_k=k, gamma=gamma)), float("nan")) for gamma in gammas]
        for k in depths
    ]
    axis.imshow(table, cmap="YlGnBu", aspect="auto")
    low, high = min(min(line) for line in table), max(max(line) for line in table)
    for y, line in enumerate(table):
        for x, length in enumerate(line):
            dark = length - low > 0.55 * (high - low)
            axis.text(x, y, f"{length:.2f}", ha="center", va="center", fontsize=8, color="white" if dark else "black")
    axis.set_xticks(range(len(gammas)), gammas)
    axis.set_yticks(range(len(depths)), depths)
    axis.set_xlabel("drafts per verification, gamma", fontsize=8)
    axis.set_ylabel("depths trained, K", fontsize=8)
    axis.tick_params(labelsize=8)
    axis.set_title(f"{domain}: accept length of tv, rejection", fontsize=9)


def _conditions(arm: str, title: str, name: Callable[[Row], str]) -> Panel:
    def draw(axis: Any, rows: Sequence[Row], domain: str) -> None:
        mine = select(rows, arm=arm, domain=domain)
        groups = list(dict.fromkeys(name(row) for row in mine))
        # points and not bars: the axis need not start at zero, and the differences are small
        for number, rule in enumerate(rule for rule in RULES if select(mine, rule=rule)):
            color, marker = (("#0072B2", "o"), ("#E69F00", "s"))[number]
            found = [over_seeds([row for row in select(mine, rule=rule) if name(row) == group]) for group in groups]
            _points(axis, found, color, marker, rule)
        _named(axis, groups)
        axis.set_ylabel("acceptance rate % (95% interval)", fontsize=8)
        axis.set_title(f"{domain}: {title}", fontsize=9)

    return draw


def _points(axis: Any, estimates: Sequence[Any], color: str, marker: str, label: str) -> None:
    """A point with its interval for each estimate that is there."""
    known = [(at, 100 * each.value, 100 * (each.half_width or 0.0)) for at, each in enumerate(estimates) if each]
    axis.errorbar(
        [at for at, *_ in known],
        [y for _, y, _ in known],
        yerr=[e for *_, e in known],
        color=color,
        marker=marker,
        markersize=5,
        linestyle="none",
        capsize=3,
        label=label,
    )
    for at, y, _ in known:
        axis.annotate(f"{y:.1f}", (at, y), (6, 0), textcoords="offset points", va="center", fontsize=7.5)


def _named(axis: Any, groups: Sequence[str]) -> None:
    axis.set_xticks(range(len(groups)), groups)
    axis.set_xlim(-0.5, len(groups) - 0.3)
    plain(axis)
    axis.tick_params(axis="x", labelsize=7)


def _differences(axis: Any, rows: Sequence[Row], domain: str) -> None:
    """Paired differences from `ce` under rejection, beside the paper's."""
    mine = select(rows, arm="main", domain=domain, rule="rejection")
    losses = [loss for loss in losses_of(mine) if loss != "ce"]
    pairs = [difference(select(mine, loss=loss), select(mine, loss="ce")) for loss in losses]
    _points(axis, [pair and pair.by_prompt for pair in pairs], "#0072B2", "o", "paired by prompt, 95% interval")
    paper = [(at, PAPER[domain][loss]) for at, loss in enumerate(losses) if loss in PAPER.get(domain, {})]
    if paper:
        axis.plot(
            [at - 0.15 for at, _ in paper],
            [value for _, value in paper],
            color="#D55E00",
            marker="*",
            linestyle="none",
            markersize=7,
            label="the paper's, 35B model",
        )
    axis.axhline(0, color="black", linewidth=0.8)
    _named(axis, losses)
    axis.set_ylabel("points above ce, rejection", fontsize=8)
    axis.set_title(f"{domain}: difference from ce", fontsize=9)


_ARMS: dict[str, Panel] = {
    "attention": _conditions(
        "attention", "attention in training", lambda r: f"{r['train_attention']}\nin {r['attention']}"
    ),
    "cold": _conditions("cold", "cold head", lambda r: r["loss"] + (f"\nafter {r['warmup']}" if r["warmup"] else "")),
    "serving": _conditions(
        "serving", "serving temperature", lambda r: f"{r['loss']} {r['train_temperature']:g}\nat {r['temperature']:g}"
    ),
    "own": _conditions("own", "training text", lambda r: f"{r['loss']}\n{r['train_data']}"),
}


def _figure(panels: Sequence[tuple[Panel, str]], rows: Sequence[Row], width: float, height: float, columns: int) -> Any:
    figure, axes = blank(-(-len(panels) // columns), columns, width, height)
    for axis in axes[len(panels) :]:
        axis.set_visible(False)
    for axis, (draw, domain) in zip(axes, panels, strict=False):
        draw(axis, rows, domain)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(fontsize=7.5, frameon=False)
    return figure


def draw(rows: Sequence[Row], folder: Path, prefix: str = "") -> list[Path]:
    """Draw what was measured; returns the files."""
    domains, files = values(rows, field="domain"), []

    def panels(arm: str, draw: Any) -> list[tuple[Any, str]]:
        return [(draw, domain) for domain in domains if select(rows, arm=arm, domain=domain)]

    plans = [
        ("main", panels("main", _main) + panels("main", _differences), 5.6, 3.2, len(domains)),
        ("temperature", panels("temperature", _temperature), 4.6, 3.4, len(domains)),
        ("entropy", panels("temperature", _entropy), 4.6, 3.4, len(domains)),
        ("depth", panels("depth", _depth), 3.6, 3.0, len(domains)),
        ("arms", [each for arm, draw in _ARMS.items() for each in panels(arm, draw)], 4.4, 3.0, 2),
    ]
    for name, chosen, width, height, columns in plans:
        if chosen:
            figure = _figure(chosen, rows, width, height, min(columns, len(chosen)))
            files += save(figure, folder, prefix + name)
    return files
