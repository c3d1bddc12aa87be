"""Splits the sequences of a generation over data-parallel ranks, and puts the results together again."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from bebop_megatron.evaluation.outcome import Continuation, DraftRecords, GenerationResult


@dataclass(frozen=True)
class Share:
    """Rank `rank` of `size` takes sequences rank, rank + size, ... of all."""

    rank: int = 0
    size: int = 1

    def sequence(self, index: int) -> int:
        """Which of all sequences is this rank's `index`-th."""
        return index * self.size + self.rank

    def count(self, total: int) -> int:
        """How many of `total` are this rank's."""
        return max(0, -(-(total - self.rank) // self.size))


def share_of(group: Any) -> Share:
    """This process's share of a data-parallel process group (None: everything)."""
    return Share() if group is None else Share(group.rank(), group.size())


def gathered(result: GenerationResult, group: Any) -> GenerationResult:
    """The ranks' results as one, in the order of the sequences and the same on every rank.

    Seconds are the slowest rank's: that is what one waits for.

    Collectives: one all-gather of objects over `group`.
    """
    if group is None or group.size() == 1:
        return result
    parts: list[GenerationResult] = [result] * group.size()
    torch.distributed.all_gather_object(parts, result, group=group)
    # ranks may have unequally many: the rounds in which they took sequences give the order
    keys = sorted((index, rank) for rank, part in enumerate(parts) for index in range(len(part.sequences)))
    sequences: list[Continuation] = [parts[rank].sequences[index] for index, rank in keys]
    return GenerationResult(
        sequences=sequences,
        counts=torch.stack([parts[rank].counts[index] for index, rank in keys]),
        seconds=max(part.seconds for part in parts),
        records=_records(parts, {key: place for place, key in enumerate(keys)}),
    )


def _records(parts: list[GenerationResult], places: dict[tuple[int, int], int]) -> DraftRecords | None:
    """All records, their sequences renumbered: places (index on its rank, rank) -> index in the whole."""
    known = [(rank, part.records) for rank, part in enumerate(parts) if part.records is not None]
    if not known:
        return None
    columns: dict[str, list[torch.Tensor]] = {name: [] for name in vars(known[0][1])}
    for rank, records in known:
        renumbered = torch.tensor([places[index, rank] for index in range(len(parts[rank].sequences))])
        for name, values in vars(records).items():
            columns[name].append(renumbered[values] if name == "sequence" else values)
    return DraftRecords(**{name: torch.cat(values) for name, values in columns.items()})
