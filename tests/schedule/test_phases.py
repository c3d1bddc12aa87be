"""Freeze schedules as pure functions of the iteration. Catches off-by-one at a switch and silent nonsense."""

import pytest

from bebop_megatron.schedule.phases import FreezeSchedule


def names(text, iterations):
    schedule = FreezeSchedule.parse(text)
    return [schedule.phase(i).name for i in iterations]


def test_counted_entries_repeat():
    assert names("backbone:2,mtp:1", range(7)) == ["backbone", "backbone", "mtp"] * 2 + ["backbone"]


def test_last_entry_without_count_lasts_to_the_end():
    assert names("mtp:2,backbone", [0, 1, 2, 3, 10**9]) == ["mtp", "mtp", "backbone", "backbone", "backbone"]
    phase = FreezeSchedule.parse("mtp:2,backbone").phase(5)
    assert (phase.start, phase.end) == (2, None)


def test_phase_tells_its_bounds_and_what_is_frozen():
    schedule = FreezeSchedule.parse("backbone:1000@tv, mtp:200, none:100")
    phase = schedule.phase(1300)
    assert (phase.name, phase.frozen, phase.objective, phase.start, phase.end) == (
        "backbone",
        {"backbone"},
        "tv",
        1300,
        2300,
    )
    assert schedule.phase(1299).frozen == frozenset()
    assert schedule.phase(1000).frozen == {"mtp"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "empty"),
        ("head:3", "unknown part 'head'"),
        ("backbone:-1", "positive whole number"),
        ("backbone:0", "positive whole number"),
        ("backbone:", "positive whole number"),
        ("backbone:1.5", "positive whole number"),
        ("backbone,mtp:3", "only the last entry"),
        ("backbone:3,,mtp:1", "expected part"),
        ("backbone:3@tvv", "unknown objective 'tvv'"),
        ("backbone 3", "expected part"),
    ],
)
def test_bad_schedule_is_refused_with_the_entry(text, message):
    with pytest.raises(ValueError, match=message):
        FreezeSchedule.parse(text)


def test_negative_iteration_is_refused():
    with pytest.raises(ValueError, match="cannot be negative"):
        FreezeSchedule.parse("backbone").phase(-1)
