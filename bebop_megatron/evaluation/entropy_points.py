"""Points of (entropy of the target, acceptance), from saved reports and training logs; what their change consists of.

A change of acceptance since the first point is b (H_t - H_0), which the target's entropy explains, and a remainder, a
mismatch of head and target.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bebop_megatron.entropy import fit_line, split, split_change
from bebop_megatron.outputs import read_json

_LOG_LINE = re.compile(r"iteration +(\d+)/ *\d+ *\|(.*)")


@dataclass(frozen=True)
class Point:
    """Acceptance and entropy of one checkpoint or log interval under one rule; `found` as `entropy_summary` gives it.

    `acceptance` is that of a draft step in checkpoints, an accept length in logs.
    """

    name: str
    rule: str
    entropy: float
    acceptance: float
    found: dict[str, Any] | None = None


def point_of(name: str, rule: str, found: dict[str, Any]) -> Point:
    """The point of a checkpoint, from what `entropy_summary` found."""
    return Point(name, rule, found["mean_entropy"]["value"], found["mean_acceptance"]["value"], found)


def from_results(paths: Sequence[str], rules: Sequence[str]) -> list[Point]:
    """Points of saved reports, of their main setting.

    Raises:
        ValueError: a file without what a full forward pass found.
    """
    points = []
    for path in paths:
        payload = read_json(path)
        if "points" in payload:
            points += [Point(**each) for each in payload["points"] if each["rule"] in rules]
            continue
        mine = [each for each in payload.get("full_forward", []) if each["arm"] == "main"]
        if not mine:
            raise ValueError(f"{path} holds no full forward pass: it is no results.json of --report")
        points += [
            point_of(each["label"], each["config"]["rule"], each["entropy"][each["config"]["rule"]])
            for each in mine
            if each["config"]["rule"] in rules
        ]
    return points


def from_log(path: str, rules: Sequence[str]) -> list[Point]:
    """Accept length and target entropy of every log interval.

    Raises:
        ValueError: no such file, or no line with both.
    """
    file = Path(path)
    if not file.is_file():
        raise ValueError(f"--log {path}: no such file")
    points = []
    for line in file.read_text(errors="replace").splitlines():
        match = _LOG_LINE.search(line)
        if match is None:
            continue
        pairs = (part.rsplit(":", 1) for part in match[2].split("|") if ":" in part)
        values = {name.strip(): value.strip() for name, value in pairs}
        for rule in rules:
            name = f"mtp accept-length/{rule}"
            if name in values and "mtp target entropy" in values:
                points.append(Point(match[1], rule, float(values["mtp target entropy"]), float(values[name])))
    if not points:
        raise ValueError(f'{path} has no line with "mtp target entropy" and an accept length: was --mtp-loss set?')
    return points


def over_time(points: Sequence[Point], fit_on: int | None) -> dict[str, Any]:
    """The split of every point's change since the first; points of one rule in order.

    Raises:
        ValueError: the first `fit_on` points do not say a line.
    """
    history = [(point.entropy, point.acceptance) for point in points]
    first = points[0].found
    if fit_on is None and first is not None:
        slope, how = first["slope"]["value"], f"tokens of {points[0].name}"
        if slope is None or slope != slope:
            raise ValueError(f"the tokens of {points[0].name} do not say a slope: their entropies are all the same")
        parts = [split_change(slope, history[0], now) for now in history]
    else:
        count = fit_on or max(3, len(points) // 4)
        parts = split(history, count)
        line = fit_line(history[:count])
        assert line is not None
        slope, how = line.slope, f"the first {min(count, len(points))} points"
    return {
        "rule": points[0].rule,
        "slope": slope,
        "slope_from": how,
        "points": [
            {
                "name": point.name,
                "entropy": point.entropy,
                "acceptance": point.acceptance,
                "change": point.acceptance - history[0][1],
                "entropy_part": part.entropy_part,
                "mismatch_part": part.mismatch_part,
            }
            for point, part in zip(points, parts, strict=True)
        ],
    }
