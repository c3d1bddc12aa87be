"""What cannot work says so before training starts, with what to do instead.

Each of these was accepted by Megatron and then hung, failed late, or trained on wrong numbers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

from bebop_megatron.mcore import compat
from bebop_megatron.mcore.checkpoints import starting_dir


def check_config(config: Any) -> None:
    """Refuse a Megatron model config that cannot train MTP heads.

    Raises:
        ValueError: MTP layers on pipeline rank 0; a virtual pipeline on two ranks without overlapped p2p; fp8 or fp4
            without Transformer Engine; latent attention under tensor parallelism without sequence parallelism.
    """
    stages = config.pipeline_model_parallel_size
    if stages > 1 and 0 in get_mtp_ranks(list(range(stages)), config):
        raise ValueError(
            "--pipeline-model-parallel-layout puts MTP layers (m) on pipeline rank 0, where the first batch hangs: "
            f"give every m to a stage of another rank. With {stages} ranks, stages 1, {stages + 1}, {2 * stages + 1}, "
            "... of the layout belong to rank 0"
        )
    if config.virtual_pipeline_model_parallel_size and stages == 2 and not config.overlap_p2p_comm:
        raise ValueError(
            "a virtual pipeline on two ranks needs overlapped point-to-point communication: both neighbours are the "
            "same rank, and batched messages are taken for each other. Drop --no-overlap-p2p-communication "
            "(in a config: overlap_p2p_comm=True, batch_p2p_comm=False)"
        )
    for name in ("fp8", "fp4"):
        if getattr(config, name, None) and not compat.have_transformer_engine():
            raise ValueError(
                f"{name}={getattr(config, name)!r} needs Transformer Engine, which is not installed: without it "
                f"Megatron ignores the setting and trains in {config.params_dtype}. Install the te extra, or drop "
                f"--{name}-format"
            )
    if config.multi_latent_attention and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise ValueError(
            "multi-latent attention under tensor parallelism needs --sequence-parallel: without it each rank keeps "
            "only its own heads' part of the gradient of the rotary key"
        )


def check_hybrid(pattern: str, layout: Any) -> None:
    """Refuse a HybridModel whose MTP layers are not on the stage that computes the loss.

    Raises:
        ValueError: the layout gives MTP layers a stage of their own, or the pattern leaves the last stage to them.
    """
    main, _, heads = pattern.partition("/")
    if not heads:
        return
    text = "" if layout is None else str(getattr(layout, "input_data", layout))
    last = text.rsplit("|", 1)[-1]
    if "m" in text and ("m" not in last or "t" not in last):
        raise ValueError(
            f"--pipeline-model-parallel-layout {text}: HybridModel computes its MTP layers on the last stage, together "
            "with the last backbone layers. Drop the layout and mark the stages with | in --hybrid-layer-pattern, for "
            "example G-G-|G-*-/*-"
        )
    if "|" in main and not main.rsplit("|", 1)[1]:
        raise ValueError(
            f"--hybrid-layer-pattern {pattern}: its last stage has no backbone layer. HybridModel has no stage of MTP "
            "layers alone: move the last | one layer or more to the left"
        )


def _check_optimizer(args: Any, checkpoint: Path, saved: compat.SavedLayout) -> None:
    if not args.use_distributed_optimizer or args.finetune or args.no_load_optim:
        return
    wanted = (args.tensor_model_parallel_size, args.pipeline_model_parallel_size)
    if saved.optimizer not in (None, *compat.RESHARDABLE) and (saved.tensor, saved.pipeline) != wanted:
        raise ValueError(
            f"{checkpoint} was saved with tensor x pipeline size {saved.tensor} x {saved.pipeline} and the optimizer "
            f"format {saved.optimizer}, which cannot be cut into {wanted[0]} x {wanted[1]}. Resume once under the old "
            "sizes with --dist-ckpt-optim-fully-reshardable and save; or start the optimizer anew with --no-load-optim"
        )


def _check_vocabulary(args: Any, checkpoint: Path, saved: compat.SavedLayout) -> None:
    padded, tensor = args.padded_vocab_size, args.tensor_model_parallel_size
    if None in (padded, saved.padded_vocab) or padded == saved.padded_vocab or saved.padded_vocab % tensor:
        return
    raise ValueError(
        f"the vocabulary is padded to {padded} under --tensor-model-parallel-size {tensor}, to {saved.padded_vocab} "
        f"in {checkpoint}: the LM head's other rows would be untrained and take probability from every token. Keep the "
        f"padding: --make-vocab-size-divisible-by {saved.padded_vocab // tensor}"
    )


def _planned_schedule(args: Any) -> dict[str, tuple[str, Any]]:
    """What Megatron will set its learning rate schedule to, by the names in its state: -> (flags, value).

    Lengths are in samples, as Megatron counts them.
    """
    batch = args.global_batch_size
    decay = (args.lr_decay_iters or args.train_iters) * batch
    fraction = args.lr_warmup_fraction
    return {
        "max_lr": ("--lr", args.lr),
        "min_lr": ("--min-lr", args.min_lr),
        "lr_warmup_steps": (
            "warm-up, --lr-warmup-iters or --lr-warmup-fraction",
            args.lr_warmup_iters * batch if fraction is None else fraction * decay,
        ),
        "lr_decay_steps": ("length, --lr-decay-iters or else --train-iters", decay),
        "lr_decay_style": ("--lr-decay-style", args.lr_decay_style),
        "start_wd": ("--start-weight-decay or --weight-decay", args.start_weight_decay),
        "end_wd": ("--end-weight-decay or --weight-decay", args.end_weight_decay),
        "wd_incr_steps": ("length of the weight decay, --train-iters", args.train_iters * batch),
        "wd_incr_style": ("--weight-decay-incr-style", args.weight_decay_incr_style),
    }


def _check_schedule(args: Any, checkpoint: Path, saved: compat.SavedLayout) -> None:
    # Megatron takes the schedule up only from --load; runs counted in samples are left to its own assertion
    resumes = args.load is not None and checkpoint == Path(args.load) and not (args.finetune or args.no_load_optim)
    if not resumes or saved.schedule is None or not args.train_iters:
        return
    # upcycling takes a dense model's weights alone
    if args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler or args.moe_use_upcycling:
        return
    wrong = [
        f"{flags}: {saved.schedule[name]} there, {value} here"
        for name, (flags, value) in _planned_schedule(args).items()
        if name in saved.schedule and saved.schedule[name] != value
    ]
    if wrong:
        raise ValueError(
            f"{checkpoint} was trained under another schedule of learning rate and weight decay (lengths in samples): "
            f"{'; '.join(wrong)}. Give --override-opt-param-scheduler to go on under the new one, or "
            "--use-checkpoint-opt-param-scheduler to keep the old one"
        )


def check_resuming(args: Any, checkpoint: Path | None) -> None:
    """Refuse a checkpoint that this layout would read without an error of Megatron's, or with one after minutes.

    Raises:
        ValueError: a flat optimizer state under another tensor or pipeline size; a vocabulary padded differently;
            another schedule of the learning rate.
    """
    if checkpoint is None:
        return
    saved = compat.checkpoint_layout(starting_dir(checkpoint, args.ckpt_step))
    if saved is not None:
        _check_optimizer(args, checkpoint, saved)
        _check_vocabulary(args, checkpoint, saved)
        _check_schedule(args, checkpoint, saved)


# what a checkpoint's tensors have their shapes from; how the run trains them may change
_SHAPE = (
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "num_experts",
    "moe_ffn_hidden_size",
)


def check_same_model(args: Any, saved: Any) -> None:
    """Refuse a checkpoint of another model than the flags describe.

    Raises:
        ValueError: with every flag that differs.
    """
    names = set(_SHAPE if args.hybrid_layer_pattern else ("num_layers", *_SHAPE))
    # flags that Megatron takes and nothing uses
    if getattr(args, "num_experts", None):
        names -= {"ffn_hidden_size"}
    if getattr(args, "multi_latent_attention", False):
        names -= {"kv_channels", "num_query_groups"}
    pairs = [
        (name, getattr(saved, name, None), getattr(args, name, None))
        for name in ("num_layers", *_SHAPE)
        if name in names
    ]
    # a flag that one side leaves to its default is no difference
    wrong = [(name, old, new) for name, old, new in pairs if None not in (old, new) and old != new]
    if wrong:
        told = "; ".join(f"--{name.replace('_', '-')} {old} there, {new} here" for name, old, new in wrong)
        raise ValueError(f"the checkpoint to start from is of another model: {told}")


def check_arguments(args: Any, config: Any, checkpoint: Path | None) -> None:
    """Every refusal that a command line can earn; `config` is Megatron's transformer config.

    Raises:
        ValueError: in the user's words.
    """
    if config.mtp_num_layers:
        if args.hybrid_layer_pattern:
            check_hybrid(args.hybrid_layer_pattern, args.pipeline_model_parallel_layout)
        check_config(config)
    if checkpoint is not None:
        check_same_model(args, compat.saved_arguments(starting_dir(checkpoint, args.ckpt_step)))
    check_resuming(args, checkpoint)
