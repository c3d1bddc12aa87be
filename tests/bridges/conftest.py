"""Every family converted once, and taken through Megatron runs under three layouts; shared by this folder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bebop_megatron.convert import import_checkpoint
from tests.bridges import models
from tests.bridges.world import Case, run

LAYOUTS = {"tp1": (1, 1), "tp2": (2, 1), "pp2": (1, 2)}
IDS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
DEPTHS = 2


def quiet(_: str) -> None:
    """Takes what a conversion reports."""


class Converted:
    """Folders `hf` and `mcore` of every family, one for each layout that a run saved, and what Megatron computed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        cases: dict[int, dict[str, Case]] = {1: {}, 2: {}}
        for name in models.MODELS:
            self.tensors[name] = models.make_folder(name, root / name / "hf")
            import_checkpoint(root / name / "hf", root / name / "mcore", depth=DEPTHS, note=quiet)
            for layout, (tp, pp) in LAYOUTS.items():
                load, save = root / name / "mcore", root / name / layout
                cases[tp * pp][f"{name}/{layout}"] = Case(str(load), str(save), tp, pp, IDS if tp * pp == 1 else None)
        self.computed = run(cases)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("converted"))
