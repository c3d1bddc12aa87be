"""The learner: Megatron's model, optimizer, schedules and checkpoints, one training step for each batch of rollouts.

Every process of the learner is given the same rollouts and takes its data-parallel share. Nothing here knows of Ray.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.surgery import unwrapped
from bebop_megatron.launcher import rank_environment
from bebop_megatron.rl.batch import micro_batches, samples_of
from bebop_megatron.rl.config import RLConfig
from bebop_megatron.rl.grpo import log_prob_and_entropy, policy_loss
from bebop_megatron.rl.records import Event, Rollout
from bebop_megatron.rl.weights import Shards, export_shards

# the last line: a run may be made longer, which changes what the scheduler takes for its end
_FIXED = """--transformer-impl local --no-bias-gelu-fusion --ckpt-format torch_dist --weight-decay 0 --num-workers 0
--rerun-mode disabled --hidden-dropout 0 --attention-dropout 0 --eval-iters 0 --tokenizer-type NullTokenizer
--lr-decay-style constant --override-opt-param-scheduler""".split()


def _megatron_arguments(config: RLConfig, vocab_size: int, has_head: bool, resume: bool) -> list[str]:
    from bebop_megatron.platform import active
    from bebop_megatron.platform.flags import ON_CPU, UNFUSED

    checkpoints = str(Path(config.output) / "checkpoints")
    arguments = [
        *_FIXED,
        *UNFUSED,
        *(ON_CPU if active() else []),
        # NullTokenizer adds one for the end of a document
        *("--vocab-size", str(vocab_size - 1)),
        *("--train-iters", str(config.steps), "--seed", str(1 + config.seed)),
        *("--micro-batch-size", str(config.micro_batch_size), "--global-batch-size", str(config.batch_size)),
        *("--lr", str(config.lr), "--clip-grad", str(config.clip_grad)),
        *("--save", checkpoints, "--save-interval", "1", "--pretrained-checkpoint", config.load),
        *(["--load", checkpoints] if resume else []),
    ]
    if has_head:
        arguments += ["--mtp-loss", config.head_loss, "--mtp-attention", config.attention, "--mtp-metrics", "off"]
        arguments += ["--mtp-loss-scaling-factor", "1.0", "--mtp-loss-temperature", str(config.temperature)]
        if config.freeze_schedule:
            arguments += ["--mtp-freeze-schedule", config.freeze_schedule]
        if config.mtp_lr is not None:
            arguments += ["--mtp-lr", str(config.mtp_lr)]
        if config.mtp_clip_grad is not None:
            arguments += ["--mtp-clip-grad", str(config.mtp_clip_grad)]
    return [*arguments, *config.megatron]


def _parse(config: RLConfig, argv: list[str], resume_step: int) -> Any:
    """Megatron's arguments: the model's shape from the checkpoint, everything else from us and from the user.

    Raises:
        ValueError: a checkpoint without arguments; settings that the loop does not support.
    """
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.checkpointing import load_args_from_checkpoint
    from megatron.training.global_vars import set_global_variables

    from bebop_megatron.evaluation.loading import take_architecture
    from bebop_megatron.mcore.arguments import add_mtp_arguments

    before, sys.argv = sys.argv, [sys.argv[0], *argv]
    try:
        args = parse_args(add_mtp_arguments)
    finally:
        sys.argv = before
    loaded = load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
    if not isinstance(loaded, tuple):
        raise ValueError(f"{config.load} does not hold the arguments it was trained with: its shape is unknown")
    args, trained = loaded
    take_architecture(args, trained)
    # each step brings its own length
    args.seq_length = trained.max_position_embeddings
    args.iteration = 0
    if args.context_parallel_size > 1:
        raise ValueError("the learner does not cut completions over ranks: drop --context-parallel-size")
    if args.calculate_per_token_loss:
        raise ValueError("the step's tokens are counted already: drop --calculate-per-token-loss")
    if resume_step:
        args.ckpt_step = resume_step
    validate_args(args)
    set_global_variables(args)
    return args


class Learner:
    """One process of the learner; `rank` and `world` are those of the process group, which meets at `port`.

    Raises:
        ValueError: whatever is wrong with the checkpoint or the arguments.
    """

    def __init__(
        self, config: RLConfig, vocab_size: int, *, resume_step: int = 0, rank: int = 0, world: int = 1, port: int = 0
    ) -> None:
        from bebop_megatron.mcore import install
        from bebop_megatron.mcore.checkpoints import has_mtp_weights
        from bebop_megatron.platform import enter

        torch.set_num_threads(config.threads)
        self.config, self.vocab_size, self.rank = config, vocab_size, rank
        self.name, self.done = f"learner-{rank}", resume_step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            if not torch.cuda.is_available():
                enter()
            install()
        os.environ |= rank_environment(rank, world, port)
        self.has_head = has_mtp_weights(config.load)
        argv = _megatron_arguments(config, vocab_size, self.has_head, resume_step > 0)
        self._build(_parse(config, argv, resume_step))

    def _build(self, args: Any) -> None:
        from megatron.core.distributed import finalize_model_grads
        from megatron.core.enums import ModelType
        from megatron.core.pipeline_parallel import get_forward_backward_func
        from megatron.core.process_groups_config import ProcessGroupCollection
        from megatron.training import get_timers, training
        from megatron.training.argument_utils import (
            gpt_config_from_args,
            hybrid_config_from_args,
            pretrain_cfg_container_from_args,
        )
        from megatron.training.initialize import initialize_megatron

        from bebop_megatron.pretrain import embedding_ranks, prepare

        model_config = hybrid_config_from_args(args) if args.hybrid_layer_pattern else gpt_config_from_args(args)
        prepare(args, model_config)
        tied = model_config.share_embeddings_and_output_weights
        initialize_megatron(get_embedding_ranks=lambda ranks: embedding_ranks(model_config.transformer, ranks, tied))
        self.args, self.training = args, training
        self.chunks, self.optimizer, self.scheduler = training.setup_model_and_optimizer(
            ModelType.encoder_or_decoder,
            cfg_container=pretrain_cfg_container_from_args(args, model_config),
            pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
        )
        self.model = unwrapped(self.chunks[-1])
        self.groups = self.model.pg_collection
        for chunk in self.chunks:
            chunk.train()
        self.model_config = self.model.config
        # what Megatron's own loop sets before its first step
        self.model_config.grad_scale_func = self.optimizer.scale_loss
        self.model_config.timers = get_timers()
        if self.model_config.finalize_model_grads_func is None:
            self.model_config.finalize_model_grads_func = finalize_model_grads
        if args.overlap_grad_reduce:
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.model_config.no_sync_func = no_sync[0] if len(no_sync) == 1 else no_sync
        self.forward_backward = get_forward_backward_func()

    def step(self, step: int, rollouts: Sequence[Rollout]) -> dict[str, Any]:
        """Train on the rollouts of a step: one optimizer step.

        The processes of the last pipeline stage return what the log says, others an empty part of it.

        Collectives: Megatron's own of a training step.
        """
        began, self.done = time.time(), step + 1
        samples = samples_of(rollouts, step, self.config.normalise)
        replicas, rank = self.groups.dp.size(), self.groups.dp.rank()
        batches = micro_batches(
            samples,
            micro_batch_size=self.args.micro_batch_size,
            replicas=replicas,
            rank=rank,
            multiple=self.groups.tp.size(),
            one_length=self.groups.pp.size() > 1,
        )
        # pipeline stages exchange activations of this length
        self.args.seq_length = max(batch["tokens"].shape[1] for batch in batches)
        device = next(self.model.parameters()).device
        iterators: Any = [
            iter([{name: value.to(device) for name, value in batch.items()} for batch in batches]) for _ in self.chunks
        ]
        reduced, skipped, *_, grad_norm, _, _ = self.training.train_step(
            self._forward,
            iterators if len(iterators) > 1 else iterators[0],
            self.chunks,
            self.optimizer,
            self.scheduler,
            self.model_config,
            self.forward_backward,
            iteration=step,
        )
        end = time.time()
        return {
            "values": {name: float(value) for name, value in reduced.items()} | self._head_values(),
            "grad_norm": None if grad_norm is None else float(grad_norm),
            "skipped": bool(skipped),
            "seconds": end - began,
            "event": Event(self.name, "train", began, end, step),
        }

    def _head_values(self) -> dict[str, float]:
        from bebop_megatron.mcore.attachment import attached

        attachment = attached(self.model_config)
        if attachment is None or attachment.loss_sums is None:
            return {}
        (total, count), attachment.loss_sums = attachment.loss_sums.tolist(), None
        return {"mtp_loss": total / count} if count else {}

    def _forward(self, data_iterator: Iterator[dict[str, Tensor]], model: Any) -> tuple[Tensor, partial[Any]]:
        batch = next(data_iterator)
        tokens = batch["tokens"]
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        # without labels: the model returns logits, and the mask is one of tokens
        output = model(tokens, positions, None, labels=None, loss_mask=batch["loss_mask"])
        return output, partial(self._loss, batch)

    def _loss(self, batch: dict[str, Tensor], logits: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        config = self.config
        log_prob, entropy = log_prob_and_entropy(
            logits[:, :-1],
            batch["tokens"][:, 1:],
            vocab_size=self.vocab_size,
            temperature=config.temperature,
            group=self.groups.tp if self.groups.tp.size() > 1 else None,
        )
        weight = batch["weight"][:, 1:]
        out = policy_loss(
            log_prob,
            entropy,
            batch["behaviour"][:, 1:],
            batch["advantage"][:, None],
            weight,
            truncation=config.truncation,
            kl=config.kl,
            entropy_bonus=config.entropy_bonus,
        )
        total = weight.sum()
        seen = {"loss": out.loss, "entropy": out.entropy, "importance": out.importance, "kl": out.kl}
        seen["truncated"] = out.truncated
        return out.loss, {name: torch.stack([value.detach(), total]) for name, value in seen.items()}

    def export(self) -> tuple[Event, Shards]:
        """This process's weights for the workers: what training can have moved since the run began."""
        began = time.time()
        parts = {"backbone"} if self.config.strategy == "frozen" else {"backbone", "mtp"}
        shards = export_shards(self.chunks, frozenset(parts))
        return Event(self.name, "export", began, time.time(), self.done), shards

    def save(self, step: int) -> Event:
        """Write Megatron's checkpoint of `step` completed steps. Collectives: Megatron's own."""
        from megatron.training.checkpointing import save_checkpoint

        began = time.time()
        save_checkpoint(step, self.chunks, self.optimizer, self.scheduler, 0)
        return Event(self.name, "save", began, time.time(), step - 1)
