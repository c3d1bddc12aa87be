"""Measures cells: one head, loaded once, decoded under every rule and setting that is asked of it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.study.plan import Cell, Size
from benchmarks.study.statistics import line

# lower bounds of the bins of entropy, in nats
BINS = (0.0, 0.1, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0)


def read_tokens(file: Path) -> list[list[int]]:
    """Prompts of `corpora.prepare`."""
    return [json.loads(row)["tokens"] for row in file.read_text().splitlines()]


def _config(size: Size, **settings: Any) -> Any:
    from bebop_megatron.evaluation import DecodeConfig

    return DecodeConfig(max_new_tokens=size.new_tokens, batch_size=size.decode_batch, **settings)


def _load(checkpoint: Path, data: Path) -> tuple[Any, int, int]:
    """The model, its true vocabulary, and the token that ends a text."""
    from bebop_megatron.data.tokenizer import load_tokenizer
    from bebop_megatron.evaluation.loading import load_model

    tokenizer = load_tokenizer(str(data / "tokenizer"))
    return load_model(str(checkpoint)).model, len(tokenizer), tokenizer.eos_token_id


def measure(checkpoint: Path, data: Path, cells: Sequence[Cell], size: Size) -> Iterator[tuple[Cell, dict[str, Any]]]:
    """What each cell measured, one after another; all on the same prompts."""
    from bebop_megatron.evaluation import SpeculativeDecoder

    model, vocab_size, eos = _load(checkpoint, data)
    prompts = read_tokens(data / "prompts.jsonl")
    for cell in cells:
        config = _config(
            size,
            rule=cell.rule,
            gamma=cell.gamma,
            temperature=cell.temperature,
            attention=cell.attention,
            stop_tokens=(eos,),
            seed=cell.head.seed,
            record=cell.entropy,
        )
        result = SpeculativeDecoder(model, config, vocab_size=vocab_size).generate(prompts)
        measured = summary(result) | {"seconds": round(result.seconds, 2)}
        if cell.entropy:
            texts = [prompts[each.prompt] + each.tokens for each in result.sequences]
            entropy = target_entropy(model, texts, cell.temperature, vocab_size)
            measured["entropy"] = acceptance_over_entropy(result, prompts, texts, entropy)
        yield cell, measured


def summary(result: Any) -> dict[str, Any]:
    """Acceptance of a generation, and its counts prompt by prompt."""
    from bebop_megatron.evaluation.outcome import ACCEPTED, REACHED

    verified = result.counts[:, 0, REACHED]
    accepted = result.counts[:, :, ACCEPTED].sum(1)
    return {
        "accept_rate": result.accept_rate,
        "stderr": result.accept_length_error / result.gamma,
        "accept_length": result.accept_length,
        "accept_rate_per_step": result.rate_per_step.tolist(),
        "num_tokens": result.num_tokens,
        "num_verifications": result.num_verifications,
        "tokens_per_second": result.tokens_per_second,
        "verifications": verified.int().tolist(),
        "accepted": accepted.int().tolist(),
    }


def target_entropy(model: Any, texts: list[list[int]], temperature: float, vocab_size: int) -> Tensor:
    """Entropy in nats of the target's distribution behind every token but a text's first, by full forward passes.

    Shape: -> [texts, longest text] float32; 0 at the first token and behind the end of a text.
    """
    from bebop_megatron.evaluation import DecodeConfig, expected_acceptance

    full = expected_acceptance(model, texts, DecodeConfig(gamma=1, temperature=temperature), vocab_size=vocab_size)
    entropy = torch.zeros(len(texts), max(map(len, texts)))
    # the target of a draft stands one row behind the anchor
    entropy[full.sequence, full.anchor + 1] = full.target_entropy[:, 0]
    return entropy


def acceptance_over_entropy(
    result: Any, prompts: list[list[int]], texts: list[list[int]], entropy: Tensor
) -> dict[str, Any]:
    """Expected acceptance of the draft steps that were reached, against the entropy of their target.

    `first`: the line of step 1 alone, which no earlier acceptance selects; `reached`: of every step that was reached.
    `mean_target`: mean entropy over all tokens that were generated.
    """
    records = result.records
    row = records.anchor + records.step
    # drafts behind the end of a text have no target in it
    lengths = torch.tensor([len(text) for text in texts])
    inside = row < lengths[records.sequence]
    sequence, step = records.sequence[inside], records.step[inside]
    x, y = entropy[sequence, row[inside]], records.alpha[inside]
    first = step == 1
    generated = torch.cat(
        [
            entropy[index, len(prompts[each.prompt]) - 1 : len(texts[index]) - 1]
            for index, each in enumerate(result.sequences)
        ]
    )
    return {
        "mean_target": float(generated.mean()),
        "first": _line(x[first], y[first], sequence[first]),
        "reached": _line(x, y, sequence),
        "bins": _bins(x[first], y[first]),
    }


def _line(x: Tensor, y: Tensor, sequence: Tensor) -> dict[str, Any] | None:
    fit = line(x, y, sequence)  # pyright: ignore[reportArgumentType]
    if fit is None:
        return None
    return {
        "slope": fit.slope.value,
        "slope_stderr": fit.slope.stderr,
        "intercept": fit.intercept,
        "r": fit.r,
        "points": fit.num,
    }


def _bins(x: Tensor, y: Tensor) -> list[dict[str, float]]:
    index = torch.bucketize(x, torch.tensor(BINS[1:]), right=True)
    out = []
    for each, low in enumerate(BINS):
        here = index == each
        if here.any():
            out.append(
                {
                    "low": low,
                    "entropy": float(x[here].mean()),
                    "acceptance": float(y[here].mean()),
                    "points": int(here.sum()),
                }
            )
    return out


def sample(checkpoint: Path, data: Path, size: Size, num_tokens: int, seed: int = 0) -> list[list[int]]:
    """Texts of the backbone: stretches of the training corpus' openings, continued at temperature 1."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    from bebop_megatron.evaluation import SpeculativeDecoder

    model, vocab_size, eos = _load(checkpoint, data)
    corpus = IndexedDataset(str(data / "corpus"))
    generator = torch.Generator().manual_seed(seed)
    short, count = size.prompt_tokens // 2, -(-num_tokens // (size.prompt_tokens // 2 + size.new_tokens))
    prompts: list[list[int]] = []
    while len(prompts) < count:
        document = corpus[int(torch.randint(len(corpus), (), generator=generator))]
        if len(document) > short:
            start = int(torch.randint(len(document) - short, (), generator=generator))
            prompts.append(document[start : start + short].tolist())
    config = _config(size, gamma=size.gamma, stop_tokens=(eos,), seed=seed)
    result = SpeculativeDecoder(model, config, vocab_size=vocab_size).generate(prompts)
    return [prompts[each.prompt] + each.tokens for each in result.sequences]
