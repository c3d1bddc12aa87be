"""The freeze schedule as a pure function of the iteration.

Grammar: entries `part:count` or `part:count@objective`, separated by commas, part one of `backbone`, `mtp`, `none`;
the list repeats, unless its last entry has no count, which then lasts to the end of training.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from bebop_megatron.losses.registry import OBJECTIVES

PARTS = ("backbone", "mtp", "none")
_ENTRY = re.compile(r"(?P<part>[a-z-]+)(?::(?P<count>[^@]*))?(?:@(?P<objective>.*))?")


@dataclass(frozen=True)
class Phase:
    """One stretch of training: iterations `start` <= completed < `end` (`end` None: to the end of training)."""

    name: str
    frozen: frozenset[str]
    objective: str | None
    start: int
    end: int | None

    def describe(self, iteration: int) -> str:
        """Short text for a log line: what is frozen, and the how-manieth of its iterations `iteration` is."""
        what = f"{self.name} frozen" if self.frozen else "joint"
        if self.objective is not None:
            what += f" @{self.objective}"
        done = iteration - self.start + 1
        return f"{what} {done}" if self.end is None else f"{what} {done}/{self.end - self.start}"


@dataclass(frozen=True)
class _Entry:
    part: str
    count: int | None
    objective: str | None

    @property
    def frozen(self) -> frozenset[str]:
        return frozenset() if self.part == "none" else frozenset({self.part})


def _parse_entry(text: str, whole: str, last: bool) -> _Entry:
    match = _ENTRY.fullmatch(text)
    where = f"in freeze schedule {whole!r}, entry {text!r}"
    if {"all", "both"} & set(re.split(r"[+&:@]", text)) or {"backbone", "mtp"} <= set(re.split(r"[+&:@]", text)):
        raise ValueError(f"{where} freezes everything, so nothing would train: freeze backbone or mtp, or none")
    if not text or match is None:
        raise ValueError(f"{where}: expected part[:iterations][@objective], for example backbone:1000")
    if ":" in (match["objective"] or ""):
        objective, _, number = match["objective"].partition(":")
        raise ValueError(f"{where}: the iterations come before the objective, {match['part']}:{number}@{objective}")
    if match["part"] not in PARTS:
        raise ValueError(f"{where}: unknown part {match['part']!r}, choose one of {', '.join(PARTS)}")
    count: int | None = None
    if match["count"] is not None:
        if not match["count"].isdigit() or int(match["count"]) == 0:
            raise ValueError(f"{where}: the number of iterations must be a positive whole number")
        count = int(match["count"])
    elif not last:
        raise ValueError(f"{where}: only the last entry may leave out its number of iterations")
    if match["objective"] is not None and match["objective"] not in OBJECTIVES:
        choices = ", ".join(sorted(OBJECTIVES))
        raise ValueError(f"{where}: unknown objective {match['objective']!r}, choose one of {choices}")
    return _Entry(match["part"], count, match["objective"])


@dataclass(frozen=True)
class FreezeSchedule:
    """A parsed schedule; `phase(iteration)` gives what is frozen after `iteration` completed steps."""

    entries: tuple[_Entry, ...]

    @classmethod
    def parse(cls, text: str) -> FreezeSchedule:
        """Read a schedule such as `backbone:1000,mtp:200,none:100`.

        Raises:
            ValueError: with the entry that is wrong and what was expected.
        """
        if not text.strip():
            raise ValueError("the freeze schedule is empty: give at least one entry, for example backbone")
        parts = [part.strip() for part in text.split(",")]
        return cls(tuple(_parse_entry(part, text, i == len(parts) - 1) for i, part in enumerate(parts)))

    @property
    def constant(self) -> bool:
        """Whether one phase lasts for the whole of training."""
        return len({(e.part, e.objective) for e in self.entries}) == 1

    @property
    def frozen_parts(self) -> frozenset[str]:
        """Every part that is frozen at some time."""
        return frozenset().union(*self.frozen_sets)

    @property
    def frozen_sets(self) -> list[frozenset[str]]:
        """What each entry freezes."""
        return [entry.frozen for entry in self.entries]

    @property
    def objectives(self) -> frozenset[str]:
        """Every objective that an entry names."""
        return frozenset(e.objective for e in self.entries if e.objective is not None)

    def table(self) -> str:
        """The schedule as a table of its entries, for the start of a run."""
        rows = [("iterations", "frozen", "trains", "MTP loss")]
        begin = 0
        for entry in self.entries:
            last = "end" if entry.count is None else str(begin + entry.count)
            trains = {"backbone": "mtp", "mtp": "backbone", "none": "backbone, mtp"}[entry.part]
            loss = "not run" if entry.part == "mtp" else entry.objective or "as --mtp-loss"
            rows.append((f"{begin + 1}-{last}", entry.part, trains, loss))
            begin += entry.count or 0
        widths = [max(len(row[i]) for row in rows) for i in range(4)]
        lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        if self.entries[-1].count is not None:
            lines.append(f"  repeats every {begin:,} iterations")
        return "\n".join(line.rstrip() for line in lines)

    def change_at(self, other: FreezeSchedule, iteration: int) -> str:
        """What changes if `other` replaces this schedule after `iteration` completed steps."""
        before, after = self.phase(iteration), other.phase(iteration)
        now = f"the next step has {after.describe(iteration)}"
        if (before.frozen, before.objective) == (after.frozen, after.objective):
            return f"{now}, as it would have had; later phases differ"
        return f"{now} instead of {before.describe(iteration)}"

    def phase(self, iteration: int) -> Phase:
        """The phase that governs the step after `iteration` completed steps; `phase(0)` governs the first.

        Raises:
            ValueError: a negative iteration.
        """
        if iteration < 0:
            raise ValueError(f"the iteration counts completed steps and cannot be negative, got {iteration}")
        counted = sum(entry.count or 0 for entry in self.entries)
        endless = self.entries[-1].count is None
        start = 0 if endless else iteration // counted * counted
        for entry in self.entries:
            end = None if entry.count is None else start + entry.count
            if end is None or iteration < end:
                return Phase(entry.part, entry.frozen, entry.objective, start, end)
            start = end
        raise AssertionError("the entries cover every iteration")
