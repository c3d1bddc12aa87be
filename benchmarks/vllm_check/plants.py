"""Export faults, planted on purpose: a check that passes with one of them checks nothing."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from torch import Tensor

FC = "mtp.fc.weight"


def _swap_fc_halves(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    embedding, hidden = tensors[FC].chunk(2, 1)
    return {FC: torch.cat([hidden, embedding], 1).contiguous()}


def _norm_without_one(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    # the weight itself where the engine adds the 1
    return {name: value + 1 for name, value in tensors.items() if name.startswith("mtp.") and "norm" in name}


def _drop_fc(tensors: dict[str, Tensor]) -> dict[str, Tensor | None]:
    return {FC: None}


PLANTS = {"swap-fc-halves": _swap_fc_halves, "norm-without-one": _norm_without_one, "drop-fc": _drop_fc}


def plant(name: str, source: Path, target: Path) -> list[str]:
    """Copy an exported folder with a fault; returns the names of the tensors that are not what they were.

    Raises:
        ValueError: the folder has several weight files or no MTP head.
    """
    from safetensors.torch import load_file, save_file

    files = sorted(source.glob("*.safetensors"))
    if len(files) != 1:
        raise ValueError(f"{source} has {len(files)} weight files: a fault is planted in folders with one")
    tensors = load_file(files[0])
    if FC not in tensors:
        raise ValueError(f"{source} has no {FC}: there is no head to plant a fault in")
    changes = PLANTS[name](tensors)
    kept = {key: changes.get(key, value) for key, value in tensors.items()}
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("*.safetensors*"))
    whole = {key: value for key, value in kept.items() if value is not None}
    save_file(whole, target / "model.safetensors", metadata={"format": "pt"})
    return sorted(changes)
