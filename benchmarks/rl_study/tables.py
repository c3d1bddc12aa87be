"""What the results say: tables and sentences, the same for terminal and document."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.rl_study.plan import ARMS, BASELINE
from benchmarks.rl_study.results import arms_of, last_third, over_seeds, overlap, reward_difference, slope, speed
from benchmarks.study.results import Row
from benchmarks.study.statistics import Estimate
from benchmarks.study.tables import PAPER_SLOPES, Table, number

GOAL = 1.8
FIRST = slice(0, 5)
# nats
_MOVED = 0.1


def _point(estimate: Estimate | None) -> str:
    """Without its interval, which two seeds make wide."""
    return "-" if estimate is None else f"{estimate.value:.2f}"


def _arm(name: str) -> Any:
    return next(arm for arm in ARMS if arm.name == name)


def acceptance_table(rows: Sequence[Row]) -> Table:
    """Does acceptance hold while the policy moves."""
    late, cells = last_third(rows), []
    for name in arms_of(rows):
        arm, found = _arm(name), slope(rows, name)
        if arm.rule == "off":
            continue
        change = [over_seeds(rows, name, "accept_length", part) for part in (FIRST, late)]
        parts = [over_seeds(rows, name, part, late) for part in ("entropy_part", "mismatch_part")]
        paper = PAPER_SLOPES.get((arm.head, arm.rule))
        cells.append(
            [
                name,
                *(_point(over_seeds(rows, name, "entropy", part)) for part in (FIRST, late)),
                *(_point(each) for each in change),
                _point(over_seeds(rows, name, "accept_rate", late)),
                number(found.slope, sign=True) if found else "-",
                *(number(part and Estimate(part.value, None, None), sign=True) for part in parts),
                "-" if paper is None or arm.strategy != "frozen" else f"{paper:+.2f}",
            ]
        )
    header = ["arm", "entropy, first", "last", "accept length, first", "last", "accept rate, last"]
    header += ["slope, per nat", "entropy part", "mismatch part", "paper's slope"]
    note = (
        "Means over seeds; first: five steps, last: the last third. Entropy in nats per token. Slope: accept length "
        "over entropy, step by step, with its 95% interval (blocks of five steps are the units). Entropy and mismatch "
        "part: of the change of accept length. The paper's: a 35B model over a whole RL run."
    )
    return Table("acceptance while the policy moves", note, header, cells)


def reward_table(rows: Sequence[Row]) -> Table:
    """Do the arms learn alike, as lossless verification says."""
    late, paired, cells = last_third(rows), BASELINE in arms_of(rows), []
    for name in arms_of(rows):
        cells.append([name, *(_point(over_seeds(rows, name, "reward", part)) for part in (FIRST, late))])
        if paired:
            cells[-1].append("-" if name == BASELINE else number(reward_difference(rows, name), 3, sign=True))
    header, note = ["arm", "first five steps", "last third"], "Means over seeds."
    if paired:
        header.append(f"difference from {BASELINE}")
        note += (
            f" Difference: over all steps, paired with {BASELINE} by seed and block of five steps, with its 95% "
            "interval. Verification is lossless, so that it should hold zero; runs diverge by chance all the same, "
            "which makes blocks of one run less independent than the interval says."
        )
    return Table("reward", note, header, cells)


def speed_table(rows: Sequence[Row]) -> Table:
    """How much faster a step is, and what is in the way of more."""
    cells = []
    for name in arms_of(rows):
        found = speed(rows, name)
        seconds = (found.step_seconds, found.rollout_seconds, found.learner_seconds)
        ratios = (found.end_to_end, found.rollout, found.learner_bound)
        cells.append([name, *(f"{value:.2f}" for value in seconds), *(number(ratio) for ratio in ratios)])
    header = ["arm", "step, s", "rollout, s", "learner, s", "speed-up", "of decoding", "bound by the learner"]
    note = (
        f"Medians over steps; ratios to {BASELINE} of the same seed, with 95% intervals over seeds. Speed-up: of whole "
        "steps, end to end. Of decoding: time of the rollout workers for each token. Bound by the learner: what whole "
        "steps could gain if decoding cost nothing."
    )
    return Table("time", note, header, cells)


def tables(rows: Sequence[Row]) -> list[Table]:
    """Every table that has cells; without a run that has no drafts there is nothing to compare times with."""
    found = [acceptance_table(rows), reward_table(rows)]
    if BASELINE in arms_of(rows):
        found.append(speed_table(rows))
    return [table for table in found if table.rows]


def _bounds(rows: Sequence[Row], name: str) -> str | None:
    """What keeps an arm from being faster."""
    found = speed(rows, name)
    if found.end_to_end is None or found.rollout is None or found.learner_bound is None:
        return None
    length = over_seeds(rows, name, "accept_length")
    reached = "reaches" if found.end_to_end.value >= GOAL else "misses"
    text = (
        f"{name} {reached} the goal of {GOAL}: {number(found.end_to_end)} end to end. An accept length of "
        f"{_point(length)} makes decoding {number(found.rollout)} times as fast: drafting and checking four tokens "
        "costs the rest."
    )
    busy = found.learner_seconds / found.step_seconds
    limit = "The learner" if busy > 0.9 else "Decoding"
    return f"{text} {limit} is what a step waits for: the learner works for {100 * busy:.0f}% of it."


def _entropy_sentence(rows: Sequence[Row]) -> str | None:
    """Does the frozen CE head suffer more from entropy than the frozen TV head, under the same rule."""
    heads, late = ("rs-ce", "rs-tv-frozen"), last_third(rows)
    ce, tv = (slope(rows, name) for name in heads)
    if ce is None or tv is None:
        return None
    ends = {name: [over_seeds(rows, name, "entropy", part) for part in (FIRST, late)] for name in heads}
    # over less, what else changes in a run would be taken for an effect of entropy
    if any(first is None or last is None or abs(last.value - first.value) < _MOVED for first, last in ends.values()):
        return None
    moved = [f"{_point(first)} to {_point(last)} nats ({name})" for name, (first, last) in ends.items()]
    width = math.hypot(ce.slope.half_width or math.nan, tv.slope.half_width or math.nan)
    apart = "told apart" if abs(ce.slope.value - tv.slope.value) > width else "not told apart"
    return (
        f"Entropy went from {' and '.join(moved)}. Accept length over entropy: {number(ce.slope, sign=True)} per nat "
        f"with the CE head, {number(tv.slope, sign=True)} with the TV head, which are {apart}."
    )


def readings(rows: Sequence[Row], events: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Sentences on entropy, on speed and what bounds it, and on how much rollouts and learner overlap."""
    said = [_entropy_sentence(rows), *(_bounds(rows, name) for name in arms_of(rows) if name != BASELINE)]
    out = [sentence for sentence in said if sentence]
    for name, found in events.items():
        # a checkpoint behind the last step has nothing beside it
        share = overlap([event for event in found if event["event"] != "save"], "learner", "worker")
        if share is not None:
            out.append(f"{name}: for {100 * share:.0f}% of the time that the learner trains, rollouts run beside it.")
    return out
