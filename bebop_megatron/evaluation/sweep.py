"""The runs that a report is made of: one cell each, kept in a file when it is done, so that a report can be resumed.

Three kinds. `main` and `temperature` cells record every draft, and a full forward pass over their text computes what
should have been accepted; `gamma` cells measure time, alternate between numbers of drafts round by round (a machine's
load drifts), and record nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.decode import SpeculativeDecoder
from bebop_megatron.evaluation.estimate import Estimate, ratio
from bebop_megatron.evaluation.expected import ExpectedAcceptance, expected_acceptance
from bebop_megatron.evaluation.outcome import ACCEPTED, DRAFTED, REACHED
from bebop_megatron.evaluation.settings import ATTENTION_MODES, DecodeConfig
from bebop_megatron.evaluation.subject import Subject, Text
from bebop_megatron.evaluation.summaries import attention_summary, expected_summary
from bebop_megatron.outputs import read_json, write_json

KINDS = ("main", "temperature", "gamma")


@dataclass(frozen=True)
class Cell:
    """One run: a checkpoint, decoded in one way. `config.seed` tells rounds apart."""

    kind: str
    label: str
    checkpoint: str
    data: str
    config: DecodeConfig
    num_tokens: int

    @property
    def key(self) -> dict[str, Any]:
        """Everything that the result depends on, as it comes back from JSON."""
        return json.loads(json.dumps(asdict(self)))

    @property
    def title(self) -> str:
        """For the progress bar."""
        if self.config.gamma == 0:
            return f"{self.label}, without drafts"
        return f"{self.label}, {self.config.rule}, gamma {self.config.gamma}, temperature {self.config.temperature:g}"

    @property
    def file(self) -> str:
        """Name of the file that it is kept in."""
        digest = hashlib.sha256(json.dumps(self.key, sort_keys=True).encode()).hexdigest()[:10]
        parts = [self.kind, self.label, self.config.rule, f"g{self.config.gamma}", f"t{self.config.temperature:g}"]
        readable = "-".join("".join(c if c.isalnum() or c == "." else "_" for c in part) for part in parts)
        return f"{readable}-{digest}.json"


@dataclass(frozen=True)
class Plan:
    """Which sweeps, and how much text each of their cells decodes."""

    rules: list[str]
    temperatures: list[float]
    gammas: list[int]
    rounds: int
    main_tokens: int
    sweep_tokens: int
    speed_tokens: int

    def cells(self, label: str, checkpoint: str, data: str, config_of: Callable[..., DecodeConfig]) -> list[Cell]:
        """Every cell of one checkpoint, in the order in which they are run.

        `config_of(rule, **changes)` gives the decoder's settings.
        """

        def cell(kind: str, tokens: int, config: DecodeConfig) -> Cell:
            # a sequence never longer than the cell: several sequences, or there is no standard error
            longest = max(1, tokens // 16)
            return Cell(
                kind,
                label,
                checkpoint,
                data,
                replace(config, max_new_tokens=min(config.max_new_tokens, longest)),
                tokens,
            )

        found = [cell("main", self.main_tokens, config_of(rule, record=True)) for rule in self.rules]
        served = config_of(self.rules[0]).temperature
        for temperature in self.temperatures:
            if temperature != served:
                found += [
                    cell("temperature", self.sweep_tokens, config_of(rule, temperature=temperature, record=True))
                    for rule in self.rules
                ]
        if self.gammas:
            for index in range(self.rounds):
                seed = config_of(self.rules[0]).seed + index
                found.append(cell("gamma", self.speed_tokens, config_of(self.rules[0], gamma=0, seed=seed)))
                found += [
                    cell("gamma", self.speed_tokens, config_of(rule, gamma=gamma, seed=seed))
                    for gamma in self.gammas
                    for rule in self.rules
                ]
        return found


@dataclass(frozen=True)
class Outcome:
    """What a cell found; the same before and after it has been in a file."""

    cell: dict[str, Any]
    counts: Tensor
    num_tokens: int
    num_sequences: int
    seconds: float
    environment: dict[str, Any]
    expected: dict[str, Any] | None = None

    @property
    def config(self) -> dict[str, Any]:
        """The decoder's settings."""
        return self.cell["config"]

    @property
    def gamma(self) -> int:
        """Drafts per verification."""
        return self.config["gamma"]

    @property
    def tokens_per_second(self) -> float:
        """Tokens kept, by wall time, prefill included."""
        return self.num_tokens / self.seconds

    @property
    def rate_per_step(self) -> list[Estimate]:
        """Share of verifications that accepted step i and all before it."""
        verified = self.counts[:, 0, REACHED]
        return [ratio(self.counts[:, step, ACCEPTED], verified) for step in range(self.gamma)]

    @property
    def accept_length(self) -> Estimate:
        """1 + E[L]."""
        verified = self.counts[:, 0, REACHED]
        return ratio(self.counts[:, :, ACCEPTED].sum(1), verified).scaled(1, 1)

    @property
    def accept_rate(self) -> Estimate:
        """E[L] / gamma."""
        return self.accept_length.scaled(1 / self.gamma, -1 / self.gamma)


class Store:
    """The folder of finished cells."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, cell: Cell) -> Outcome | None:
        """The outcome of a cell with exactly these settings, if it has been run."""
        path = self.folder / cell.file
        if not path.is_file():
            return None
        try:
            payload = read_json(path)
        except ValueError as error:
            raise ValueError(f"{error}. Remove the file, and it is measured again") from error
        if payload.get("cell") != cell.key:
            return None
        size = payload["num_sequences"], cell.config.gamma
        counts = torch.tensor(payload.pop("counts"), dtype=torch.float64)
        # nothing is counted without drafts, and an empty list has no shape
        counts = counts.reshape(*size, -1) if size[1] else counts.new_zeros(*size, DRAFTED + 1)
        return Outcome(**payload, counts=counts)

    def save(self, cell: Cell, outcome: Outcome) -> None:
        """Keep it: all of it or nothing."""
        payload = {name: getattr(outcome, name) for name in outcome.__dataclass_fields__}
        # sums of small counts and probabilities
        counts = [[[round(x, 6) for x in step] for step in sequence] for sequence in outcome.counts.tolist()]
        write_json(self.folder / cell.file, payload | {"counts": counts})


def run_cell(
    cell: Cell, subject: Subject, text: Text, measured_in: dict[str, Any], progress: Callable[[int], None]
) -> Outcome:
    """Decode, and measure the text that came out. Under tensor parallelism every rank calls this."""
    config = cell.config
    decoder = SpeculativeDecoder(subject.model, config, vocab_size=subject.vocab_size)
    result = decoder.generate(text.prompts, num_tokens=cell.num_tokens, progress=progress)
    expected = None
    if config.record:
        texts, lengths = result.texts(text.prompts)

        def forward(attention: str) -> ExpectedAcceptance:
            return expected_acceptance(
                subject.model,
                texts,
                replace(config, attention=attention),
                vocab_size=subject.vocab_size,
                prompt_lengths=lengths,
            )

        full = forward(config.attention)
        assert result.records is not None
        expected = expected_summary(full, result.records, config.rule)
        if cell.kind == "main":
            others = {mode: forward(mode) for mode in ATTENTION_MODES if mode != config.attention}
            expected["attention"] = attention_summary({config.attention: full} | others, config.rule)
    return Outcome(
        cell=cell.key,
        counts=result.counts,
        num_tokens=result.num_tokens,
        num_sequences=len(result.sequences),
        seconds=result.seconds,
        environment=measured_in,
        expected=expected,
    )
