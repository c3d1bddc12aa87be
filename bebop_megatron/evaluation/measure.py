"""One head in one setting: decoded without and with drafts in alternation, every rule on the same prompts."""

from __future__ import annotations

import argparse
from dataclasses import replace
from statistics import median
from typing import Any

from bebop_megatron.evaluation.environment import environment
from bebop_megatron.evaluation.options import check_least, config_of, labels_of, rules_of
from bebop_megatron.evaluation.outcome import GenerationResult, merged
from bebop_megatron.evaluation.progress import progress_bar
from bebop_megatron.evaluation.results import EvaluationRow
from bebop_megatron.evaluation.settings import DecodeConfig
from bebop_megatron.evaluation.subject import Subject, Text, check_prompts, opened, read_text, warm_up


def configs_of(options: argparse.Namespace, stop_tokens: tuple[int, ...]) -> list[DecodeConfig]:
    """One config per rule.

    Raises:
        ValueError: a setting out of range.
    """
    check_least(options, rounds=1, prompt_tokens=0, num_tokens=1)
    if options.gamma < 1:
        raise ValueError(f"--gamma must be at least 1, got {options.gamma}; the speed without drafts is the --baseline")
    return [config_of(options, rule, stop_tokens=stop_tokens) for rule in rules_of(options)]


def _row(
    options: argparse.Namespace,
    config: DecodeConfig,
    rounds: list[GenerationResult],
    baseline: float | None,
    subject: Subject,
    text: Text,
    measured_in: dict[str, Any],
) -> EvaluationRow:
    result = merged(rounds)
    # the first token of a sequence comes from the prompt's forward pass, not from a verification
    verified = result.num_tokens - len(result.sequences)
    return EvaluationRow(
        loss=labels_of(options)[0],
        rule=config.rule,
        gamma=config.gamma,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        attention=config.attention,
        filter_draft=config.filter_draft,
        data=text.name,
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
        batch_size=config.batch_size,
        checkpoint=subject.checkpoint,
    )


def _measure(
    subject: Subject, prompts: list[list[int]], plan: dict[str, DecodeConfig], options: argparse.Namespace
) -> dict[str, list[GenerationResult]]:
    """Every config of the plan once per round, on the same prompts, in alternation: a machine's load drifts."""
    from bebop_megatron.evaluation.decode import SpeculativeDecoder

    rounds = min(options.rounds, len(prompts))
    num_tokens = options.num_tokens and -(-options.num_tokens // rounds)
    results: dict[str, list[GenerationResult]] = {name: [] for name in plan}
    for index in range(rounds):
        mine = prompts[index::rounds]
        for name, config in plan.items():
            if index == 0:
                warm_up(subject, mine, config)
            config = replace(config, seed=config.seed + index)
            decoder = SpeculativeDecoder(subject.model, config, vocab_size=subject.vocab_size)
            total = num_tokens or len(mine) * config.max_new_tokens
            with progress_bar(f"{name}, {index + 1} of {rounds}", total, options.quiet) as progress:
                results[name].append(decoder.generate(mine, num_tokens=num_tokens, progress=progress))
    return results


def evaluate(options: argparse.Namespace) -> list[EvaluationRow]:
    """Load, decode without and with drafts, and measure: one row per rule.

    Raises:
        ValueError: whatever is wrong with the checkpoint, the prompts, the tokenizer or the settings.
    """
    # whatever is wrong with the small things shows before the model is built
    configs_of(options, ())
    labels_of(options)
    if len(options.load) > 1:
        raise ValueError("several --load are compared in a report: add --report DIR")
    # and the CPU platform answers for a GPU once it is entered
    measured_in = environment()
    text = read_text(options, options.prompts)
    configs = configs_of(options, text.stop_tokens)
    plan = {config.rule: config for config in configs}
    if options.baseline:
        plan = {"without drafts": replace(configs[0], gamma=0)} | plan
    with opened(options.load[0], text, options.tokenizer) as subject:
        check_prompts(subject, text, list(plan.values()))
        results = _measure(subject, text.prompts, plan, options)
        baseline = median(r.tokens_per_second for r in results["without drafts"]) if options.baseline else None
        return [_row(options, config, results[config.rule], baseline, subject, text, measured_in) for config in configs]
