"""Every family converted once, and taken through Megatron runs under three layouts; shared by this folder's tests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bebop_megatron.convert import import_checkpoint
from tests.bridges import models
from tests.bridges.world import Case, run

LAYOUTS: dict[str, tuple[int, int, tuple[str, ...]]] = {
    "tp1": (1, 1, ()),
    "tp2": (2, 1, ()),
    "pp2": (1, 2, ()),
    # the embedding on three ranks: the first, the MTP layers', and as the LM head on the last
    "pp3": (1, 3, ("--pipeline-model-parallel-layout", "Ett|ttmm|L")),
}
IDS = torch.randint(0, 96, (2, 16), generator=torch.Generator().manual_seed(3))
DEPTHS = 2


def quiet(_: str) -> None:
    """Takes what a conversion reports."""


def layouts_of(name: str) -> list[str]:
    """Megatron 0.19.2 cannot save a tied model with MTP layers and LM head on a last stage without the embedding."""
    return ["tp1", "tp2", "pp3" if name.endswith("-tied") else "pp2"]


class Converted:
    """Folders `hf` and `mcore` of every family, one for each layout that a run saved, and what Megatron computed."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.tensors: dict[str, dict[str, torch.Tensor]] = {}
        cases: dict[int, dict[str, Case]] = {1: {}, 2: {}, 3: {}}
        for name in models.MODELS:
            self.tensors[name] = models.make_folder(name, root / name / "hf")
            import_checkpoint(root / name / "hf", root / name / "mcore", depth=DEPTHS, note=quiet)
            for layout in layouts_of(name):
                tp, pp, flags = LAYOUTS[layout]
                load, save, ids = root / name / "mcore", root / name / layout, IDS if tp * pp == 1 else None
                cases[tp * pp][f"{name}/{layout}"] = Case(str(load), str(save), tp, pp, ids, flags)
        self.computed = run(cases)


@pytest.fixture(scope="session")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Converted:
    return Converted(tmp_path_factory.mktemp("converted"))
