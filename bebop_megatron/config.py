"""One frozen dataclass per component. Every field is also a command-line flag: see `mcore/arguments.py`."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from bebop_megatron.losses import OBJECTIVES
from bebop_megatron.losses.backend import BACKENDS
from bebop_megatron.losses.options import Options
from bebop_megatron.losses.prefix import HORIZONS
from bebop_megatron.schedule.phases import FreezeSchedule


def flag(name: str, help: str, default: Any = None, **metadata: Any) -> Any:
    """A dataclass field that appears on the command line as `name`."""
    return field(default=default, metadata={"flag": name, "help": help, **metadata})


def given(config: Any) -> list[str]:
    """Flags of one of the dataclasses below that have another value than their default."""
    return [f.metadata["flag"] for f in fields(config) if getattr(config, f.name) != f.default]


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the MTP head is trained on.

    Raises:
        ValueError: an unknown name, a value out of range, a combination that makes no sense, a setting without a loss.
    """

    loss: str | None = flag(
        "--mtp-loss",
        "Objective of the MTP head: {losses}. `tv` is the end-to-end total-variation loss. Detaches the heads from "
        "the backbone unless --mtp-joint is given. Without this flag Megatron's own MTP loss is used.",
        type=str,
    )
    temperature: float = flag(
        "--mtp-loss-temperature", "Temperature of both distributions inside the MTP loss.", 1.0, type=float
    )
    draft_temperature: float | None = flag(
        "--mtp-draft-temperature", "Temperature of the draft alone. Default: --mtp-loss-temperature.", type=float
    )
    target_temperature: float | None = flag(
        "--mtp-target-temperature", "Temperature of the target alone. Default: --mtp-loss-temperature.", type=float
    )
    target_top_p: float = flag(
        "--mtp-target-top-p",
        "Train for a target that is served with this top-p. Costs some forty small all-reduces a chunk.",
        1.0,
        type=float,
    )
    target_top_k: int = flag("--mtp-target-top-k", "Train for a target that is served with this top-k.", 0, type=int)
    truncate_top_k: int = flag(
        "--mtp-loss-truncate-top-k",
        "Restrict both distributions inside the MTP loss to the target's K likeliest tokens. For experiments: the "
        "Bebop paper reports that even K = 20,000 slows convergence and that smaller K gives loss spikes, and it "
        "saves no memory here. Default: 0, the full vocabulary.",
        0,
        type=int,
    )
    warmup: str | None = flag(
        "--mtp-loss-warmup",
        "Begin with another loss and hand over to --mtp-loss linearly, for example kl:500 (iterations from 0): the "
        "gradient of total variation vanishes while a head is cold. Meanwhile each chunk costs one more product.",
        type=str,
    )
    backend: str = flag(
        "--mtp-loss-backend",
        "Row statistics of the MTP loss in Triton (CUDA only) or PyTorch; auto takes Triton on a GPU.",
        "auto",
        type=str,
        choices=BACKENDS,
    )
    horizon: str | None = flag(
        "--mtp-loss-horizon",
        "Which anchors count: `full` (the whole chain of depths is valid), `partial` (the valid prefix of it), "
        "`per-depth` (every depth averages over its own anchors; not for tv). "
        "Default: per-depth for ce, full otherwise.",
        type=str,
        choices=HORIZONS,
    )
    joint: bool = flag(
        "--mtp-joint",
        "Let the gradient of the MTP loss into the backbone, the embedding and the LM head.",
        False,
        action="store_true",
    )

    def __post_init__(self) -> None:
        if self.loss is None:
            if given(self):
                named = ", ".join(given(self))
                raise ValueError(f"{named}: no effect on Megatron's own MTP loss, give --mtp-loss as well")
            return
        if self.loss not in OBJECTIVES:
            raise ValueError(f"unknown MTP loss {self.loss!r}: choose one of {', '.join(sorted(OBJECTIVES))}")
        if not self.temperature > 0:
            raise ValueError(f"--mtp-loss-temperature must be positive, got {self.temperature}")
        # the objective's own checks, in its own words
        Options(**self.keywords(0))

    @property
    def resolved_horizon(self) -> str:
        """The horizon in force: the one asked for, or the objective's default."""
        return self.horizon or ("per-depth" if self.loss == "ce" else "full")

    def keywords(self, iteration: int) -> dict[str, Any]:
        """What `fused_linear_objective` is told, in the step that follows `iteration` completed ones."""
        return {"kind": self.loss, "mix": self._mix(iteration), **self._settings()}

    def final_keywords(self) -> dict[str, Any]:
        """The same once a warm-up is over: validation curves are of one loss throughout."""
        return {"kind": self.loss, "mix": None, **self._settings()}

    def needs_target(self, iteration: int) -> bool:
        """Whether the loss itself compares with the target in the step that follows `iteration` completed ones."""
        return Options(**self.keywords(iteration)).needs_target

    def _mix(self, iteration: int) -> tuple[str, float] | None:
        if self.warmup is None:
            return None
        other, steps = _parse_warmup(self.warmup)
        share = 1 - iteration / steps
        return (other, share) if share > 0 else None

    def _settings(self) -> dict[str, Any]:
        return {
            "draft_temperature": self.temperature if self.draft_temperature is None else self.draft_temperature,
            "target_temperature": self.temperature if self.target_temperature is None else self.target_temperature,
            "target_top_p": self.target_top_p,
            "target_top_k": self.target_top_k,
            "truncate_top_k": self.truncate_top_k,
            "horizon": self.resolved_horizon,
            "backend": self.backend,
        }


def _parse_warmup(text: str) -> tuple[str, int]:
    kind, colon, steps = text.partition(":")
    if kind not in OBJECTIVES or not colon or not steps.isdigit() or int(steps) == 0:
        raise ValueError(
            f"--mtp-loss-warmup {text!r}: expected loss:iterations, for example kl:500, with a loss out of "
            f"{', '.join(sorted(OBJECTIVES))}"
        )
    return kind, int(steps)


MTP_ATTENTION = ("per-depth", "chain", "first-depth")


@dataclass(frozen=True)
class AttentionConfig:
    """Which keys the MTP head's later draft steps attend to.

    Raises:
        ValueError: an unknown mode.
    """

    mode: str | None = flag(
        "--mtp-attention",
        "What draft step i at anchor t attends to: `per-depth`, the keys of step i at anchors up to t (Megatron's); "
        "`chain`, the keys of step 1 up to t and its own of steps 2..i, as vLLM and SGLang serve; `first-depth`, the "
        "keys of step 1 only. The last two work at rotary position t+i-1. Default: per-depth, or chain with a preset "
        "of --spec bebop_megatron.mcore.spec.",
        type=str,
    )

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in MTP_ATTENTION:
            raise ValueError(f"unknown MTP attention {self.mode!r}: choose one of {', '.join(MTP_ATTENTION)}")


@dataclass(frozen=True)
class FreezeConfig:
    """What is frozen, and for how long; what the MTP head's optimizer does differently from the backbone's.

    Raises:
        ValueError: the schedule does not parse, a rate, count or norm that makes no sense.
    """

    schedule: str | None = flag(
        "--mtp-freeze-schedule",
        "What is frozen, for how many iterations: `backbone:1000,mtp:200,none:100` repeats, `backbone` alone adapts "
        "the MTP head to a fixed model. An entry may name its MTP loss: `backbone:1000@tv`.",
        type=str,
    )
    lr: float | None = flag(
        "--mtp-lr", "Peak learning rate of the MTP head. Default: the main learning rate.", type=float
    )
    lr_schedule: str = flag(
        "--mtp-lr-schedule",
        "Whether the MTP head's learning rate has the shape of the main schedule or stays constant.",
        "follow",
        type=str,
        choices=("follow", "constant"),
    )
    lr_warmup_iters: int = flag(
        "--mtp-lr-warmup-iters",
        "Warm-up of the MTP head, counted in optimizer steps of the head, on top of the main schedule.",
        0,
        type=int,
    )
    clip_grad: float | None = flag(
        "--mtp-clip-grad", "Gradient norm to which a detached MTP head is clipped. Default: --clip-grad.", type=float
    )
    phase_reset_moments: bool = flag(
        "--mtp-phase-reset-moments",
        "Zero the MTP head's Adam moments and step count at the start of each phase in which it trains.",
        False,
        action="store_true",
    )

    def __post_init__(self) -> None:
        if self.schedule is not None:
            FreezeSchedule.parse(self.schedule)
        if self.lr is not None and not self.lr > 0:
            raise ValueError(f"--mtp-lr must be positive, got {self.lr}")
        if self.lr_schedule not in ("follow", "constant"):
            raise ValueError(f"--mtp-lr-schedule must be follow or constant, got {self.lr_schedule!r}")
        if self.lr_warmup_iters < 0:
            raise ValueError(f"--mtp-lr-warmup-iters must not be negative, got {self.lr_warmup_iters}")
        if self.clip_grad is not None and not self.clip_grad > 0:
            raise ValueError(f"--mtp-clip-grad must be positive, got {self.clip_grad}")
        if self.phase_reset_moments and self.schedule is None:
            raise ValueError("--mtp-phase-reset-moments has no effect without --mtp-freeze-schedule")

    @property
    def parsed_schedule(self) -> FreezeSchedule:
        """The schedule; without one nothing is ever frozen."""
        return FreezeSchedule.parse(self.schedule or "none")

    @property
    def by_parts(self) -> bool:
        """Whether backbone and MTP head need an optimizer that treats them apart."""
        return self != FreezeConfig()


METRICS = ("off", "summary", "full")


@dataclass(frozen=True)
class MetricsConfig:
    """What is measured of the MTP head on training and validation batches, and what becomes of it.

    Raises:
        ValueError: an unknown level, the best head wanted without measuring, an early phase of no length.
    """

    level: str = flag(
        "--mtp-metrics",
        "What is logged of the MTP head besides its loss, on training and validation data: `off`; `summary`: accept "
        "lengths, entropies and the slope of acceptance over entropy; `full`: each depth and prefix under each rule "
        "and the binned curve as well. Measured from what the loss knows; for ce it costs one LM-head product more.",
        "summary",
        type=str,
        choices=METRICS,
    )
    keep_best: bool = flag(
        "--mtp-keep-best",
        "Keep the checkpoint with the largest accept length on validation data (rejection rule) in the folder best "
        "below --save, beside the others. Needs --mtp-loss, --save and validation data.",
        False,
        action="store_true",
    )
    entropy_baseline: int = flag(
        "--mtp-entropy-baseline",
        "Log intervals of the early phase: later changes of acceptance are split into what the line of acceptance over "
        "entropy, fitted on this phase, explains, and the rest.",
        10,
        type=int,
    )

    def __post_init__(self) -> None:
        if self.level not in METRICS:
            raise ValueError(f"--mtp-metrics must be one of {', '.join(METRICS)}, got {self.level!r}")
        if self.keep_best and self.level == "off":
            raise ValueError("--mtp-keep-best needs the accept length: drop --mtp-metrics off")
        if self.entropy_baseline < 1:
            raise ValueError(f"--mtp-entropy-baseline must be positive, got {self.entropy_baseline}")

    @property
    def measures(self) -> bool:
        """Whether anything beyond the loss is measured."""
        return self.level != "off"

    @property
    def full(self) -> bool:
        """Whether each depth is logged on its own."""
        return self.level == "full"
