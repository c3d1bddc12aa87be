"""What a generation produced; acceptance as sums and counts, so that results add up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.evaluation.estimate import ratio

# last dimension of `GenerationResult.counts`
REACHED, ACCEPTED, ACCEPT_PROB, ALPHA, DRAFTED = range(5)


@dataclass(frozen=True)
class Continuation:
    """One generated continuation.

    `log_probs` are those of the distribution that was sampled from (temperature and filters applied),
    `raw_log_probs` those of the model at temperature 1, where they were asked for. `finish` is "stop" or
    "length".
    """

    prompt: int
    tokens: list[int]
    log_probs: list[float]
    raw_log_probs: list[float] | None
    finish: str


@dataclass(frozen=True)
class DraftRecords:
    """Every draft step that a verification reached, in the order of decoding.

    Shape: all [n]; sequence (index into `sequences`), anchor (position t in prompt + continuation), step
    (from 1), token (the draft) int64; accepted bool; accept_prob and alpha float32.
    """

    sequence: Tensor
    anchor: Tensor
    step: Tensor
    token: Tensor
    accepted: Tensor
    accept_prob: Tensor
    alpha: Tensor


@dataclass(frozen=True)
class GenerationResult:
    """Continuations, acceptance and time.

    Acceptance counts every draft of every verification, as engines do, also drafts behind a stop token or the
    length limit.

    Shape: counts [sequences, gamma, 5] float64, sums over the verifications of a sequence: how often step i was
    reached (steps before it accepted), how often accepted, and there the sum of acceptance probabilities of the
    drafts and of alpha, the expectation of the former over drafts; last, how often step i was drafted, which
    differs between steps with adaptive gamma only.
    """

    sequences: list[Continuation]
    counts: Tensor
    seconds: float
    records: DraftRecords | None = None

    @property
    def gamma(self) -> int:
        """Drafts per verification; with adaptive gamma the most."""
        return self.counts.shape[1]

    @property
    def num_tokens(self) -> int:
        """Tokens in all continuations."""
        return sum(len(sequence.tokens) for sequence in self.sequences)

    @property
    def tokens_per_second(self) -> float:
        """Tokens kept, by wall time, prefill included."""
        return self.num_tokens / self.seconds if self.seconds > 0 else float("nan")

    @property
    def num_verifications(self) -> int:
        """Verifications of drafts, in all sequences."""
        return int(self.counts[:, :1, REACHED].sum())

    def texts(self, prompts: Sequence[list[int]]) -> tuple[list[list[int]], list[int]]:
        """Prompt and continuation of every sequence as one text, and the lengths of the prompts in them."""
        given = [prompts[sequence.prompt] for sequence in self.sequences]
        texts = [prompt + sequence.tokens for prompt, sequence in zip(given, self.sequences, strict=True)]
        return texts, [len(prompt) for prompt in given]

    @property
    def accepted_per_step(self) -> Tensor:
        """How many verifications accepted at least i drafts: [gamma] float64."""
        return self.counts[:, :, ACCEPTED].sum(0)

    @property
    def rate_per_step(self) -> Tensor:
        """Share of the verifications that accepted step i and every step before it: [gamma] float64."""
        return self.accepted_per_step / max(1, self.num_verifications)

    @property
    def conditional_rate_per_step(self) -> Tensor:
        """Share of the verifications reaching step i that accepted it: [gamma] float64."""
        return self.accepted_per_step / self.counts[:, :, REACHED].sum(0).clamp(min=1)

    @property
    def accept_length(self) -> float:
        """1 + E[L]: tokens per verification."""
        return 1 + float(self.rate_per_step.sum())

    @property
    def accept_rate(self) -> float:
        """Share of the drafts that were accepted: E[L] / gamma."""
        drafts = float(self.counts[:, :, DRAFTED].sum())
        return float(self.accepted_per_step.sum()) / drafts if drafts else float("nan")

    @property
    def mean_gamma(self) -> float:
        """Drafts per verification, on average."""
        return float(self.counts[:, :, DRAFTED].sum()) / max(1, self.num_verifications)

    @property
    def accept_length_error(self) -> float:
        """Standard error of `accept_length`; sequences are the independent units, not verifications."""
        return ratio(self.counts[:, :, ACCEPTED].sum(1), self.counts[:, :1, REACHED].sum(1)).stderr


def merged(results: list[GenerationResult]) -> GenerationResult:
    """Several generations with equal settings as one; records are left out."""
    return GenerationResult(
        sequences=[sequence for result in results for sequence in result.sequences],
        counts=torch.cat([result.counts for result in results]),
        seconds=sum(result.seconds for result in results),
    )


def collect_records(parts: list[dict[str, Tensor]]) -> DraftRecords | None:
    """Flatten per-iteration records to the steps that were reached.

    Shape: each part: sequence, anchor, num_accepted [b] int64; tokens, accept_prob, alpha [b, drafts].
    """
    flat = [_reached(part) for part in parts]
    if not flat:
        return None
    return DraftRecords(**{name: torch.cat([part[name] for part in flat]).cpu() for name in flat[0]})


def _reached(part: dict[str, Tensor]) -> dict[str, Tensor]:
    drafts = part["tokens"].shape[1]
    step = torch.arange(drafts, device=part["tokens"].device)
    reached = part["num_accepted"][:, None] >= step
    spread = {name: part[name][:, None].expand(-1, drafts)[reached] for name in ("sequence", "anchor")}
    return spread | {
        "step": (step + 1).expand_as(reached)[reached],
        "token": part["tokens"][reached],
        "accepted": (part["num_accepted"][:, None] > step)[reached],
        "accept_prob": part["accept_prob"][reached],
        "alpha": part["alpha"][reached],
    }
