"""The study as data: which heads are trained, which cells are measured with them, and in which order.

A cell is one number: a head, decoded under one rule and one setting. The main table comes first, so that a run that is
cut short has it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

RULES = ("rejection", "target-only")
REPEATED = ("ce", "kl", "tv-step", "tv")
SINGLE = ("reverse-kl", "lk", "lk-hybrid")
SWEPT = ("ce", "kl", "tv")


@dataclass(frozen=True)
class Size:
    """How large everything is."""

    layers: int = 4
    hidden: int = 128
    ffn: int = 384
    vocab_size: int = 2048
    sequence: int = 256
    batch: int = 8
    backbone_steps: int = 600
    warm_steps: int = 200
    head_steps: int = 140
    train_k: int = 3
    gamma: int = 3
    lr: float = 3e-3
    head_lr: float = 1e-3
    seeds: tuple[int, ...] = (1, 2, 3)
    losses: tuple[str, ...] = REPEATED
    single: tuple[str, ...] = SINGLE
    prompts: int = 192
    prompt_tokens: int = 64
    new_tokens: int = 128
    decode_batch: int = 192
    temperatures: tuple[float, ...] = (0.1, 0.4, 0.7, 1.0, 1.3)
    depths: tuple[int, ...] = (1, 3, 5)
    gammas: tuple[int, ...] = (1, 3, 5)
    serving_temperature: float = 0.6
    arms: tuple[str, ...] = ("temperature", "depth", "attention", "cold", "serving", "own")
    holdout: float = 0.04
    own_epochs: int = 2
    corpus_bytes: int | None = None


FULL = Size()
QUICK = Size(
    layers=2,
    hidden=96,
    ffn=256,
    vocab_size=1024,
    sequence=128,
    batch=8,
    backbone_steps=120,
    warm_steps=40,
    head_steps=40,
    seeds=(1, 2),
    losses=("ce", "kl", "tv"),
    single=(),
    prompts=64,
    prompt_tokens=32,
    new_tokens=64,
    decode_batch=64,
    temperatures=(0.4, 1.0),
    depths=(1, 3),
    gammas=(1, 3),
    arms=("temperature", "depth", "attention", "cold"),
    corpus_bytes=3_000_000,
)


@dataclass(frozen=True)
class Head:
    """An MTP head and how it was trained, on a frozen backbone. `start` is warm, or cold: as initialised."""

    domain: str
    loss: str
    seed: int = 1
    train_k: int = 3
    train_attention: str = "per-depth"
    train_temperature: float = 1.0
    train_data: str = "corpus"
    start: str = "warm"
    warmup: str | None = None

    @property
    def name(self) -> str:
        """Folder of the head, without its domain."""
        default = Head(self.domain, self.loss, train_k=self.train_k)
        parts = [self.loss, f"seed{self.seed}", f"k{self.train_k}"]
        for field in ("train_attention", "train_temperature", "train_data", "start"):
            if getattr(self, field) != getattr(default, field):
                parts.append(str(getattr(self, field)))
        if self.warmup:
            parts.append(f"after-{self.warmup.replace(':', '')}")
        return "-".join(parts)


@dataclass(frozen=True)
class Cell:
    """One measurement. `entropy`: also the target's entropy at every draft step that was reached."""

    arm: str
    head: Head
    rule: str
    gamma: int = 3
    temperature: float = 1.0
    attention: str = "chain"
    entropy: bool = False

    @property
    def name(self) -> str:
        """Name of the cell's file; cells of several arms that are the same measurement share it."""
        setting = f"{self.rule}-g{self.gamma}-t{self.temperature:g}-{self.attention}"
        return f"{self.head.domain}/{self.head.name}/{setting}"

    @property
    def fields(self) -> dict[str, Any]:
        """What the result says about its conditions."""
        of_head = asdict(self.head)
        setting = {"arm": self.arm, "domain": of_head.pop("domain"), "loss": of_head.pop("loss")}
        setting |= {"seed": of_head.pop("seed"), "rule": self.rule, "gamma": self.gamma}
        return setting | {"temperature": self.temperature, "attention": self.attention} | of_head | {"filters": "none"}


def _both_rules(cell: Cell) -> list[Cell]:
    return [replace(cell, rule=rule) for rule in RULES]


def main_cells(size: Size, domain: str) -> list[Cell]:
    """The table: every loss under both rules; seed by seed, so that whole columns come first."""
    cells = []
    for seed in size.seeds:
        losses = size.losses + (size.single if seed == size.seeds[0] else ())
        for loss in losses:
            head = Head(domain, loss, seed, size.train_k)
            entropy = loss in SWEPT and seed == size.seeds[0]
            cells += _both_rules(Cell("main", head, "", size.gamma, entropy=entropy))
    return cells


def temperature_cells(size: Size, domain: str) -> list[Cell]:
    """Serving temperature, by loss and rule, with the slopes of acceptance against the target's entropy."""
    return [
        cell
        for loss in SWEPT
        for temperature in size.temperatures
        for cell in _both_rules(
            Cell(
                "temperature",
                Head(domain, loss, size.seeds[0], size.train_k),
                "",
                size.gamma,
                temperature,
                entropy=True,
            )
        )
    ]


def depth_cells(size: Size, domain: str) -> list[Cell]:
    """Depths trained against drafts used; `tv`, rejection."""
    heads = [Head(domain, "tv", size.seeds[0], depth) for depth in size.depths]
    return [Cell("depth", head, "rejection", gamma) for head in heads for gamma in size.gammas]


def attention_cells(size: Size, domain: str) -> list[Cell]:
    """What later draft steps attended to in training, decoded as engines do."""
    modes = {"per-depth": ("chain", "first-depth"), "chain": ("chain",), "first-depth": ("first-depth",)}
    return [
        Cell("attention", Head(domain, "tv", seed, size.train_k, mode), "rejection", size.gamma, 1.0, decoded)
        for mode, decodings in modes.items()
        for seed in (size.seeds if mode != "first-depth" else size.seeds[:1])
        for decoded in decodings
    ]


def cold_cells(size: Size, domain: str) -> list[Cell]:
    """A head as initialised: total variation alone, after a warm-up with `kl`, and `kl` itself."""
    seed, warmup = size.seeds[0], f"kl:{max(1, size.head_steps // 3)}"
    heads = [Head(domain, "tv", seed, size.train_k, start="cold", warmup=each) for each in (None, warmup)]
    heads.append(Head(domain, "kl", seed, size.train_k, start="cold"))
    return [cell for head in heads for cell in _both_rules(Cell("cold", head, "", size.gamma))]


def serving_cells(size: Size, domain: str) -> list[Cell]:
    """Trained at the serving temperature against trained at 1, both decoded at both."""
    temperatures = (size.serving_temperature, 1.0)
    return [
        Cell(
            "serving",
            Head(domain, loss, size.seeds[0], size.train_k, train_temperature=trained),
            "rejection",
            size.gamma,
            served,
        )
        for loss in ("kl", "tv")
        for trained in temperatures
        for served in temperatures
    ]


def own_cells(size: Size, domain: str) -> list[Cell]:
    """Trained on corpus text against trained on what the backbone samples itself."""
    return [
        Cell("own", Head(domain, loss, size.seeds[0], size.train_k, train_data=data), "rejection", size.gamma)
        for loss in ("kl", "tv")
        for data in ("corpus", "own")
    ]


ARMS = {
    "temperature": temperature_cells,
    "depth": depth_cells,
    "attention": attention_cells,
    "cold": cold_cells,
    "serving": serving_cells,
    "own": own_cells,
}


def all_cells(size: Size, domains: tuple[str, ...]) -> list[Cell]:
    """Every cell in the order of measuring."""
    cells = [cell for domain in domains for cell in main_cells(size, domain)]
    return cells + [cell for arm in size.arms for domain in domains for cell in ARMS[arm](size, domain)]
