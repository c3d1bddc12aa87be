"""Keeps the checkpoint with the largest validation accept length in a folder of its own, complete at any time.

`<save>/best` is a checkpoint folder like `<save>` itself: `--load <save>/best` goes on from it, and evaluation and
export read it. It is written beside its place and moved there when it is whole, record included.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

FOLDER = "best"
RECORD = "accept_length.json"
# Megatron's arguments while the best checkpoint is saved: into its own folder, whole when the call returns
_ALONE = {"async_save": False, "save_retain_interval": None, "dataloader_save": None}


def _beside(folder: Path) -> tuple[Path, Path]:
    """Where the next one is written, and where the last one waits while they change places."""
    return folder.with_name(f"{folder.name}.partial"), folder.with_name(f"{folder.name}.old")


def read_record(save: str | Path) -> dict[str, Any] | None:
    """What is known of the best checkpoint below `save`; None if there is none.

    Also of one that a killed run had no time to move to its place.
    """
    folder = Path(save) / FOLDER
    for place in (folder, *_beside(folder)):
        if (place / RECORD).is_file():
            return json.loads((place / RECORD).read_text())
    return None


def check_keep_best(args: Any, has_objective: bool, conditions: dict[str, Any]) -> None:
    """Refuse `--mtp-keep-best` where it would never keep anything.

    Raises:
        ValueError: no objective, no `--save`, no validation data, or a best checkpoint measured under other conditions.
    """
    if not has_objective:
        raise ValueError("--mtp-keep-best needs --mtp-loss: Megatron's own MTP loss measures no accept length")
    if args.save is None:
        raise ValueError("--mtp-keep-best needs --save: the best checkpoint is kept below it")
    lacking = _without_validation(args)
    if lacking is not None:
        raise ValueError(f"--mtp-keep-best needs validation data: {lacking}")
    record = read_record(args.save)
    if record is not None and record["conditions"] != conditions:
        different = [name for name, value in record["conditions"].items() if conditions.get(name) != value]
        raise ValueError(
            f"{Path(args.save) / FOLDER} was measured with another {', '.join(different)}, and its accept length "
            f"{record['value']:.3f} cannot be compared: move the folder away, or give another --save"
        )


def _without_validation(args: Any) -> str | None:
    if not args.full_validation and not args.eval_iters:
        return "--eval-iters is 0"
    if not args.eval_interval:
        return "--eval-interval is 0"
    shares = [] if args.split is None else [float(share) for share in re.findall(r"[.0-9]+", args.split)]
    if args.split is not None and not any(shares[1:2]):
        return f"--split {args.split} leaves none"
    if args.train_data_path is not None and args.valid_data_path is None:
        return "--train-data-path comes without --valid-data-path"
    return None


class KeepBest:
    """Saves when the accept length of a validation pass is the largest so far, also across restarts."""

    def __init__(self, save: str | Path, conditions: dict[str, Any]) -> None:
        self.save = Path(save)
        self.conditions = conditions
        self._best: float | None = None
        self._started = False
        # accept length and iteration of the last validation, until it has been acted upon
        self._pending: tuple[float, int] | None = None
        # saves what the step that was last completed has left
        self._checkpoint: Callable[[], None] | None = None
        self._iteration = -1

    def measured(self, value: float | None, iteration: int) -> None:
        """Note the accept length of a validation pass, which the last rank knows.

        Collectives: one broadcast over the whole world, at the first call two.
        """
        self._start()
        shared = _broadcast(float("nan") if value is None else value, dist.get_world_size() - 1)
        if shared != shared:
            _say("warning: no chain of the validation data was complete, so its accept length is unknown")
        self._pending = None if shared != shared else (shared, iteration)

    def _start(self) -> None:
        if self._started:
            return
        self._started = True
        known = float("nan")
        if dist.get_rank() == 0:
            recover(self.save / FOLDER)
            record = read_record(self.save)
            known = float("nan") if record is None else float(record["value"])
        known = _broadcast(known, 0)
        self._best = None if known != known else known

    def checkpoint_due(self, step: Callable[..., Any], save: Callable[..., None]) -> Callable[..., Any]:
        """Around the function that follows each step and saves when it is time."""

        signature = inspect.signature(step)

        @functools.wraps(step)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            given = dict(signature.bind(*args, **kwargs).arguments)
            # a context of its own: the loop's remembers how its own checkpoints are written
            self._checkpoint = functools.partial(save, **(given | {"checkpointing_context": {}}))
            self._iteration = given["iteration"]
            self.save_if_better(given["iteration"])
            return step(*args, **kwargs)

        return wrapper

    def save_if_better(self, iteration: int) -> None:
        """Save now, if the last validation was at this iteration and its accept length is the largest."""
        pending, self._pending = self._pending, None
        if pending is None or self._checkpoint is None or not pending[1] == iteration == self._iteration:
            return
        if self._best is not None and pending[0] <= self._best:
            return
        self._save(*pending, self._checkpoint)
        self._best = pending[0]

    def _save(self, value: float, iteration: int, save: Callable[[], None]) -> None:
        from megatron.training import get_args

        args, folder = get_args(), self.save / FOLDER
        partial, _ = _beside(folder)
        if dist.get_rank() == 0:
            shutil.rmtree(partial, ignore_errors=True)
        dist.barrier(group=dist.group.WORLD)
        before = {name: getattr(args, name) for name in ("save", *_ALONE) if hasattr(args, name)}
        for name in before:
            setattr(args, name, str(partial) if name == "save" else _ALONE[name])
        try:
            save()
        finally:
            for name, own in before.items():
                setattr(args, name, own)
        if dist.get_rank() == 0:
            record = {
                "metric": "accept length on validation data, teacher-forced",
                "rule": "rejection",
                "value": value,
                "iteration": iteration,
                "conditions": self.conditions,
            }
            publish(partial, folder, record)
        dist.barrier(group=dist.group.WORLD)
        _say(f"best validation accept length so far, {value:.4f} at iteration {iteration}: kept in {folder}")


def publish(partial: Path, folder: Path, record: dict[str, Any]) -> None:
    """Complete `partial` with its record and put it in the place of `folder`."""
    _, old = _beside(folder)
    # the record is what says that everything else is there
    draft = partial / f"{RECORD}.tmp"
    with draft.open("w") as file:
        json.dump(record, file, indent=2)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(partial / RECORD)
    shutil.rmtree(old, ignore_errors=True)
    if folder.exists():
        folder.rename(old)
    partial.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def recover(folder: Path) -> None:
    """Finish or undo what a killed run was doing."""
    partial, old = _beside(folder)
    if not folder.exists():
        for place in (partial, old):
            if (place / RECORD).is_file():
                place.rename(folder)
                break
    for place in (partial, old):
        shutil.rmtree(place, ignore_errors=True)


def _broadcast(value: float, source: int) -> float:
    shared = torch.tensor([value], dtype=torch.float64, device=torch.cuda.current_device())
    dist.broadcast(shared, source, group=dist.group.WORLD)
    return float(shared)


def _say(message: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(f"bebop_megatron: {message}")
