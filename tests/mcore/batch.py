"""The global batch of the layout tests, in every form in which it can reach a rank."""

from __future__ import annotations

import torch
from torch import Tensor

VOCAB, LENGTH = 96, 16

# documents of each of four packed samples: what there is of them, and how long they lie in the sample
EXACT = [[4, 12], [16], [4, 4, 8], [12, 4]]
RAGGED = [[3, 9], [15], [1, 4, 6], [12, 2]]


def plain() -> dict[str, Tensor]:
    """Four sequences with no valid anchor, one, and many."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator)
    mask = torch.zeros(4, LENGTH)
    mask[1, 5:8] = 1
    mask[2] = 1
    mask[3] = (torch.rand(LENGTH, generator=generator) < 0.7).float()
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(4, -1).contiguous(),
    }


def _document(length: int, seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCAB, (1, length + 1), generator=generator)
    # the first document of the batch has no target at all
    mask = (torch.rand(1, length, generator=generator) < 0.8).float() * (seed > 0)
    positions = torch.arange(length)[None]
    return {"tokens": tokens[:, :-1], "labels": tokens[:, 1:], "loss_mask": mask, "position_ids": positions}


def documents(lengths: list[list[int]]) -> list[dict[str, Tensor]]:
    """Every document as a micro-batch of its own: the specification of packing."""
    return [_document(length, 100 * i + j) for i, sample in enumerate(lengths) for j, length in enumerate(sample)]


def packed(lengths: list[list[int]]) -> dict[str, Tensor]:
    """Four samples of packed documents, each padded up to its place in `EXACT`."""
    samples = []
    for i, sample in enumerate(lengths):
        parts = []
        for j, (length, room) in enumerate(zip(sample, EXACT[i], strict=True)):
            # padding that would be noticed: real ids, and a mask that says nothing of it
            filler = {"tokens": 5, "labels": 6, "loss_mask": 1, "position_ids": 3}
            document = _document(length, 100 * i + j)
            parts.append(
                {k: torch.nn.functional.pad(v, (0, room - length), value=filler[k]) for k, v in document.items()}
            )
        samples.append({k: torch.cat([part[k] for part in parts], dim=1) for k in parts[0]})
    batch = {k: torch.cat([sample[k] for sample in samples]) for k in samples[0]}
    batch["cu_seqlens_padded"] = _bounds(EXACT)
    batch["cu_seqlens"] = _bounds(lengths)
    batch["max_seqlen"] = torch.full((4,), LENGTH, dtype=torch.int32)
    return batch


def _bounds(lengths: list[list[int]]) -> Tensor:
    """Cumulative lengths, filled up with the sample's length as Megatron's datasets do."""
    out = torch.full((len(lengths), LENGTH + 1), LENGTH, dtype=torch.int32)
    for row, sample in zip(out, lengths, strict=True):
        row[: len(sample) + 1] = torch.tensor([0, *sample]).cumsum(0)
    return out


def _one_rank() -> dict[str, Tensor]:
    """Targets whose chains start only on rank 0 of two in zigzag."""
    mask = torch.zeros(4, LENGTH)
    mask[:, :4] = 1
    mask[:, 13:] = 1
    return plain() | {"loss_mask": mask}


def _minus_hundred() -> dict[str, Tensor]:
    """What is not a target is marked in the labels alone."""
    batch = plain()
    labels = batch["labels"].masked_fill(batch["loss_mask"] == 0, -100)
    return batch | {"labels": labels, "loss_mask": torch.ones(4, LENGTH)}


def _without_labels(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in batch.items() if k != "labels"}


def _labels_from_tokens(batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """Labels and their mask as ids and a mask of ids say: the last position of a document predicts nothing."""
    ahead = {k: torch.nn.functional.pad(batch[k][:, 1:], (0, 1)) for k in ("tokens", "loss_mask")}
    return batch | {"labels": ahead["tokens"], "loss_mask": ahead["loss_mask"]}


# what a data-parallel world of one rank reads: micro-batches, or rows to be cut into them
FORMS = {
    "plain": plain,
    "documents": lambda: documents(EXACT),
    "ragged-documents": lambda: documents(RAGGED),
    "packed": lambda: packed(EXACT),
    "padded": lambda: packed(RAGGED),
    "twice": lambda: {k: torch.cat([v, v]) for k, v in plain().items()},
    "nothing": lambda: plain() | {"loss_mask": torch.zeros(4, LENGTH)},
    "one-rank": _one_rank,
    "minus-hundred": _minus_hundred,
    "tokens": lambda: _without_labels(plain()),
    "packed-tokens": lambda: _without_labels(packed(EXACT)),
    "labelled-tokens": lambda: _labels_from_tokens(plain()),
    "labelled-documents": lambda: [_labels_from_tokens(d) for d in documents(EXACT)],
}
