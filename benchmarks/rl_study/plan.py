"""The study as data: arms, sizes, cells, and the command of a cell.

A cell is one run of `python -m bebop_megatron.rl`: an arm with a seed. All cells start from the same backbone, and see
the same problems in the same order for the same seed; cells go seed by seed, so that a run that is cut short has whole
comparisons.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.study import plan

DOMAIN = "arithmetic"
HEADS = ("ce", "tv")


@dataclass(frozen=True)
class Arm:
    """A head adapted before RL, the rule that verifies its drafts, and what RL does to it."""

    name: str
    head: str
    rule: str
    strategy: str = "frozen"


BASELINE = "no-mtp"
ARMS = (
    # its head is never run: the same checkpoint as rs-tv-frozen, so that the policies are equal to begin with
    Arm(BASELINE, "tv", "off"),
    Arm("to-ce", "ce", "target-only"),
    Arm("rs-ce", "ce", "rejection"),
    Arm("rs-tv-frozen", "tv", "rejection"),
    Arm("rs-tv-online-tv", "tv", "rejection", "online-tv"),
    Arm("rs-tv-online-ce", "tv", "rejection", "online-ce"),
)


@dataclass(frozen=True)
class Size:
    """How large everything is; `model` sizes backbone and heads as in the study of objectives."""

    model: plan.Size
    difficulty: str = "1"
    documents: int = 15_000
    slips: float = 0.2
    seeds: tuple[int, ...] = (1, 2)
    steps: int = 50
    groups: int = 8
    group_size: int = 8
    # few rows at a time, so that a decoding step costs about the same for one token and for four
    groups_per_rollout: int = 1
    max_new_tokens: int = 64
    gamma: int = 3
    temperature: float = 1.0
    lr: float = 3e-4
    mtp_lr: float = 3e-4
    entropy_bonus: float = 0.03
    micro_batch: int = 64
    staleness: int = 1
    # expected acceptance of both rules takes the worker's time, and times are what is compared
    probe: int = 0
    # of one cell; what takes longer is given up
    seconds: int = 600
    arms: tuple[str, ...] = field(default=tuple(arm.name for arm in ARMS))


FULL = Size(
    plan.Size(
        layers=10,
        hidden=96,
        ffn=288,
        vocab_size=352,
        # as long as the longest document: each is a sample of its own
        sequence=64,
        batch=16,
        backbone_steps=1000,
        warm_steps=150,
        head_steps=400,
        lr=3e-3,
        head_lr=1e-3,
    )
)
# the full study with the policy's entropy pushed up on purpose: does acceptance follow it. A bonus this large pays more
# for entropy than the task does for answers; that of the full study leaves entropy where it is
STRESS = replace(FULL, entropy_bonus=1.0, arms=("rs-ce", "rs-tv-frozen"))
QUICK = Size(
    plan.Size(
        layers=3,
        hidden=64,
        ffn=192,
        vocab_size=352,
        sequence=64,
        batch=16,
        backbone_steps=150,
        warm_steps=40,
        head_steps=40,
        lr=3e-3,
        head_lr=1e-3,
    ),
    documents=4_000,
    seeds=(1,),
    steps=6,
    groups=4,
    group_size=4,
    micro_batch=16,
    arms=(BASELINE, "rs-ce", "rs-tv-frozen"),
)


@dataclass(frozen=True)
class Cell:
    """An arm with a seed."""

    arm: Arm
    seed: int

    @property
    def name(self) -> str:
        """Folder of the cell."""
        return f"{self.arm.name}-seed{self.seed}"


def cells(size: Size) -> list[Cell]:
    """Every cell in the order of measuring."""
    return [Cell(arm, seed) for seed in size.seeds for arm in ARMS if arm.name in size.arms]


def task(size: Size) -> str:
    """The task, as the command line writes it."""
    return f"{DOMAIN}:difficulty={size.difficulty}"


def flags(size: Size, cell: Cell, *, checkpoint: Path, tokenizer: Path, output: Path) -> list[str]:
    """Arguments of `python -m bebop_megatron.rl`."""
    arm = cell.arm
    text = f"""--steps {size.steps} --seed {cell.seed} --groups {size.groups} --group-size {size.group_size}
    --groups-per-rollout {size.groups_per_rollout} --max-new-tokens {size.max_new_tokens} --gamma {size.gamma}
    --temperature {size.temperature} --rule {arm.rule} --mtp-strategy {arm.strategy} --staleness {size.staleness}
    --lr {size.lr} --entropy-bonus {size.entropy_bonus} --micro-batch-size {size.micro_batch} --probe {size.probe}
    --threads 1 --workers 1 --save-interval 0"""
    where = ["--load", str(checkpoint), "--tokenizer", str(tokenizer), "--output", str(output), "--task", task(size)]
    head = [] if arm.strategy == "frozen" else ["--mtp-lr", str(size.mtp_lr)]
    return [*where, *text.split(), *head]
