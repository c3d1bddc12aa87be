"""The study's jobs: what each needs, what it leaves behind, and how to tell that it is done."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from benchmarks.study import corpora, training
from benchmarks.study.plan import Cell, Head, Size, all_cells

# of one job: what is complete carries this file, which is written last
DONE = "done.json"


@dataclass(frozen=True)
class Job:
    """A piece of work for one process. `needs` names jobs that must be done before."""

    kind: str
    name: str
    needs: tuple[str, ...] = ()
    domain: str = ""
    head: Head | None = None
    cells: tuple[Cell, ...] = ()


def claim(output: Path, size: Any) -> None:
    """Write down what sizes a study's folder is for.

    Raises:
        ValueError: it holds a study of other sizes.
    """
    from bebop_megatron.outputs import write_json

    file, wanted = output / "settings.json", json.loads(json.dumps(asdict(size)))
    if not file.is_file():
        write_json(file, wanted)
    elif (found := json.loads(file.read_text())) != wanted:
        names = ", ".join(name for name in sorted(wanted) if found.get(name) != wanted[name])
        raise ValueError(
            f"{output} holds a study of another size ({names} differ): continue it with the options it was "
            "started with, or choose another --output"
        )


@dataclass(frozen=True)
class Study:
    """A study in its folder: everything that is there already is not made again.

    Raises:
        ValueError: the folder holds a study of other sizes.
    """

    output: Path
    size: Size
    domains: tuple[str, ...]
    gsm8k: Path | None = None

    def __post_init__(self) -> None:
        claim(self.output, self.size)

    @property
    def cells(self) -> list[Cell]:
        """Every cell in the order of measuring."""
        return all_cells(self.size, self.domains)

    def data(self, domain: str) -> Path:
        """Folder of a domain's corpus."""
        return self.output / "data" / domain

    def trained(self, domain: str, name: str) -> Path:
        """Folder of a checkpoint."""
        return self.output / "trained" / domain / name

    def cell(self, cell: Cell) -> Path:
        """File of a cell."""
        return self.output / "cells" / f"{cell.name}.json"

    def jobs(self) -> list[Job]:
        """Every job, each after those it needs, in the order of the cells."""
        jobs: dict[str, Job] = {}
        seen: set[str] = set()
        watched = {cell.name for cell in self.cells if cell.entropy}
        for (arm, head), group in groupby(self.cells, key=lambda cell: (cell.arm, cell.head)):
            cells = [cell for cell in group if cell.name not in seen]
            seen |= {cell.name for cell in cells}
            if not cells:
                continue
            for job in self._before(head):
                jobs.setdefault(job.name, job)
            name, need = f"decode {head.domain} {head.name} for {arm}", f"train {head.domain} {head.name}"
            cells = [replace(cell, entropy=cell.name in watched) for cell in cells]
            jobs[name] = Job("decode", name, (need,), head.domain, head, tuple(cells))
        return list(jobs.values())

    def _before(self, head: Head) -> Iterator[Job]:
        domain = head.domain
        data, backbone, warm, own = (f"{what} {domain}" for what in ("data", "backbone", "warm head", "own samples"))
        yield Job("data", data, (), domain)
        yield Job("backbone", backbone, (data,), domain)
        needs = (backbone,)
        if head.start == "warm" or head.train_data == "own":
            yield Job("warm", warm, (backbone,), domain)
            needs = (warm,)
        if head.train_data == "own":
            yield Job("own", own, (warm,), domain)
            needs = (own,)
        yield Job("train", f"train {domain} {head.name}", needs, domain, head)

    def done(self, job: Job) -> bool:
        """Whether the job left everything it was to leave."""
        if job.kind == "decode":
            return all(self.cell(cell).is_file() for cell in job.cells)
        return (self._folder(job) / DONE).is_file()

    def _folder(self, job: Job) -> Path:
        if job.kind == "data":
            return self.data(job.domain)
        if job.kind == "own":
            return self.data(job.domain) / "own"
        name = job.head.name if job.head else job.kind
        return self.trained(job.domain, name)

    def work(self, job: Job) -> None:
        """Do the job, in a process of its own: Megatron's state is global."""
        if job.kind == "decode":
            self._decode(job)
            return
        folder, data = self._folder(job), self.data(job.domain)
        # what an interrupted job left is no start
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        if job.kind == "data":
            corpora.prepare(job.domain, folder, self.size, self.gsm8k)
        elif job.kind == "own":
            self._sample(job.domain, folder)
        else:
            self._train(job, folder, data)
        self._finish(folder)

    def _finish(self, folder: Path) -> None:
        from bebop_megatron.outputs import write_json

        write_json(folder / DONE, {"cpu_seconds": round(_cpu_seconds(), 1)})

    def _train(self, job: Job, folder: Path, data: Path) -> None:
        backbone, warm = self.trained(job.domain, "backbone"), self.trained(job.domain, "warm")
        start = warm if job.head and job.head.start == "warm" else backbone
        training.train(self.size, data, folder, kind=job.kind, backbone=backbone, start=start, head=job.head)

    def _sample(self, domain: str, folder: Path) -> None:
        from benchmarks.study.decoding import sample

        size = self.size
        # every sample is seen once an epoch, and a sequence needs one token more than it has anchors
        tokens = size.head_steps * size.batch * (size.sequence + 1) // size.own_epochs + 2 * size.sequence
        texts = sample(self.trained(domain, "warm"), self.data(domain), size, tokens)
        corpora.build_own(folder, texts, size.vocab_size)

    def _decode(self, job: Job) -> None:
        from bebop_megatron.outputs import write_json
        from benchmarks.study.decoding import measure

        assert job.head is not None
        missing = [cell for cell in job.cells if not self.cell(cell).is_file()]
        spent = 0.0
        for cell, measured in measure(
            self.trained(job.domain, job.head.name), self.data(job.domain), missing, self.size
        ):
            now = _cpu_seconds()
            write_json(self.cell(cell), measured | {"cpu_seconds": round(now - spent, 2)})
            spent = now

    def measured(self, cell: Cell) -> dict[str, Any] | None:
        """What a cell measured, if it has been."""
        file = self.cell(cell)
        return json.loads(file.read_text()) if file.is_file() else None


def _cpu_seconds() -> float:
    import resource

    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
