"""The files of a run: one line for each step, one for each thing that an actor did, and which checkpoint counts."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bebop_megatron.entropy import fit_line, split_change
from bebop_megatron.outputs import hold, read_json, write_json, write_text
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.records import Event, LineFile, Rollout

_TRACKER = "latest_checkpointed_iteration.txt"


class Journal:
    """What a run writes into its output folder besides rollouts.

    Raises:
        ValueError: the folder holds a run with other settings, or one that is still running.
    """

    def __init__(self, config: RLConfig) -> None:
        self.config, self.folder = config, Path(config.output)
        # a second run would cut this one's lines and remove its newest checkpoint
        self._held = hold(self.folder, f"--output {self.folder}")
        self._check_settings()
        self.steps, self.trace = LineFile(self.folder / "steps.jsonl"), LineFile(self.folder / "trace.jsonl")
        self.rows: list[dict[str, Any]] = []

    def _check_settings(self) -> None:
        """Settings that may change when a run goes on: its length, and how it is spread over processes."""
        free = {"steps", "workers", "threads", "save_interval", "reward_timeout", "output"}
        path = self.folder / "config.json"
        now = json.loads(json.dumps(dataclasses.asdict(self.config)))
        if path.is_file():
            before = read_json(path)
            changed = sorted(name for name in now if name not in free and now[name] != before.get(name))
            if changed:
                raise ValueError(
                    f"{self.folder} holds a run with other settings ({', '.join(changed)}): choose another --output, "
                    "or remove it"
                )
        # not write_json: an option may be infinite, and is compared when the run goes on
        write_text(path, json.dumps(now, indent=1))

    def resume_step(self) -> int:
        """Completed steps of the checkpoint to go on from; 0 where there is none.

        Lines of later steps are cut off, later checkpoints removed.
        """
        marker = self.folder / "committed.json"
        step = read_json(marker)["step"] if marker.is_file() else 0
        self.rows = self.steps.cut(step)
        self.trace.cut(step)
        for path in self._checkpoints():
            if _iteration(path) > step:
                shutil.rmtree(path)
        if step:
            (self.folder / "checkpoints" / _TRACKER).write_text(str(step))
        return step

    def commit(self, step: int) -> None:
        """From now on a run resumes behind `step` completed steps; older checkpoints are not needed any more."""
        write_json(self.folder / "committed.json", {"step": step})
        for path in self._checkpoints():
            if _iteration(path) < step:
                shutil.rmtree(path)

    def _checkpoints(self) -> list[Path]:
        return sorted((self.folder / "checkpoints").glob("iter_*"))

    def record(self, *events: Event) -> None:
        """Add to the trace."""
        self.trace.append(*(dataclasses.asdict(event) for event in events))

    def write_step(self, row: dict[str, Any]) -> dict[str, Any]:
        """Add a step, with the two parts of the change of acceptance; returns the row."""
        self.rows.append(row)
        row |= self._parts(row)
        self.steps.append(row)
        return row

    def _parts(self, row: dict[str, Any]) -> dict[str, float | None]:
        """How much of the accept length's change since the early steps entropy explains, and the rest."""
        early = [(r["entropy"], r["accept_length"]) for r in self.rows[: self.config.early_steps]]
        nothing: dict[str, float | None] = {"entropy_part": None, "mismatch_part": None}
        if row["accept_length"] is None or len(early) < self.config.early_steps or len(self.rows) <= len(early):
            return nothing
        line = fit_line(early)
        if line is None:
            return nothing
        start = (sum(h for h, _ in early) / len(early), sum(a for _, a in early) / len(early))
        split = split_change(line.slope, start, (row["entropy"], row["accept_length"]))
        return {"entropy_part": split.entropy_part, "mismatch_part": split.mismatch_part}


def _iteration(path: Path) -> int:
    return int(path.name.removeprefix("iter_"))


def step_row(
    config: RLConfig, step: int, rollouts: Sequence[Rollout], trained: dict[str, Any], seconds: float
) -> dict[str, Any]:
    """The line of a step: acceptance of the drafts that were decoded; `expected`, of both rules on a probe."""
    groups = [group for rollout in rollouts for group in rollout.groups]
    rewards = [reward for group in groups for reward in group.rewards]
    tokens = sum(rollout.num_tokens for rollout in rollouts)
    decoding = sum(rollout.seconds for rollout in rollouts) / config.workers
    accepted = [sum(column) for column in zip(*(rollout.accepted for rollout in rollouts), strict=True)]
    verifications = sum(rollout.reached[0] for rollout in rollouts if rollout.reached)
    drafted = len(accepted) * verifications
    values = trained["values"]
    return {
        "step": step,
        "reward": sum(rewards) / len(rewards),
        "mixed_groups": sum(max(group.rewards) > min(group.rewards) for group in groups) / len(groups),
        "entropy": values["entropy"],
        "rule": config.rule,
        "gamma": config.drafts,
        "accept_length": 1 + sum(accepted) / verifications if verifications else None,
        "accept_rate": sum(accepted) / drafted if drafted else None,
        "expected": _expected(config, rollouts),
        "rollout_seconds": decoding,
        "learner_seconds": trained["seconds"],
        "step_seconds": seconds,
        "tokens": tokens,
        "tokens_per_second": tokens / decoding if decoding > 0 else None,
        "completion_tokens": tokens / len(rewards),
        "staleness": sum(step - rollout.version for rollout in rollouts) / len(rollouts),
        "failed_rewards": sum(rollout.failed_rewards for rollout in rollouts),
        "reward_error": next((rollout.reward_error for rollout in rollouts if rollout.failed_rewards), None),
        "grad_norm": trained["grad_norm"],
        **{name: values.get(name) for name in ("loss", "importance", "truncated", "kl", "mtp_loss")},
    }


def _expected(config: RLConfig, rollouts: Sequence[Rollout]) -> dict[str, Any] | None:
    probes = [rollout.probe for rollout in rollouts if rollout.probe is not None]
    anchors = sum(probe.anchors for probe in probes)
    if not anchors:
        return None
    sums = {rule: sum(probe.accepted[rule] for probe in probes) for rule in probes[0].accepted}
    return {
        "anchors": anchors,
        "entropy": sum(probe.entropy for probe in probes) / anchors,
        "accept_length": {rule: 1 + total / anchors for rule, total in sums.items()},
        "accept_rate": {rule: total / anchors / config.gamma for rule, total in sums.items()},
    }
