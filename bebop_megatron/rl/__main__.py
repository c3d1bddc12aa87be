"""`python -m bebop_megatron.rl`: asynchronous GRPO of a Megatron checkpoint, with speculative rollouts."""

from __future__ import annotations

import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from bebop_megatron.outputs import check_writable, reason
from bebop_megatron.rl.config import RLConfig

# field of a step, title, width, format
_COLUMNS = (
    ("step", "step", 5, "d"),
    ("reward", "reward", 7, ".3f"),
    ("entropy", "entropy", 8, ".3f"),
    ("accept_length", "accept len", 11, ".2f"),
    ("accept_rate", "rate", 6, ".2f"),
    ("entropy_part", "by entropy", 11, ".2f"),
    ("mismatch_part", "mismatch", 9, ".2f"),
    ("completion_tokens", "length", 7, ".1f"),
    ("rollout_seconds", "rollout s", 10, ".2f"),
    ("learner_seconds", "learner s", 10, ".2f"),
    ("step_seconds", "step s", 7, ".2f"),
    ("tokens_per_second", "tokens/s", 9, ".0f"),
    ("staleness", "stale", 6, ".1f"),
)


def _header() -> str:
    return " ".join(title.rjust(width) for _, title, width, _ in _COLUMNS)


def _line(row: dict[str, Any]) -> str:
    return " ".join(
        ("-" if row[name] is None else format(row[name], spec)).rjust(width) for name, _, width, spec in _COLUMNS
    )


def _check(config: RLConfig) -> tuple[int, int]:
    """Look at checkpoint and task before anything is started: -> size of the vocabulary, bytes of the weights.

    Raises:
        ValueError: in the user's words.
    """
    from bebop_megatron.mcore.checkpoints import has_mtp_weights, latest_iteration_dir, require_whole, weight_bytes
    from bebop_megatron.mcore.compat import saved_arguments
    from bebop_megatron.rl.rollout import ProblemList
    from bebop_megatron.rl.tasks import make_task

    check_writable(config.output, "--output", is_folder=True)
    require_whole(config.load)
    task = make_task(config.task)
    codec = task.codec(config.tokenizer)
    trained = saved_arguments(latest_iteration_dir(config.load))
    if trained is None:
        raise ValueError(f"{config.load} does not hold the arguments it was trained with: its shape is unknown")
    if not has_mtp_weights(config.load) and (config.rule != "off" or config.strategy != "frozen"):
        raise ValueError(f"{config.load} has no MTP head: give --rule off, or a checkpoint with mtp.* weights")
    if codec.vocab_size > trained.padded_vocab_size:
        raise ValueError(
            f"the task has {codec.vocab_size:,} tokens, the checkpoint {trained.padded_vocab_size:,}: is --tokenizer "
            "the one that it was trained with?"
        )
    for problem in ProblemList(task, config.seed).get(0, config.groups):
        needed = len(codec.encode(problem.prompt)) + config.max_new_tokens + config.drafts + 1
        if needed > trained.max_position_embeddings:
            raise ValueError(
                f"a prompt and --max-new-tokens {config.max_new_tokens} need {needed:,} positions, and the model has "
                f"{trained.max_position_embeddings:,}"
            )
    return codec.vocab_size, weight_bytes(config.load)


def train(config: RLConfig, report: Callable[[dict[str, Any]], None]) -> None:
    """Run `config` to its last step, from where an earlier run of it stopped; `report` is called with every step.

    Raises:
        ValueError: in the user's words.
    """
    from bebop_megatron.rl.actors import cluster
    from bebop_megatron.rl.loop import Loop

    vocab_size, size = _check(config)
    with cluster(config, size) as ray:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        loop = Loop(config, vocab_size, ray, report)
        print(f"{config.output}: from step {loop.resumed_at} to {config.steps}", flush=True)
        loop.run()


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    started = False

    def report(row: dict[str, Any]) -> None:
        nonlocal started
        if not started:
            print(_header())
        started = True
        print(_line(row), flush=True)
        if row["failed_rewards"]:
            print(f"  {row['failed_rewards']} rewards failed: {row['reward_error']}", file=sys.stderr)

    try:
        config = RLConfig.from_arguments(sys.argv[1:] if argv is None else argv)
        with warnings.catch_warnings():
            # Megatron's import tells at length which optional packages are missing
            warnings.simplefilter("ignore")
            train(config, report)
    except ValueError as error:
        # an error of another process carries its traceback; the cause is what the user needs
        sys.exit(f"error: {getattr(error, 'cause', error)}")
    except OSError as error:
        sys.exit(f"error: {reason(error)}; the same command goes on from the last checkpoint")
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
