"""`python -m bebop_megatron.evaluation generate`: completions of prompts as JSON lines, to train on or to look at.

One process, or several under torchrun: every `--tensor-parallel` of them share a copy of the model, and the copies
share the prompts. An interrupted run is continued by the same command.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.completions import CompletionFile, Job, Writer
from bebop_megatron.evaluation.options import add_sampling, check_least, config_of
from bebop_megatron.evaluation.outcome import GenerationResult, merged
from bebop_megatron.evaluation.prompts import Prompt, read_prompt_records
from bebop_megatron.evaluation.settings import DecodeConfig, parse_gamma
from bebop_megatron.evaluation.subject import vocabulary
from bebop_megatron.evaluation.verify import RULES
from bebop_megatron.launcher import is_first
from bebop_megatron.outputs import check_writable, held, reason


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="Megatron torch_dist checkpoint")
    add(
        "--prompts",
        required=True,
        metavar="FILE",
        help='.jsonl with "prompt", "text", "messages" or "tokens"; or a text, one per line',
    )
    add("--output", required=True, metavar="FILE", help="JSON lines; what is in it already is not sampled again")
    add("--tokenizer", metavar="DIR", help="Hugging Face tokenizer; without one, tokens in and tokens out")
    add("--samples", type=int, default=1, metavar="N", help="completions per prompt (1)")
    add_sampling(parser)
    add("--max-new-tokens", type=int, default=256, help="per completion (256)")
    add("--prompt-tokens", type=int, default=0, help="cut prompts to this many tokens; 0 keeps them whole (0)")
    add("--stop", action="append", default=[], metavar="TOKEN", help="a token, or its id, that ends a text; repeatable")
    add("--ignore-eos", action="store_true", help="go on behind the tokenizer's end-of-sequence token")
    add("--log-probs", action="store_true", help="add log-probabilities, as sampled from and as the model has them")
    add("--tokens", action="store_true", help="add the token ids of prompt and completion")
    add("--gamma", default="3", help="drafts per verification: a number, 0, adaptive, or adaptive:MOST (3)")
    add("--draft-cost", type=float, default=0.2, help="for adaptive: a draft's cost in scored tokens (0.2)")
    add("--rule", choices=RULES, default="rejection", help="verification rule (rejection)")
    add("--batch-size", type=int, default=8, help="sequences decoded together on each copy of the model (8)")
    add("--tensor-parallel", type=int, metavar="N", help="processes that share a copy of the model (all)")
    add("--save-every", type=int, metavar="N", help="write after so many completions (8 batches)")
    add("--quiet", action="store_true", help="no progress bar, no summary")


def _config(options: argparse.Namespace, stop_tokens: tuple[int, ...]) -> DecodeConfig:
    """Raises ValueError for a setting out of range."""
    check_least(options, samples=1, prompt_tokens=0, save_every=1)
    gamma, adaptive = parse_gamma(options.gamma)
    return config_of(
        options,
        options.rule,
        gamma=gamma,
        adaptive_gamma=adaptive,
        draft_cost=options.draft_cost,
        stop_tokens=stop_tokens,
        raw_log_probs=options.log_probs,
    )


def _stop_tokens(options: argparse.Namespace, tokenizer: Any | None) -> tuple[int, ...]:
    """Ids of `--stop` and the tokenizer's end of sequence.

    Raises:
        ValueError: a text that is not one token, or text without a tokenizer.
    """
    stops = []
    for text in options.stop:
        if text.isascii() and text.isdigit():
            stops.append(int(text))
            continue
        if tokenizer is None:
            raise ValueError(f"--stop {text!r} is text: add --tokenizer, or give the token's id")
        ids = tokenizer(text.replace(r"\n", "\n"), add_special_tokens=False, verbose=False)["input_ids"]
        if len(ids) != 1:
            raise ValueError(f"--stop {text!r} is {len(ids)} tokens of this tokenizer; only one token can end a text")
        stops += ids
    if tokenizer is not None and not options.ignore_eos:
        stops.append(tokenizer.eos_token_id)
    return tuple(dict.fromkeys(stops))


def _distribution(options: argparse.Namespace, stop_tokens: tuple[int, ...]) -> dict[str, Any]:
    """The settings that change what is sampled: verification is lossless, so drafting does not."""
    with warnings.catch_warnings():
        # Megatron's import tells at length which optional packages are missing
        warnings.simplefilter("ignore")
        from bebop_megatron.mcore.checkpoints import latest_iteration_dir

    names = ("temperature", "top_k", "top_p", "max_new_tokens", "prompt_tokens")
    checkpoint = latest_iteration_dir(options.load)
    return {
        "checkpoint": str(checkpoint.resolve()),
        **{name: getattr(options, name) for name in names},
        "stop_tokens": list(stop_tokens),
    }


def _seed(seed: int, done: int) -> int:
    """Other random numbers for every part, the same whether a run was interrupted or not."""
    return int.from_bytes(hashlib.sha256(f"{seed} {done}".encode()).digest()[:7])


def _agreed(output: CompletionFile | None, prompts: list[Prompt], samples: int) -> tuple[list[Job], int]:
    """What is to be done, and how many completions there are: rank 0 knows, and tells the others."""
    import torch

    told: list[Any] = [None if output is None else (output.missing(prompts, samples), output.num_done)]
    torch.distributed.broadcast_object_list(told, src=0)
    return told[0]


def _about(options: argparse.Namespace, results: list[GenerationResult], measured_in: dict[str, Any]) -> dict[str, Any]:
    """What a reader of the file may ask, of this run's part of it."""
    whole = merged(results)
    return {
        "command": {name: value for name, value in vars(options).items() if name != "run"},
        "completions": len(whole.sequences),
        "tokens": whole.num_tokens,
        "seconds": round(whole.seconds, 3),
        "accept_length": whole.accept_length,
        "accept_rate": whole.accept_rate if whole.num_verifications else None,
        "mean_gamma": whole.mean_gamma,
        "environment": measured_in,
    }


def generate(options: argparse.Namespace) -> dict[str, Any] | None:
    """Sample what is missing; returns the summary, or None where nothing was missing.

    Raises:
        ValueError: whatever is wrong with the settings, the prompts, the output so far or the checkpoint.
    """
    from bebop_megatron.data.tokenizer import load_tokenizer
    from bebop_megatron.evaluation.environment import environment
    from bebop_megatron.evaluation.loading import load_model

    # whatever is wrong with the small things shows before the model is built
    _config(options, ())
    measured_in = environment()
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else None
    prompts = read_prompt_records(options.prompts, tokenizer, options.prompt_tokens)
    stop_tokens = _stop_tokens(options, tokenizer)
    config = _config(options, stop_tokens)
    output = CompletionFile(options.output, _distribution(options, stop_tokens)) if is_first() else None
    loaded = load_model(options.load, with_mtp=config.gamma > 0, tensor_parallel=options.tensor_parallel)
    jobs, done = _agreed(output, prompts, options.samples)
    if not jobs:
        return None

    from bebop_megatron.evaluation.decode import SpeculativeDecoder
    from bebop_megatron.evaluation.surgery import data_parallel_group

    group = data_parallel_group(loaded.model)
    vocab_size = vocabulary(loaded, tokenizer, options.tokenizer)

    def decoder(seed: int) -> SpeculativeDecoder:
        seeded = replace(config, seed=seed)
        return SpeculativeDecoder(loaded.model, seeded, vocab_size=vocab_size, data_parallel_group=group)

    decoder(0).check([prompt.tokens for prompt in prompts])
    size = options.save_every or 8 * config.batch_size * (group.size() if group else 1)
    writer = Writer(tokenizer, stop_tokens, tokens=options.tokens, log_probs=options.log_probs)
    results: list[GenerationResult] = []
    about: dict[str, Any] = {}
    with _bar(done, len(jobs), not options.quiet and is_first()) as bar:
        for start in range(0, len(jobs), size):
            part = jobs[start : start + size]
            texts = [prompts[job.prompt].tokens for job in part]
            result = decoder(_seed(options.seed, done + start)).generate(texts)
            # counts are enough of a past part
            results.append(replace(result, records=None))
            about = _about(options, results, measured_in)
            if output is not None:
                sequences = zip(part, result.sequences, strict=True)
                output.append((writer.record(prompts[job.prompt], job.sample, s) for job, s in sequences), about)
            bar.set_postfix_str(f"{about['tokens'] / max(about['seconds'], 1e-9):,.0f} tokens/s")
            bar.update(len(part))
    return about | {"without_text": output.empty.total() if output else 0}


def _bar(done: int, missing: int, shown: bool) -> Any:
    from tqdm import tqdm

    # a log wants a line now and then, not ten per second
    interval = 0.1 if sys.stderr.isatty() else 30
    return tqdm(
        initial=done,
        total=done + missing,
        unit=" completions",
        file=sys.stderr,
        disable=not shown,
        mininterval=interval,
    )


def _summary(options: argparse.Namespace, about: dict[str, Any] | None) -> str:
    if about is None:
        return f"{options.output}: nothing is missing"
    text = (
        f"{options.output}: {about['completions']:,} completions, {about['tokens']:,} tokens, "
        f"{about['tokens'] / max(about['seconds'], 1e-9):,.0f} tokens/s"
    )
    if about["accept_rate"] is not None:
        text += (
            f"; accept length {about['accept_length']:.2f}, acceptance rate {about['accept_rate']:.1%} (rule "
            f"{options.rule}, gamma {options.gamma}, T={options.temperature:g}, attention {options.attention}, "
            f"{Path(options.prompts).name})"
        )
    if about["without_text"]:
        text += f"; {about['without_text']:,} ended at once and are left out"
    return text


def main(argv: Sequence[str] | None = None) -> None:
    """`argv` without the word `generate`."""
    parser = argparse.ArgumentParser(
        prog="python -m bebop_megatron.evaluation generate",
        description="Sample completions of prompts to JSON lines that can be trained on.",
    )
    _add_options(parser)
    options = parser.parse_args(argv)
    try:
        if is_first():
            check_writable(options.output, "--output")
            # two would write the same samples twice
            with held(options.output, "--output"):
                about = generate(options)
        else:
            about = generate(options)
    except ValueError as error:
        sys.exit(f"error: {error}")
    except OSError as error:
        sys.exit(f"error: {reason(error)}; what {options.output} holds is whole, the same command goes on from it")
    import torch

    if is_first() and not options.quiet:
        print(_summary(options, about))
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
