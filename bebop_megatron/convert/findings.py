"""What is wrong with a set of tensors, all of it, before anything is written."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch

from bebop_megatron.bridges.checkpoint_keys import CheckpointKeys
from bebop_megatron.bridges.families import Sizes
from bebop_megatron.bridges.huggingface import FolderReader
from bebop_megatron.bridges.names import LM_HEAD
from bebop_megatron.bridges.plan import Place, Row
from bebop_megatron.mcore.torch_dist import TorchDistReader

_SHOWN = 20


@dataclass
class Findings:
    """Tensors that are not there, that nothing names, and that have another shape than the config says."""

    missing: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    misshapen: list[str] = field(default_factory=list)

    def lines(self, limit: int | None = _SHOWN) -> list[str]:
        """One line for each kind that occurs, with the names."""
        out = []
        for kind in ("missing", "extra", "misshapen"):
            names = getattr(self, kind)
            shown = names[:limit]
            if names:
                more = f", and {len(names) - len(shown)} more" if len(names) > len(shown) else ""
                out.append(f"{kind} ({len(names)}): {', '.join(shown)}{more}")
        return out

    def refuse(self, what: str) -> None:
        """Raise if there is anything.

        Raises:
            ValueError: with everything that is wrong.
        """
        if self.lines():
            raise ValueError(f"{what} does not hold what its config says:\n  " + "\n  ".join(self.lines(None)))


def in_folder(reader: FolderReader, rows: Iterable[Row], sizes: Sizes) -> Findings:
    """Compare a Hugging Face folder with the table."""
    out, used = Findings(), set()
    for row in rows:
        for place, shape in zip(row.hf, row.shapes, strict=True):
            used.add(place.name)
            expected = torch.Size((*place.counts, *shape))
            info = reader.tensors.get(place.name)
            if info is None:
                out.missing.append(place.name)
            elif info.shape != expected:
                out.misshapen.append(f"{place.name} is {list(info.shape)}, not {list(expected)}")
    if sizes.tied:
        used.add(LM_HEAD.hf[0])
    out.extra = [name for name in reader.tensors if name not in used and not carried(name, sizes)]
    # an expert's slabs are one tensor
    out.missing, out.misshapen = list(dict.fromkeys(out.missing)), list(dict.fromkeys(out.misshapen))
    return out


def carried(name: str, sizes: Sizes) -> bool:
    """Whether a tensor belongs to the vision model beside the text model."""
    return sizes.multimodal and not name.startswith((sizes.prefix, "mtp.", "lm_head."))


def mtp_layers_named(names: Iterable[str]) -> int:
    """Physical MTP layers among Hugging Face names."""
    found = (re.match(r"mtp\.layers\.(\d+)\.", name) for name in names)
    return 1 + max((int(match[1]) for match in found if match), default=-1)


def located(reader: TorchDistReader, keys: CheckpointKeys, place: Place) -> Place | None:
    """Where the checkpoint keeps a parameter; None where it does not."""
    return next((at for at in keys.alternatives(place) if at.name in reader.tensors), None)


def in_checkpoint(reader: TorchDistReader, keys: CheckpointKeys, rows: Iterable[Row]) -> Findings:
    """Compare a Megatron checkpoint with the table. Padded vocabulary rows are none too many."""
    out, used = Findings(), set()
    for row in rows:
        for place, shape in zip(row.megatron, row.megatron_shapes(), strict=True):
            at = located(reader, keys, place)
            if at is None:
                out.missing.append(keys.locate(place).name)
                continue
            used.add(at.name)
            size, expected = reader.tensors[at.name].size, torch.Size((*at.counts, *shape))
            padded = row.is_vocabulary and size[1:] == expected[1:] and size[0] >= expected[0]
            if size != expected and not padded:
                out.misshapen.append(f"{at.name} is {list(size)}, not {list(expected)}")
    out.extra = sorted(keys.model_keys(reader.tensors) - used)
    out.missing, out.misshapen = list(dict.fromkeys(out.missing)), list(dict.fromkeys(out.misshapen))
    return out
