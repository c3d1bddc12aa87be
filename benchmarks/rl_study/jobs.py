"""The study's jobs: text and backbone, a warm head, two heads adapted before RL, then a run for each arm and seed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.rl_study import plan
from benchmarks.rl_study.plan import DOMAIN, HEADS, Cell, Size
from benchmarks.study import training
from benchmarks.study.jobs import DONE, Job, claim
from benchmarks.study.plan import Head

STEPS, TRACE = "steps.jsonl", "trace.jsonl"
_PATIENCE_SECONDS = 30
# settings that texts, backbone and heads depend on
_MADE_OF = ("model", "difficulty", "documents", "slips")
# what torchrun would set, and a process of its own must not find
_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class RLStudy:
    """A study in its folder: everything that is there already is not made again.

    `running` chooses between its two halves: trainings, which may go side by side, and cells, each of which has the
    machine for itself because its times count.

    Raises:
        ValueError: the folder holds a study of other sizes.
    """

    output: Path
    size: Size
    running: bool = False

    def __post_init__(self) -> None:
        claim(self.output, self.size)

    @property
    def cells(self) -> list[Cell]:
        """Every cell in the order of measuring."""
        return plan.cells(self.size)

    @property
    def data(self) -> Path:
        """Folder of the task's texts."""
        return self.output / "data"

    def trained(self, name: str) -> Path:
        """Folder of a checkpoint."""
        return self.output / "trained" / name

    def cell(self, cell: Cell) -> Path:
        """Folder of a run."""
        return self.output / "cells" / cell.name

    def jobs(self) -> list[Job]:
        """Every job of this half, each after those it needs."""
        if self.running:
            return [Job("rl", cell.name) for cell in self.cells]
        jobs = [Job("data", "data"), Job("backbone", "backbone", ("data",)), Job("warm", "warm head", ("backbone",))]
        # later draft steps attend to what they attend to when they are decoded
        heads = [Head(DOMAIN, loss, train_attention="chain") for loss in HEADS]
        return jobs + [Job("train", f"head {head.loss}", ("warm head",), DOMAIN, head) for head in heads]

    def done(self, job: Job) -> bool:
        """Whether the job left everything it was to leave."""
        return (self._folder(job) / DONE).is_file()

    def _folder(self, job: Job) -> Path:
        if job.kind == "rl":
            return self.cell(self._cell(job))
        if job.kind == "data":
            return self.data
        return self.trained(job.head.loss if job.head else job.kind)

    def _cell(self, job: Job) -> Cell:
        return next(cell for cell in self.cells if cell.name == job.name)

    def work(self, job: Job) -> None:
        """Do the job, in a process of its own: Megatron's state is global."""
        from bebop_megatron.outputs import write_json

        folder = self._folder(job)
        if job.kind == "rl":
            self._run(self._cell(job), folder)
        else:
            # what an interrupted job left is no start
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
            if job.kind == "data":
                self._write_data(folder)
            else:
                self._train(job, folder)
        write_json(folder / DONE, {"job": job.name})

    def _write_data(self, folder: Path) -> None:
        from bebop_megatron.rl.corpus import write_corpus
        from bebop_megatron.rl.tasks import make_task

        size = self.size
        write_corpus(
            make_task(plan.task(size)),
            folder,
            documents=size.documents,
            slips=size.slips,
            vocab_size=size.model.vocab_size,
            pad_to=size.model.sequence,
        )

    def _train(self, job: Job, folder: Path) -> None:
        backbone, warm = self.trained("backbone"), self.trained("warm")
        training.train(self.size.model, self.data, folder, kind=job.kind, backbone=backbone, start=warm, head=job.head)

    def command(self, cell: Cell) -> list[str]:
        """What runs a cell."""
        places = {"checkpoint": self.trained(cell.arm.head), "tokenizer": self.data / "tokenizer"}
        flags = plan.flags(self.size, cell, **places, output=self.cell(cell))
        return [sys.executable, "-m", "bebop_megatron.rl", *flags]

    def _run(self, cell: Cell, folder: Path) -> None:
        """Run the cell; one that was interrupted goes on from its last checkpoint, or starts again."""
        folder.mkdir(parents=True, exist_ok=True)
        environment = {name: value for name, value in os.environ.items() if name not in _LAUNCHER}
        # the run is its own process: this one has a Megatron that was made for training. It is the only one that we
        # tell to end, and ends what it started; what is told to all of our group must not reach that as well
        process = subprocess.Popen(self.command(cell), env=environment, start_new_session=True)
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            code = process.wait(self.size.seconds)
        except subprocess.TimeoutExpired:
            raise SystemExit(f"the run took more than {self.size.seconds} seconds") from None
        finally:
            signal.signal(signal.SIGTERM, before)
            process.terminate()
            try:
                process.wait(_PATIENCE_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
        if code:
            raise SystemExit(f"the run ended with {code}")
        found = len(read_lines(folder / STEPS))
        if found != self.size.steps:
            raise SystemExit(f"{folder / STEPS} has {found} steps of {self.size.steps}")


def adopt(study: RLStudy, other: Path) -> None:
    """Copy texts, backbone and heads of another study if they are what this one would make, and it has none yet."""
    settings = other / "settings.json"
    if not settings.is_file() or (study.output / "trained").exists():
        return
    found, wanted = json.loads(settings.read_text()), json.loads(json.dumps(asdict(study.size)))
    done = [other / "data" / DONE, *(other / "trained" / name / DONE for name in ("backbone", "warm", *HEADS))]
    if all(found.get(name) == wanted[name] for name in _MADE_OF) and all(file.is_file() for file in done):
        for name in ("data", "trained"):
            shutil.copytree(other / name, study.output / name)


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Objects of a file of JSON lines; none if it is not there. A last line that was cut off does not count."""
    if not file.is_file():
        return []
    text = file.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines() if line.strip()]
