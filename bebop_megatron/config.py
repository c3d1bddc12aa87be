"""One frozen dataclass per component. Every field is also a command-line flag: see `mcore/arguments.py`."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from bebop_megatron.losses import OBJECTIVES
from bebop_megatron.losses.prefix import HORIZONS


def flag(name: str, help: str, default: Any = None, **metadata: Any) -> Any:
    """A dataclass field that appears on the command line as `name`."""
    return field(default=default, metadata={"flag": name, "help": help, **metadata})


@dataclass(frozen=True)
class ObjectiveConfig:
    """What the MTP head is trained on.

    Raises:
        ValueError: an unknown loss or horizon, a temperature that is not positive, `tv` with `per-depth`.
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
            if self.joint:
                raise ValueError("--mtp-joint has no effect without --mtp-loss: Megatron's own MTP loss is joint")
            return
        if self.loss not in OBJECTIVES:
            raise ValueError(f"unknown MTP loss {self.loss!r}: choose one of {', '.join(sorted(OBJECTIVES))}")
        if not self.temperature > 0:
            raise ValueError(f"--mtp-loss-temperature must be positive, got {self.temperature}")
        if self.horizon is not None and self.horizon not in HORIZONS:
            raise ValueError(f"unknown horizon {self.horizon!r}: choose one of {', '.join(HORIZONS)}")
        if self.loss == "tv" and self.horizon == "per-depth":
            raise ValueError(
                "--mtp-loss tv is a product over depths and has no per-depth horizon: use full or partial, "
                "or --mtp-loss tv-step for the loss of each depth on its own"
            )

    @property
    def resolved_horizon(self) -> str:
        """The horizon in force: the one asked for, or the objective's default."""
        return self.horizon or ("per-depth" if self.loss == "ce" else "full")


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
    """What is frozen, and for how long.

    Raises:
        ValueError: the schedule does not parse.
    """

    schedule: str | None = flag(
        "--mtp-freeze-schedule",
        "What is frozen, for how many iterations: `backbone` alone adapts the MTP head to a fixed model.",
        type=str,
    )

    def __post_init__(self) -> None:
        if self.schedule is not None:
            from bebop_megatron.schedule.phases import FreezeSchedule

            FreezeSchedule.parse(self.schedule)
