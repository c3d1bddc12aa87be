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
        ("backbone@kl:46,backbone@tv", "backbone:46@kl"),
        ("backbone:3,,mtp:1", "expected part"),
        ("backbone:3@tvv", "unknown objective 'tvv'"),
        ("backbone 3", "expected part"),
        ("backbone+mtp:3", "freezes everything, so nothing would train"),
        ("none:5,all:3", "entry 'all:3' freezes everything"),
    ],
)
def test_bad_schedule_is_refused_with_the_entry(text, message):
    with pytest.raises(ValueError, match=message):
        FreezeSchedule.parse(text)


def test_negative_iteration_is_refused():
    with pytest.raises(ValueError, match="cannot be negative"):
        FreezeSchedule.parse("backbone").phase(-1)


def test_table_shows_iterations_as_the_log_counts_them():
    lines = FreezeSchedule.parse("backbone:2@kl,mtp:1").table().splitlines()
    assert [line.split() for line in lines[1:3]] == [
        ["1-2", "backbone", "mtp", "kl"],
        ["3-3", "mtp", "backbone", "not", "run"],
    ]
    assert lines[3] == "  repeats every 3 iterations"
    assert FreezeSchedule.parse("none:4,backbone").table().splitlines()[-1].split()[0] == "5-end"


def test_phase_describes_its_iterations():
    schedule = FreezeSchedule.parse("backbone:2@kl,none:1,mtp")
    assert [schedule.phase(i).describe(i) for i in (0, 1, 2, 3, 7)] == [
        "backbone frozen @kl 1/2",
        "backbone frozen @kl 2/2",
        "joint 1/1",
        "mtp frozen 1",
        "mtp frozen 5",
    ]


def test_change_of_schedule_is_put_into_words():
    old, new = FreezeSchedule.parse("backbone:2,mtp:2"), FreezeSchedule.parse("none:1,backbone:3")
    assert old.change_at(new, 4) == "the next step has joint 1/1 instead of backbone frozen 1/2"
    assert "later phases differ" in old.change_at(new, 1)
