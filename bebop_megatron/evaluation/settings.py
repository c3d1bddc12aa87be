"""How to decode, in one frozen dataclass."""

from __future__ import annotations

from dataclasses import dataclass

from bebop_megatron.evaluation.verify import RULES

ATTENTION_MODES = ("chain", "first-depth")


@dataclass(frozen=True)
class DecodeConfig:
    """How to draft, verify and sample.

    `gamma` 0 samples without drafts, by the same engine with the same cache: the baseline. `attention` is
    what draft steps 2, 3, ... attend to: `chain` is what vLLM does when it serves an MTP head (depth-1 keys
    up to the anchor, then the chain's own), `first-depth` shares the depth-1 keys. Drafts are filtered like
    the target unless `filter_draft` is off, which leaves only their temperature.

    `gamma` need not be the number of depths trained: the repeated layer is applied as often. With
    `adaptive_gamma` it is the most that is drafted, and `draft_cost` is what one more draft costs, its step and
    its place in the verification together, in units of scoring one token.

    Raises:
        ValueError: a setting out of range.
    """

    rule: str = "rejection"
    gamma: int = 3
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    attention: str = "chain"
    max_new_tokens: int = 128
    batch_size: int = 8
    stop_tokens: tuple[int, ...] = ()
    seed: int = 0
    filter_draft: bool = True
    raw_log_probs: bool = False
    record: bool = False
    prefill_chunk: int = 1024
    adaptive_gamma: bool = False
    draft_cost: float = 0.2

    def __post_init__(self) -> None:
        if self.rule not in RULES:
            raise ValueError(f"unknown verification rule {self.rule!r}: choose one of {', '.join(sorted(RULES))}")
        if self.attention == "per-depth":
            raise ValueError(
                "attention 'per-depth' is how Megatron trains (every depth a full pass over known tokens), "
                f"not a way to decode: choose one of {', '.join(ATTENTION_MODES)}"
            )
        if self.attention not in ATTENTION_MODES:
            raise ValueError(f"unknown attention mode {self.attention!r}: choose one of {', '.join(ATTENTION_MODES)}")
        for name, least in (
            ("gamma", 0),
            ("max_new_tokens", 1),
            ("batch_size", 1),
            ("top_k", 0),
            ("prefill_chunk", 1),
        ):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be at least {least}, got {getattr(self, name)}")
        if not 0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature must be 0 (greedy) or a positive number, got {self.temperature}")
        if self.adaptive_gamma and not self.gamma:
            raise ValueError("adaptive_gamma chooses from 1 to gamma drafts, and gamma is 0")
        if not 0 <= self.draft_cost < float("inf"):
            raise ValueError(f"draft_cost must be a number of at least 0, got {self.draft_cost}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must lie in (0, 1], got {self.top_p}")


def parse_gamma(text: str) -> tuple[int, bool]:
    """`"3"`, `"adaptive"` (up to 5) or `"adaptive:8"` as gamma and adaptive_gamma.

    Raises:
        ValueError: something else.
    """
    name, colon, most = text.partition(":")
    adaptive = name == "adaptive"
    number = (most if colon else "5") if adaptive else text
    if not number.isascii() or not number.isdigit():
        raise ValueError(f"gamma must be a number, adaptive, or adaptive:MOST, got {text!r}")
    return int(number), adaptive
