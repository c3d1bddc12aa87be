"""What the results say: tables of numbers and sentences, the same for terminal and document."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.study.plan import RULES
from benchmarks.study.results import Row, difference, over_seeds, select, values
from benchmarks.study.statistics import Estimate, line

# arXiv 2606.12370, acceptance rate in percent at gamma 3 under rejection: ce absolute, the others relative to it
PAPER = {
    "math": {"ce": 75.0, "kl": 0.0, "reverse-kl": 1.3, "tv-step": 2.4, "tv": 3.0},
    "code": {"ce": 71.3, "kl": 0.0, "reverse-kl": 1.0, "tv-step": 2.5, "tv": 3.3},
}
# of accept length over entropy, in RL
PAPER_SLOPES = {
    ("ce", "rejection"): -1.68,
    ("ce", "target-only"): -1.68,
    ("tv", "target-only"): -1.68,
    ("tv", "rejection"): -0.06,
}
ORDER = ("ce", "kl", "reverse-kl", "tv-step", "tv", "lk", "lk-hybrid")


@dataclass(frozen=True)
class Table:
    """Title, what the numbers are, header, cells."""

    title: str
    note: str
    header: list[str]
    rows: list[list[str]]


def percent(estimate: Estimate | None, sign: bool = False) -> str:
    """A rate in percent with half of its 95% interval."""
    if estimate is None:
        return "-"
    shown = f"{100 * estimate.value:{'+' if sign else ''}.1f}"
    return shown if estimate.half_width is None else f"{shown} ± {100 * estimate.half_width:.1f}"


def number(estimate: Estimate | None, digits: int = 2, sign: bool = False) -> str:
    """A value with half of its 95% interval."""
    if estimate is None:
        return "-"
    shown = f"{estimate.value:{'+' if sign else ''}.{digits}f}"
    return shown if estimate.half_width is None else f"{shown} ± {estimate.half_width:.{digits}f}"


def losses_of(rows: Sequence[Row]) -> list[str]:
    """Losses that were measured, in the order of the tables."""
    found = {row["loss"] for row in rows}
    return [loss for loss in ORDER if loss in found]


def main_table(rows: Sequence[Row], domain: str) -> Table:
    """Losses under both rules, with paired differences from `ce`, beside the paper's."""
    mine = select(rows, arm="main", domain=domain)
    paper = PAPER.get(domain, {})
    cells = []
    for loss in losses_of(mine):
        by_rule = {rule: select(mine, loss=loss, rule=rule) for rule in RULES}
        rejection, greedy = (by_rule[rule] for rule in RULES)
        line_ = [loss, str(len({row["seed"] for row in rejection + greedy}))]
        line_ += [percent(over_seeds(rejection)), percent(over_seeds(greedy))]
        lengths = over_seeds(rejection, "accept_length")
        line_ += ["-" if lengths is None else f"{lengths.value:.2f}"]
        against = {rule: select(mine, loss="ce", rule=rule) for rule in RULES}
        pair = difference(rejection, against["rejection"]) if loss != "ce" else None
        line_ += ["-" if pair is None else percent(pair.by_prompt, sign=True)]
        line_ += ["-" if pair is None or pair.by_seed is None else percent(pair.by_seed, sign=True)]
        pair = difference(rejection, select(mine, loss="kl", rule="rejection")) if loss != "kl" else None
        line_ += ["-" if pair is None else percent(pair.by_prompt, sign=True)]
        pair = difference(greedy, against["target-only"]) if loss != "ce" else None
        line_ += ["-" if pair is None else percent(pair.by_prompt, sign=True)]
        known = paper.get(loss)
        line_ += ["-" if known is None else f"{known:.1f}" if loss == "ce" else f"{known:+.1f}"]
        cells.append(line_)
    header = [
        "loss",
        "seeds",
        "rejection %",
        "target-only %",
        "accept length",
        "- ce, by prompt",
        "- ce, by seed",
        "- kl, by prompt",
        "target-only - ce",
        "paper, rejection",
    ]
    gamma = ", ".join(str(gamma) for gamma in values(mine, field="gamma"))
    note = (
        f"Acceptance rate at gamma {gamma}, temperature 1, decoded in chain, ± half a 95% interval: over seeds where "
        "there are several, over prompts otherwise. Accept length under rejection. Differences in points, paired "
        "over the same prompts and seeds. The paper's ce has soft targets, and so the gradient of kl here."
    )
    return Table(f"{domain}: objectives", note, header, cells)


def temperature_table(rows: Sequence[Row], domain: str) -> Table:
    """Acceptance rate by serving temperature."""
    mine = select(rows, arm="temperature", domain=domain)
    temperatures = sorted(values(mine, field="temperature"))
    cells = []
    for rule in RULES:
        for loss in losses_of(mine):
            found = [select(mine, loss=loss, rule=rule, temperature=temperature) for temperature in temperatures]
            cells.append([loss, rule, *(percent(over_seeds(each)) for each in found)])
    note = "Acceptance rate in percent, heads trained at temperature 1, ± half a 95% interval over prompts."
    return Table(f"{domain}: serving temperature", note, ["loss", "rule", *(f"T={t:g}" for t in temperatures)], cells)


def length_over_entropy(rows: Sequence[Row]) -> float | None:
    """Slope of accept length over the target's mean entropy, from temperature to temperature."""
    points = [(row["entropy"]["mean_target"], row["accept_length"]) for row in rows if row.get("entropy")]
    fit = line([x for x, _ in points], [y for _, y in points], range(len(points)))
    return None if fit is None else fit.slope.value


def entropy_table(rows: Sequence[Row], domain: str) -> Table:
    """Slopes of acceptance over the target's entropy."""
    swept = select(rows, arm="temperature", domain=domain)
    cells = []
    for rule in RULES:
        for loss in losses_of(swept):
            cell = [loss, rule]
            mine = select(swept, loss=loss, rule=rule)
            at_one = [row for row in mine if row["temperature"] == 1.0 and row.get("entropy")]
            for which in ("first", "reached"):
                fit = at_one[0]["entropy"][which] if at_one else None
                if fit is None:
                    cell.append("-")
                    continue
                slope = Estimate(100 * fit["slope"], 100 * fit["slope_stderr"], 196 * fit["slope_stderr"])
                cell.append(number(slope, 1, sign=True) + (f" (r {fit['r']:.2f})" if which == "first" else ""))
            slope = length_over_entropy(mine)
            cell.append("-" if slope is None else f"{slope:+.2f}")
            known = PAPER_SLOPES.get((loss, rule))
            cells.append([*cell, "-" if known is None else f"{known:+.2f}"])
    header = ["loss", "rule", "step 1, points per nat", "all steps reached", "accept length per nat", "paper, in RL"]
    note = (
        "Slope of a draft's expected acceptance over the entropy of its target at temperature 1, ± half a 95% "
        "interval with sequences as units; slope of the accept length over the mean entropy from temperature to "
        "temperature. The paper's is that of the accept length over the policy's entropy while it trains."
    )
    return Table(f"{domain}: acceptance against entropy", note, header, cells)


def depth_table(rows: Sequence[Row], domain: str) -> Table:
    """Depths trained against drafts used."""
    mine = select(rows, arm="depth", domain=domain)
    gammas = sorted(values(mine, field="gamma"))
    cells = []
    for depth in sorted(values(mine, field="train_k")):
        cell = [str(depth)]
        for gamma in gammas:
            found = select(mine, train_k=depth, gamma=gamma)
            rate = over_seeds(found)
            cell.append("-" if rate is None else f"{percent(rate)} ({found[0]['accept_length']:.2f})")
        cells.append(cell)
    note = "Head trained with tv, rejection: acceptance rate in percent (accept length)."
    return Table(f"{domain}: depths trained against drafts", note, ["K", *(f"gamma {g}" for g in gammas)], cells)


def _condition_table(
    rows: Sequence[Row], domain: str, arm: str, title: str, fields: dict[str, str], reference: dict[str, Any]
) -> Table:
    """Every condition of an arm by rule, and its paired difference from the reference of its group."""
    mine = select(rows, arm=arm, domain=domain)
    cells, seen = [], set()
    for row in mine:
        condition = {field: row[field] for field in fields}
        key = (tuple(condition.values()), row["rule"])
        if key in seen:
            continue
        seen.add(key)
        found = select(mine, rule=row["rule"], **condition)
        other = select(mine, rule=row["rule"], **(condition | reference))
        pair = None if condition == condition | reference else difference(found, other)
        shown = [
            f"{value:g}" if isinstance(value, float) else "-" if value is None else str(value)
            for value in condition.values()
        ]
        cells.append(
            [
                *shown,
                row["rule"],
                str(len(found)),
                percent(over_seeds(found)),
                "-" if pair is None else percent(pair.by_prompt, sign=True),
                "-" if pair is None or pair.by_seed is None else percent(pair.by_seed, sign=True),
            ]
        )
    named = ", ".join(f"{fields[field]} {value}" for field, value in reference.items())
    header = [*fields.values(), "rule", "seeds", "accept rate %", "difference, by prompt", "by seed"]
    return Table(f"{domain}: {title}", f"Differences in points, paired, from {named}.", header, cells)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that has cells, in the order of the study."""
    out = []
    for domain in values(rows, field="domain"):
        out += [
            main_table(rows, domain),
            temperature_table(rows, domain),
            entropy_table(rows, domain),
            depth_table(rows, domain),
            _condition_table(
                rows,
                domain,
                "attention",
                "attention in training",
                {"train_attention": "trained in", "attention": "decoded in"},
                {"train_attention": "chain", "attention": "chain"},
            ),
            _condition_table(
                rows,
                domain,
                "cold",
                "a cold head",
                {"loss": "loss", "warmup": "warm-up"},
                {"loss": "kl", "warmup": None},
            ),
            _condition_table(
                rows,
                domain,
                "serving",
                "training at the serving temperature",
                {"loss": "loss", "train_temperature": "trained at", "temperature": "served at"},
                {"train_temperature": 1.0},
            ),
            _condition_table(
                rows,
                domain,
                "own",
                "corpus text or own samples",
                {"loss": "loss", "train_data": "trained on"},
                {"train_data": "corpus"},
            ),
        ]
    return [table for table in out if table.rows]


def _verdict(estimate: Estimate) -> str:
    interval = estimate.interval
    assert interval is not None
    if interval[0] <= 0 <= interval[1]:
        return "not told apart"
    return "higher" if estimate.value > 0 else "lower"


def readings(rows: Sequence[Row]) -> list[str]:
    """Sentences on rejection against target-only for every loss, and on `tv` against `ce` and `kl`."""
    out = []
    for domain in values(rows, field="domain", arm="main"):
        mine = select(rows, arm="main", domain=domain)
        for loss in losses_of(mine):
            pair = difference(select(mine, loss=loss, rule="rejection"), select(mine, loss=loss, rule="target-only"))
            if pair is not None:
                out.append(_sentence(f"{domain}, {loss}: rejection - target-only", pair))
        for rule in RULES:
            for other in ("ce", "kl", "tv-step"):
                pair = difference(select(mine, loss="tv", rule=rule), select(mine, loss=other, rule=rule))
                if pair is not None:
                    out.append(_sentence(f"{domain}, {rule}: tv - {other}", pair))
    return out


def _sentence(what: str, pair: Any) -> str:
    text = f"{what} = {percent(pair.by_prompt, sign=True)} points by prompt ({_verdict(pair.by_prompt)})"
    if pair.by_seed is not None:
        text += f", {percent(pair.by_seed, sign=True)} by seed ({_verdict(pair.by_seed)}, {len(pair.seeds)} seeds)"
    return text + "."
