"""`torchrun -m bebop_megatron.pretrain <any Megatron arguments> --mtp-loss tv ...`

Megatron's own training loop, arguments, data, optimizer and checkpoints, with our objective behind its MTP loss.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from bebop_megatron.launcher import is_first
from bebop_megatron.mcore.checkpoints import is_checkpoint, require_mtp_weights, require_whole
from bebop_megatron.outputs import check_writable, hold


def _print_once(message: str) -> None:
    from megatron.training import print_rank_0

    print_rank_0(f"bebop_megatron: {message}")


def embedding_ranks(config: Any, pp_ranks: list[int], tied: bool) -> list[int]:
    """Pipeline ranks that hold a copy of the word embedding: the MTP stage is one of them, or its copy drifts.

    A last stage with neither MTP layers nor a tied LM head is none: Megatron would add the LM head's gradient to the
    embedding's.
    """
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

    ranks = {pp_ranks[0], pp_ranks[-1]} if tied else {pp_ranks[0]}
    if len(pp_ranks) > 1 and config.mtp_num_layers:
        ranks |= set(get_mtp_ranks(pp_ranks, config))
    return sorted(ranks)


def _starting_checkpoint(args: Any) -> Path | None:
    """The checkpoint Megatron will start from: --load if there is one yet, else --pretrained-checkpoint."""
    for root in (args.load, args.pretrained_checkpoint):
        if root is not None and is_checkpoint(root):
            return Path(root)
    return None


def _check_data_files(args: Any) -> None:
    """Refuse a data prefix without its two files before anything is built.

    Raises:
        ValueError: with the file that is missing, cut short, or of another build.
    """
    from bebop_megatron.data.build import MASK_SUFFIX
    from bebop_megatron.data.indexed import require_whole_pair

    for option in ("data_path", "train_data_path", "valid_data_path", "test_data_path"):
        for prefix in getattr(args, option) or ():
            # a blend alternates weights and prefixes; object stores are Megatron's to check
            if prefix.replace(".", "", 1).isdigit() or "://" in prefix:
                continue
            if args.sft:
                if not Path(prefix).is_file():
                    raise ValueError(f"--{option.replace('_', '-')} {prefix}: give the .jsonl file of conversations")
                continue
            for suffix in (".bin", ".idx"):
                if not Path(prefix + suffix).is_file():
                    raise ValueError(
                        f"--{option.replace('_', '-')} {prefix}: {prefix}{suffix} does not exist. Give the prefix of a "
                        ".bin/.idx pair, for example one made by python -m bebop_megatron.data build"
                    )
            if is_first():
                require_whole_pair(prefix)
                if Path(prefix + MASK_SUFFIX + ".idx").is_file():
                    require_whole_pair(prefix + MASK_SUFFIX)


def _may_be_without_checkpoint(folder: str, args: Any) -> bool:
    """Whether a run may load from `folder` though we see no checkpoint in it."""
    # with a step Megatron asks for that alone, and fails without it; object stores are Megatron's to check
    if args.non_persistent_ckpt_type is not None or args.ckpt_step or "://" in folder:
        return True
    # where this run's own checkpoints will be, none yet is how it begins
    return args.save is not None and Path(args.save).resolve() == Path(folder).resolve()


def _check_folders(args: Any) -> Any:
    """See that what will be loaded is whole, and that nobody else writes where we save; returns the lock.

    Raises:
        ValueError: no checkpoint where one is named, a damaged one, a folder that cannot be written, another run that
            saves there.
    """
    if not is_first():
        return None
    start = _starting_checkpoint(args)
    if start is None and args.pretrained_checkpoint:
        raise ValueError(f"--pretrained-checkpoint {args.pretrained_checkpoint} is no Megatron checkpoint")
    if start is None and args.load and not _may_be_without_checkpoint(args.load, args):
        raise ValueError(
            f"--load {args.load} holds no Megatron checkpoint, and training would start from random weights. Name one, "
            "or drop --load; a run that is to go on from its own checkpoints has one folder for --load and --save"
        )
    if start is not None and args.ckpt_step is None:
        require_whole(start)
    if not args.save:
        return None
    check_writable(args.save, "--save", is_folder=True)
    return hold(args.save, f"--save {args.save}")


def start() -> None:
    """Begin a program: the CPU platform where the command line asks for gloo, and our code behind Megatron's names.

    Call it before the command line is parsed. Calling it again does nothing.

    Raises:
        SystemExit: there is no CUDA device, and the command line does not ask for gloo.
    """
    from bebop_megatron.platform import maybe_enter_cpu

    if not {"-h", "--help"} & set(sys.argv):
        try:
            maybe_enter_cpu(sys.argv[1:])
        except RuntimeError as error:
            sys.exit(f"error: {error}")
    from bebop_megatron.mcore import install

    install()


def prepare(args: Any, config: Any) -> None:
    """Attach our objective to Megatron's model config and queue our freeze, as the flags say.

    Raises:
        ValueError: flags that do not go together, a checkpoint without MTP weights.
    """
    from megatron.training import get_tokenizer

    from bebop_megatron.config import given
    from bebop_megatron.mcore.compat import write_checkpoints_in_process
    from bebop_megatron.mcore.flags import Flags
    from bebop_megatron.mcore.freeze_checks import schedule_change
    from bebop_megatron.mcore.freeze_install import install_freezing_loop, prepare_chunks
    from bebop_megatron.mcore.freeze_state import follow_schedule
    from bebop_megatron.mcore.metrics_start import start_metrics
    from bebop_megatron.mcore.training_loop import install_training_loop

    flags, checkpoint = Flags.of(args), _starting_checkpoint(args)
    freezing, schedule = flags.freezing, flags.freezing.parsed_schedule
    flags.apply(args, config, get_tokenizer().vocab_size, checkpoint)
    if not args.async_save:
        write_checkpoints_in_process()
    if flags.objective.loss is None and given(flags.metrics):
        _print_once(f"warning: {', '.join(given(flags.metrics))}: no effect without --mtp-loss")
    keep_best = start_metrics(config.transformer, args, flags.attention.mode)
    install_training_loop(flags.objective, flags.metrics, keep_best)
    change = schedule_change(freezing, args)
    if change is not None:
        _print_once(f"warning: {change}")
    if not freezing.by_parts:
        return

    if "backbone" in schedule.phase(0).frozen and checkpoint is not None:
        require_mtp_weights(checkpoint)
    state = follow_schedule(config.transformer, schedule)
    config.pre_wrap_hooks.append(lambda chunks: prepare_chunks(chunks, state))
    install_freezing_loop(freezing)
    _print_once(f"freeze schedule\n{schedule.table()}")


def _model_config(args: Any) -> Any:
    """Megatron's model config, prepared.

    Raises:
        ValueError: as `prepare`; missing data files; an evaluation that Megatron would fail to plan.
    """
    from megatron.training.argument_utils import gpt_config_from_args, hybrid_config_from_args

    from bebop_megatron.mcore.batches import prepare_packed_arguments

    _check_data_files(args)
    if args.eval_interval is None and not (args.full_validation or args.skip_train):
        raise ValueError("--eval-interval is missing: give one above --train-iters to evaluate at the end only")
    prepare_packed_arguments(args)
    config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
    prepare(args, config)
    return config


def main() -> None:
    """Run Megatron's training loop on the command line's arguments."""
    start()
    from megatron.core.enums import ModelType
    from megatron.training import get_tensorboard_writer, pretrain
    from megatron.training.argument_utils import pretrain_cfg_container_from_args
    from megatron.training.arguments import parse_and_validate_args

    from bebop_megatron.mcore.arguments import add_mtp_arguments, refusal

    try:
        args = parse_and_validate_args(extra_args_provider=add_mtp_arguments)
    except (AssertionError, ValueError) as error:
        # Megatron checks most flags by assertions, some of them without words
        sys.exit(f"error: {refusal(error)}")
    from bebop_megatron.mcore.batches import forward_step, make_dataset_provider

    try:
        # until the end of the process
        lock = _check_folders(args)  # noqa: F841
        config = _model_config(args)
    except ValueError as error:
        sys.exit(f"error: {error}")
    try:
        pretrain(
            pretrain_cfg_container_from_args(args, config),
            make_dataset_provider(config.transformer),
            ModelType.encoder_or_decoder,
            forward_step,
            get_embedding_ranks=lambda ranks: embedding_ranks(
                config.transformer, ranks, config.share_embeddings_and_output_weights
            ),
        )
    finally:
        # its thread is not waited for when the process ends, and the last evaluation would be missing
        if (board := get_tensorboard_writer()) is not None:
            board.flush()


if __name__ == "__main__":
    main()
