"""One frozen dataclass for a reinforcement-learning run; every field is a flag of `python -m bebop_megatron.rl`."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bebop_megatron.config import flag

RULES = ("rejection", "target-only", "off")
STRATEGIES = ("frozen", "online-tv", "online-ce", "joint", "alternating")
WEIGHTS = ("exact", "newest")
# what each strategy hands to the freeze schedule and the MTP loss
_SCHEDULES = {"frozen": "mtp", "alternating": "mtp:4,backbone:1"}
_LOSSES = {"online-tv": "tv", "online-ce": "ce", "joint": "tv", "alternating": "tv", "frozen": "tv"}


@dataclass(frozen=True)
class RLConfig:
    """What is trained on what, how rollouts are decoded, and how far they may lag behind.

    Raises:
        ValueError: a setting out of range, or two that do not go together.
    """

    load: str = flag("--load", "Megatron torch_dist checkpoint to start from.", "", type=str, metavar="DIR")
    task: str = flag(
        "--task",
        "Task, with its options: `arithmetic:difficulty=2`; one of your own: `module/Class:option=value` (docs/rl.md).",
        "",
        type=str,
    )
    output: str = flag(
        "--output", "Folder for steps.jsonl, trace.jsonl, rollouts and checkpoints.", "", type=str, metavar="DIR"
    )
    tokenizer: str | None = flag(
        "--tokenizer", "Hugging Face tokenizer. Default: the task's own tokens.", type=str, metavar="DIR"
    )
    steps: int = flag("--steps", "Optimizer steps in all; a resumed run counts those before.", 100, type=int)
    seed: int = flag("--seed", "Of problems and sampling.", 0, type=int)

    groups: int = flag("--groups", "Problems in a step.", 8, type=int)
    group_size: int = flag("--group-size", "Completions of each problem, whose rewards are compared.", 8, type=int)
    max_new_tokens: int = flag("--max-new-tokens", "Longest completion.", 64, type=int)
    temperature: float = flag("--temperature", "Of sampling, and of the policy that is trained.", 1.0, type=float)
    gamma: int = flag("--gamma", "Drafts per verification.", 3, type=int)
    rule: str = flag("--rule", "How drafts are verified; off decodes without drafts.", "rejection", choices=RULES)
    attention: str = flag(
        "--attention", "What draft steps 2, 3, ... see.", "chain", choices=("chain", "first-depth"), type=str
    )
    groups_per_rollout: int = flag("--groups-per-rollout", "Problems that a worker decodes together.", 4, type=int)
    probe: int = flag(
        "--probe",
        "Completions per rollout whose expected acceptance is computed under both rules; 0 for none.",
        4,
        type=int,
    )

    workers: int = flag("--workers", "Rollout workers.", 1, type=int)
    learner_processes: int = flag("--learner-processes", "Processes of the learner: TP x PP x DP.", 1, type=int)
    threads: int = flag("--threads", "CPU threads of each process.", 1, type=int)
    staleness: int = flag(
        "--staleness", "Steps by which the policy may be ahead of the one that a rollout came from.", 1, type=int
    )
    queue: int = flag(
        "--queue", "Groups at most that are decoded or waiting. 0: as many as --staleness allows.", 0, type=int
    )
    weights: str = flag(
        "--weights",
        "exact: a rollout uses the policy --staleness steps back, so that results do not depend on timing. newest: "
        "the newest there is.",
        "exact",
        choices=WEIGHTS,
    )
    reward_timeout: float = flag("--reward-timeout", "Seconds that one reward may take.", 5.0, type=float)

    lr: float = flag("--lr", "Learning rate of the policy.", 1e-4, type=float)
    clip_grad: float = flag("--clip-grad", "Gradient norm of the policy.", 1.0, type=float)
    micro_batch_size: int = flag("--micro-batch-size", "Completions in a forward pass of the learner.", 16, type=int)
    entropy_bonus: float = flag(
        "--entropy-bonus", "Weight of the policy's entropy, which is rewarded.", 0.0, type=float
    )
    kl: float = flag("--kl", "Weight of the KL to the policy that a rollout came from.", 0.0, type=float)
    truncation: float = flag(
        "--importance-truncation", "Largest importance weight of a token of a stale rollout.", 2.0, type=float
    )
    normalise: bool = flag(
        "--normalise",
        "Divide advantages by their group's standard deviation.",
        True,
        action=argparse.BooleanOptionalAction,
    )

    strategy: str = flag(
        "--mtp-strategy",
        "What happens to the MTP head: frozen; online-tv or online-ce, trained on every batch; joint, trained with "
        "TV, its own learning rate and gradient norm; alternating phases.",
        "frozen",
        choices=STRATEGIES,
    )
    mtp_loss: str | None = flag("--mtp-loss", "Another loss than the strategy's.", type=str)
    mtp_lr: float | None = flag("--mtp-lr", "Learning rate of the head. Default: --lr; joint needs it.", type=float)
    mtp_clip_grad: float | None = flag(
        "--mtp-clip-grad", "Gradient norm of the head. Default: --clip-grad.", type=float
    )
    mtp_schedule: str | None = flag(
        "--mtp-schedule",
        "Freeze schedule of the alternating strategy. Default: mtp:4,backbone:1 (four steps of the policy, then one "
        "of the head).",
        type=str,
    )

    save_interval: int = flag("--save-interval", "Steps between checkpoints; 0 saves at the end only.", 10, type=int)
    early_steps: int = flag(
        "--early-steps",
        "Steps on which acceptance is fitted to entropy, to split its later changes into entropy and mismatch.",
        10,
        type=int,
    )
    megatron: tuple[str, ...] = dataclasses.field(default=(), metadata={"flag": None})

    def __post_init__(self) -> None:
        for name, field in self._flags().items():
            value = getattr(self, name)
            choices = field.metadata.get("choices")
            if choices and value not in choices:
                raise ValueError(f"{field.metadata['flag']} must be one of {', '.join(choices)}, got {value!r}")
        self._check_ranges()
        if self.groups % self.groups_per_rollout:
            raise ValueError(
                f"--groups {self.groups} must be a multiple of --groups-per-rollout {self.groups_per_rollout}"
            )
        if self.queue and self.queue < self.groups:
            raise ValueError(f"--queue {self.queue} cannot hold the {self.groups} groups of a step: raise it")
        if self.batch_size % self.micro_batch_size:
            raise ValueError(
                f"--micro-batch-size {self.micro_batch_size} must divide the {self.batch_size} completions of a step "
                "(--groups times --group-size)"
            )
        if self.group_size < 2:
            raise ValueError("--group-size must be at least 2: advantages compare completions of one problem")
        if self.strategy == "joint" and self.mtp_lr is None:
            raise ValueError("--mtp-strategy joint gives the head its own learning rate: add --mtp-lr")
        if self.strategy == "frozen" and (self.mtp_lr or self.mtp_clip_grad or self.mtp_loss):
            raise ValueError("--mtp-lr, --mtp-clip-grad and --mtp-loss have no effect with --mtp-strategy frozen")
        if self.mtp_schedule is not None and self.strategy != "alternating":
            raise ValueError("--mtp-schedule belongs to --mtp-strategy alternating")

    def _check_ranges(self) -> None:
        least: dict[str, float] = {
            "steps": 1,
            "groups": 1,
            "group_size": 1,
            "max_new_tokens": 1,
            "gamma": 1,
            "groups_per_rollout": 1,
            "probe": 0,
            "workers": 1,
            "learner_processes": 1,
            "threads": 1,
            "staleness": 0,
            "queue": 0,
            "micro_batch_size": 1,
            "save_interval": 0,
            "early_steps": 2,
            "entropy_bonus": float("-inf"),
            "kl": 0,
            "truncation": 1,
        }
        fields = self._flags()
        for name, bound in least.items():
            if not getattr(self, name) >= bound:
                raise ValueError(f"{fields[name].metadata['flag']} must be at least {bound}, got {getattr(self, name)}")
        for name in ("temperature", "lr", "reward_timeout"):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{fields[name].metadata['flag']} must be positive, got {getattr(self, name)}")

    @classmethod
    def _flags(cls) -> dict[str, dataclasses.Field[Any]]:
        return {field.name: field for field in dataclasses.fields(cls) if field.metadata.get("flag")}

    @property
    def drafts(self) -> int:
        """Drafts per verification; none with the rule `off`."""
        return 0 if self.rule == "off" else self.gamma

    @property
    def rollouts_per_step(self) -> int:
        """Calls of the decoder that a step needs."""
        return self.groups // self.groups_per_rollout

    @property
    def batch_size(self) -> int:
        """Completions in a step."""
        return self.groups * self.group_size

    @property
    def freeze_schedule(self) -> str | None:
        """What is frozen when, for the learner."""
        return self.mtp_schedule or _SCHEDULES.get(self.strategy)

    @property
    def head_loss(self) -> str:
        """What the head is trained on."""
        return self.mtp_loss or _LOSSES[self.strategy]

    @classmethod
    def from_arguments(cls, argv: Sequence[str]) -> RLConfig:
        """Read a command line; what stands behind `--` goes to Megatron.

        Raises:
            ValueError: as the constructor; what has to be given is missing.
        """
        own, megatron = list(argv), []
        if "--" in own:
            at = own.index("--")
            own, megatron = own[:at], own[at + 1 :]
        parser = argparse.ArgumentParser(
            prog="python -m bebop_megatron.rl",
            description="Asynchronous GRPO with speculative rollouts. Arguments of Megatron for the learner follow --.",
        )
        for name, field in cls._flags().items():
            options = {key: value for key, value in field.metadata.items() if key not in ("flag", "help")}
            text = field.metadata["help"].replace("%", "%%")
            if field.default not in (None, "") and "action" not in options:
                text += f" ({field.default})"
            parser.add_argument(field.metadata["flag"], dest=name, default=field.default, help=text, **options)
        config = cls(**vars(parser.parse_args(own)), megatron=tuple(megatron))
        for name in ("load", "task", "output"):
            if not getattr(config, name):
                raise ValueError(f"--{name} is missing")
        return config
