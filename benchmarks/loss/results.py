"""What the measurements say: ratios with their spread, the table rows, and the ratios that are judged."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

from benchmarks.loss.contenders import CONTENDERS, FLOOR, LABELS

MIB = 2**20
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
# beside the hidden-state gradients grow a few floats for each row, about 3%; the rest is the allocator's
GROWTH_LIMIT = 1.1


@dataclass(frozen=True)
class Ratio:
    """Median of the ratios of the rounds, with their 20th and 80th percentile."""

    middle: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Ratio:
        parts = quantiles(values, n=5, method="inclusive") if len(values) > 1 else [values[0]] * 4
        return cls(median(values), parts[0], parts[-1])

    def __str__(self) -> str:
        return f"{self.middle:.2f} ({self.low:.2f} to {self.high:.2f})"


def time_ratio(seconds: dict[str, list[float]], name: str, against: str = FLOOR) -> Ratio | None:
    """Each round's time over that of another contender in the same round; None where one was not run."""
    if not seconds.get(name) or not seconds.get(against):
        return None
    return Ratio.of([own / other for own, other in zip(seconds[name], seconds[against], strict=True)])


def gradient_bytes(case: dict[str, Any]) -> int:
    """Size of the hidden-state gradients of all depths."""
    return case["k"] * case["n"] * case["h"] * _BYTES[case["dtype"]]


def contenders_of(data: dict[str, Any]) -> list[str]:
    """Contenders that were run at all."""
    return [name for name in CONTENDERS if name not in data["not_run"]]


def time_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: each contender's time as a multiple of the bare products'."""
    names = contenders_of(data)
    rows = []
    for one in data["timed"]:
        case, seconds = one["case"], one["seconds"]
        ratios = [time_ratio(seconds, name) for name in names]
        cells = ["-" if ratio is None else str(ratio) for ratio in ratios]
        sizes = [case["k"], case["n"], case["v"], case["tp"]]
        rows.append([one["sweep"], *(f"{size:,}" for size in sizes), f"{median(seconds[FLOOR]):.3g}", *cells])
    return ["sweep", "K", "n", "V", "tp", "products, s", *(LABELS[name] for name in names)], rows


def _mib(size: int | None) -> str:
    return "out of memory" if size is None else f"{size / MIB:,.0f}"


def memory_table(data: dict[str, Any]) -> tuple[list[str], list[list[str]]]:
    """Header and cells: MiB beyond the inputs, and the hidden-state gradients alone."""
    names = contenders_of(data)
    rows = []
    for one in data["weighed"]:
        case, peak = one["case"], one["peak_bytes"]
        cells = ["-" if name not in peak else _mib(peak[name]) for name in names]
        sizes = [f"{size:,}" for size in (case["k"], case["n"], case["v"])]
        rows.append([*sizes, *cells, f"{gradient_bytes(case) / MIB:,.0f}"])
    return ["K", "n", "V", *(LABELS[name] for name in names), "gradients alone"], rows


@dataclass(frozen=True)
class Judged:
    """One ratio and the limit it must not reach (`strict`) or exceed."""

    name: str
    value: Ratio | float | None
    limit: float
    strict: bool = False

    @property
    def verdict(self) -> str:
        if self.value is None:
            return "not measured"
        value = self.value.middle if isinstance(self.value, Ratio) else self.value
        return "met" if value < self.limit or (value == self.limit and not self.strict) else "MISSED"

    @property
    def shown(self) -> str:
        if isinstance(self.value, Ratio):
            return f"{self.value.middle:.3f} ({self.value.low:.3f} to {self.value.high:.3f})"
        return "-" if self.value is None else f"{self.value:.3f}"

    @property
    def shown_limit(self) -> str:
        return f"{'below' if self.strict else 'at most'} {self.limit:g}"


def judged(data: dict[str, Any]) -> list[Judged]:
    """The ratios that the objective is judged by, on the default case."""
    case, seconds = data["timed"][0]["case"], data["timed"][0]["seconds"]
    against, limit = ("kept", 1 / 10) if case["device"] == "cuda" else ("autograd", 1 / 8)
    own = next((one["peak_bytes"] for one in data["weighed"] if one["case"] == case), {})
    share = None
    if own.get("ours") is not None and own.get(against):
        share = own["ours"] / own[against]
    fewest, most = data["weighed"][0], data["weighed"][-1]
    growth = None
    if fewest["peak_bytes"]["ours"] is not None and most["peak_bytes"]["ours"] is not None:
        grown = most["peak_bytes"]["ours"] - fewest["peak_bytes"]["ours"]
        growth = grown / (gradient_bytes(most["case"]) - gradient_bytes(fewest["case"]))
    span = f"K={fewest['case']['k']} to K={most['case']['k']}"
    return [
        Judged("time against the bare products", time_ratio(seconds, "ours"), 1.2),
        Judged(f"time against {LABELS['autograd']}", time_ratio(seconds, "ours", "autograd"), 1, strict=True),
        Judged(f"peak extra memory against {LABELS[against]}", share, limit),
        Judged(f"memory growth from {span} against that of the gradients alone", growth, GROWTH_LIMIT),
    ]
