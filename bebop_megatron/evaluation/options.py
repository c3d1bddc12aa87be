"""Flags that the evaluation commands share: what is evaluated, how it is decoded, how much text."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.settings import ATTENTION_MODES, DecodeConfig
from bebop_megatron.evaluation.verify import RULES


def add_source(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """Checkpoints, their names, prompts and tokenizer."""
    add = parser.add_argument
    add(
        "--load",
        action="append",
        required=required,
        metavar="DIR",
        help="Megatron torch_dist checkpoint, the newest below DIR or DIR@ITERATION; with --report several, compared",
    )
    add(
        "--label",
        action="append",
        help="name of the head in table and figures, usually its loss; one for each --load (head, or folders' names)",
    )
    add(
        "--prompts",
        required=required,
        metavar="FILE",
        help='.jsonl with "prompt", "text" or "tokens"; or a text, one per line',
    )
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; not needed for prompts given as tokens")
    add("--prompt-tokens", type=int, default=0, help="cut prompts to this many tokens; 0 keeps them whole (0)")


def add_decoding(parser: argparse.ArgumentParser) -> None:
    """How drafts are made and judged, and how tokens are drawn."""
    add = parser.add_argument
    add("--rule", action="append", nargs="+", choices=RULES, help="verification rule, several allowed")
    add("--gamma", type=int, default=3, help="drafts per verification (3)")
    add_sampling(parser)


def add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are drawn and what draft steps see, under any rule and number of drafts."""
    add = parser.add_argument
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
    add("--seed", type=int, default=0)


def add_amount(parser: argparse.ArgumentParser) -> None:
    """How much text is generated."""
    add = parser.add_argument
    add("--max-new-tokens", type=int, default=128, help="per prompt (128)")
    add("--num-tokens", type=int, help="about so many tokens in all, prompts in turn; default: every prompt once")
    add("--batch-size", type=int, default=8, help="sequences decoded together (8)")
    add("--ignore-eos", action="store_true", help="go on behind the tokenizer's end-of-sequence token")
    add("--quiet", action="store_true", help="no progress bar, no table")


def rules_of(options: argparse.Namespace, default: tuple[str, ...] = ("rejection",)) -> list[str]:
    """Every rule asked for, once; both `--rule a b` and `--rule a --rule b`."""
    return list(dict.fromkeys(rule for group in options.rule or [default] for rule in group))


def labels_of(options: argparse.Namespace) -> list[str]:
    """One name per checkpoint.

    Raises:
        ValueError: another number of labels than of checkpoints, or one of them twice.
    """
    loads = options.load
    if options.label is None:
        labels = ["head"] if len(loads) == 1 else [Path(load).name for load in loads]
    else:
        labels = options.label
    if len(labels) != len(loads):
        raise ValueError(f"there are {len(loads)} --load, but {len(labels)} --label: give one for each, in order")
    if len(set(labels)) != len(labels):
        raise ValueError(f"two checkpoints are named alike ({', '.join(labels)}): tell them apart by --label")
    return labels


def check_least(options: argparse.Namespace, **least: int) -> None:
    """Refuse counts that are too small; options that were not given are left alone.

    Raises:
        ValueError: with the flag's name.
    """
    for name, value in ((name, getattr(options, name)) for name in least):
        for each in value if isinstance(value, list) else [value]:
            if each is not None and each < least[name]:
                raise ValueError(f"--{name.replace('_', '-')} must be at least {least[name]}, got {each}")


def config_of(options: argparse.Namespace, rule: str, **changes: Any) -> DecodeConfig:
    """The decoder's settings under one rule.

    Raises:
        ValueError: a setting out of range.
    """
    settings: dict[str, Any] = {
        "rule": rule,
        "gamma": options.gamma,
        "temperature": options.temperature,
        "top_k": options.top_k,
        "top_p": options.top_p,
        "attention": options.attention,
        "max_new_tokens": options.max_new_tokens,
        "batch_size": options.batch_size,
        "seed": options.seed,
        "filter_draft": options.filter_draft,
    }
    return DecodeConfig(**(settings | changes))
