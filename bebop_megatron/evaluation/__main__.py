"""`python -m bebop_megatron.evaluation --load CKPT --prompts FILE ...`: acceptance and speed of a head, by
decoding.

One process, or several under torchrun that share the model by tensor parallelism.
"""

from __future__ import annotations

import argparse
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from bebop_megatron.evaluation.outcome import GenerationResult, merged
from bebop_megatron.evaluation.results import (
    EvaluationRow,
    environment,
    summary_payload,
    write_json,
)
from bebop_megatron.evaluation.settings import ATTENTION_MODES, DecodeConfig
from bebop_megatron.evaluation.verify import RULES


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.evaluation",
        description="Acceptance and speed of an MTP head, measured by speculative decoding.",
    )
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="Megatron torch_dist checkpoint")
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help='.jsonl with "prompt", "text" or "tokens"; or a text, one per line',
    )
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; not needed for prompts given as tokens")
    add(
        "--rule",
        action="append",
        nargs="+",
        choices=RULES,
        help="verification rule, several allowed (rejection)",
    )
    add("--gamma", type=int, default=3, help="drafts per verification (3)")
    add("--temperature", type=float, default=1.0, help="0 is greedy (1.0)")
    add("--top-k", type=int, default=0, help="0 is off (0)")
    add("--top-p", type=float, default=1.0, help="1 is off (1.0)")
    add(
        "--attention",
        choices=ATTENTION_MODES,
        default="chain",
        help="what draft steps 2, 3, ... see (chain, as vLLM)",
    )
    add(
        "--filter-draft",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="filter drafts like the target",
    )
    add("--prompt-tokens", type=int, default=0, help="cut prompts to this many tokens; 0 keeps them whole (0)")
    add("--max-new-tokens", type=int, default=128, help="per prompt (128)")
    add(
        "--num-tokens",
        type=int,
        help="about so many tokens in all, prompts in turn; default: every prompt once",
    )
    add(
        "--rounds",
        type=int,
        default=3,
        help="runs without and with drafts alternate so often; speeds are medians (3)",
    )
    add("--batch-size", type=int, default=8, help="sequences decoded together (8)")
    add("--seed", type=int, default=0)
    add("--ignore-eos", action="store_true", help="go on behind the tokenizer's end-of-sequence token")
    add(
        "--baseline",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="also time the engine without drafts",
    )
    add("--label", default="head", help="name of the head in table and figure, usually its loss (head)")
    add("--output", metavar="FILE", help="write the results as JSON")
    add("--quiet", action="store_true", help="no progress bar, no table")
    return parser


@contextmanager
def _progress(description: str, total: int, shown: bool) -> Iterator[Callable[[int], None]]:
    """A progress bar on standard error; yields what takes the number of tokens so far."""
    if not shown:
        yield lambda tokens: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("tokens"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(description, total=total)
        yield lambda tokens: bar.update(task, completed=min(tokens, total))


def _row(
    options: argparse.Namespace,
    config: DecodeConfig,
    rounds: list[GenerationResult],
    baseline: float | None,
    measured_in: dict[str, Any],
) -> EvaluationRow:
    result = merged(rounds)
    # the first token of a sequence comes from the prompt's forward pass, not from a verification
    verified = result.num_tokens - len(result.sequences)
    return EvaluationRow(
        loss=options.label,
        rule=config.rule,
        gamma=config.gamma,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        attention=config.attention,
        data=Path(options.prompts).stem,
        accept_rate=result.accept_rate,
        accept_rate_stderr=result.accept_length_error / config.gamma,
        accept_length=result.accept_length,
        accept_rate_per_step=result.rate_per_step.tolist(),
        accept_rate_per_step_conditional=result.conditional_rate_per_step.tolist(),
        tokens_per_verification=verified / max(1, result.num_verifications),
        num_verifications=result.num_verifications,
        tokens_per_second=median(r.tokens_per_second for r in rounds),
        baseline_tokens_per_second=baseline,
        num_tokens=result.num_tokens,
        environment=measured_in,
    )


def _vocabulary(loaded: Any, tokenizer: Any | None, options: argparse.Namespace) -> int:
    """True size of the vocabulary: the tokenizer's, else what the checkpoint remembers, else every column."""
    columns = loaded.padded_vocab_size
    if tokenizer is None:
        return getattr(loaded.args, "vocab_size", None) or columns
    sizes = f"has {len(tokenizer):,} tokens, but the checkpoint's vocabulary has {columns:,} columns"
    if len(tokenizer) > columns:
        raise ValueError(
            f"--tokenizer {options.tokenizer} {sizes}: it is not the tokenizer that the model was trained with"
        )
    if columns - len(tokenizer) >= loaded.vocab_padding:
        # not an error: converters pad as they like
        warnings.warn(f"--tokenizer {options.tokenizer} {sizes}: is it the right one?", stacklevel=2)
    return len(tokenizer)


def _configs(options: argparse.Namespace, stop_tokens: tuple[int, ...]) -> list[DecodeConfig]:
    """One config per rule.

    Raises:
        ValueError: a setting out of range.
    """
    for name, least in (("rounds", 1), ("prompt_tokens", 0), ("num_tokens", 1)):
        value = getattr(options, name)
        if value is not None and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if options.gamma < 1:
        raise ValueError(f"--gamma must be at least 1, got {options.gamma}; the speed without drafts is the --baseline")
    # both `--rule a b` and `--rule a --rule b`
    rules = dict.fromkeys(rule for group in options.rule or [["rejection"]] for rule in group)
    return [
        DecodeConfig(
            rule=rule,
            gamma=options.gamma,
            temperature=options.temperature,
            top_k=options.top_k,
            top_p=options.top_p,
            attention=options.attention,
            max_new_tokens=options.max_new_tokens,
            batch_size=options.batch_size,
            stop_tokens=stop_tokens,
            seed=options.seed,
            filter_draft=options.filter_draft,
        )
        for rule in rules
    ]


def _measure(
    model: Any, vocab_size: int, prompts: list[list[int]], plan: dict[str, DecodeConfig], options: argparse.Namespace
) -> dict[str, list[GenerationResult]]:
    """Every config of the plan once per round, on the same prompts, in alternation: a machine's load drifts."""
    from bebop_megatron.evaluation.decode import SpeculativeDecoder

    for config in plan.values():
        SpeculativeDecoder(model, config, vocab_size=vocab_size).check(prompts)
    rounds = min(options.rounds, len(prompts))
    num_tokens = options.num_tokens and -(-options.num_tokens // rounds)
    shown = not options.quiet and sys.stderr.isatty() and os.environ["RANK"] == "0"
    results: dict[str, list[GenerationResult]] = {name: [] for name in plan}
    for index in range(rounds):
        mine = prompts[index::rounds]
        for name, config in plan.items():
            if index == 0:
                # the first calls pay for allocations and lazy initialisation
                short = replace(config, max_new_tokens=min(8, config.max_new_tokens))
                SpeculativeDecoder(model, short, vocab_size=vocab_size).generate(mine[: config.batch_size])
            config = replace(config, seed=config.seed + index)
            decoder = SpeculativeDecoder(model, config, vocab_size=vocab_size)
            total = num_tokens or len(mine) * config.max_new_tokens
            with _progress(f"{name}, {index + 1} of {rounds}", total, shown) as progress:
                results[name].append(decoder.generate(mine, num_tokens=num_tokens, progress=progress))
    return results


def evaluate(options: argparse.Namespace) -> list[EvaluationRow]:
    """Load, decode without and with drafts, and measure.

    Raises:
        ValueError: whatever is wrong with the checkpoint, the prompts, the tokenizer or the settings.
    """
    from bebop_megatron.data.tokenizer import load_tokenizer
    from bebop_megatron.evaluation.loading import load_model
    from bebop_megatron.evaluation.prompts import read_prompts

    # whatever is wrong with the small things shows before the model is built
    _configs(options, ())
    # and the CPU platform answers for a GPU once it is entered
    measured_in = environment()
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    prompts = read_prompts(options.prompts, tokenizer, options.prompt_tokens)
    eos = None if tokenizer is None or options.ignore_eos else tokenizer.eos_token_id
    configs = _configs(options, () if eos is None else (eos,))
    loaded = load_model(options.load)

    plan = {config.rule: config for config in configs}
    if options.baseline:
        plan = {"without drafts": replace(configs[0], gamma=0)} | plan
    results = _measure(loaded.model, _vocabulary(loaded, tokenizer, options), prompts, plan, options)
    baseline = median(r.tokens_per_second for r in results["without drafts"]) if options.baseline else None
    return [_row(options, config, results[config.rule], baseline, measured_in) for config in configs]


def main(argv: Sequence[str] | None = None) -> None:
    """Evaluate one head under one or several rules; print a table, write JSON."""
    argv = sys.argv[1:] if argv is None else list(argv)
    if argv[:1] == ["generate"]:
        from bebop_megatron.evaluation.generate import main as generate

        return generate(argv[1:])
    options = _parser().parse_args(argv)
    try:
        rows = evaluate(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    import torch

    if os.environ["RANK"] == "0":
        if options.output:
            write_json(options.output, summary_payload(rows, rows[0].baseline_tokens_per_second))
        if not options.quiet:
            from bebop_megatron.evaluation.report import print_table

            print_table(rows)
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
