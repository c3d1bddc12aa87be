"""Small models of every kind Megatron builds, cut up in every way four CPU processes can hold; results come as data.

Weights are set by global parameter name and cut per layout, so each layout starts from the same model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.mcore.feature_cases import Case, make_config
from tests.mcore.groups import join_groups
from tests.mcore.weights import direction, global_name, same_weights_everywhere, whole
from tests.worlds import run_worlds

VOCAB, LENGTH, SEQUENCES = 64, 12, 4


def global_batch() -> dict[str, torch.Tensor]:
    """Sequences with no valid anchor, one, and many."""
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, VOCAB, (SEQUENCES, LENGTH + 1), generator=generator)
    mask = torch.zeros(SEQUENCES, LENGTH)
    mask[1, 5:8] = 1
    mask[2] = 1
    mask[3] = (torch.rand(LENGTH, generator=generator) < 0.8).float()
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": mask,
        "position_ids": torch.arange(LENGTH).expand(SEQUENCES, -1).contiguous(),
    }


def _objective(case: Case, config: Any) -> None:
    from bebop_megatron.config import ObjectiveConfig
    from bebop_megatron.mcore import attach

    if case.loss is None:
        config.mtp_detach_heads = True
    else:
        attach(config, ObjectiveConfig(loss=case.loss, joint=case.joint))


def build(case: Case) -> list[Any]:
    """The model chunks of this rank, with Transformer Engine's parameter names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    from bebop_megatron.mcore.mtp_attention import set_mtp_attention
    from bebop_megatron.pretrain import embedding_ranks

    config, extra = make_config(case)
    # before the model is built: Megatron then gives MTP weights a clipping norm of their own
    _objective(case, config)
    if case.attention is not None:
        set_mtp_attention(config, case.attention)
    tied = bool(extra["tied"])
    join_groups(
        case.tp,
        case.pp,
        embedding_ranks=lambda ranks: embedding_ranks(config, ranks, tied),
        virtual_pipeline_model_parallel_size=case.vpp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
    )
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    chunks = []
    for stage in range(case.vpp or 1):
        vp_stage = stage if case.vpp else None
        common = {
            "config": config,
            "vocab_size": VOCAB,
            "max_sequence_length": LENGTH,
            "pre_process": parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
            "post_process": parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
            "position_embedding_type": "rope",
            "share_embeddings_and_output_weights": tied,
            "vp_stage": vp_stage,
        }
        if extra["pattern"]:
            chunk = HybridModel(hybrid_stack_spec=hybrid_stack_spec, hybrid_layer_pattern=extra["pattern"], **common)
        else:
            decoder = get_gpt_decoder_block_spec(config, use_transformer_engine=True, vp_stage=vp_stage)
            last = get_gpt_decoder_layer_specs(config, use_transformer_engine=True, normalization="RMSNorm")[-1]
            head = get_gpt_mtp_block_spec(config, last, use_transformer_engine=True, vp_stage=vp_stage)
            chunk = GPTModel(transformer_layer_spec=decoder, mtp_block_spec=head, **common)
        same_weights_everywhere(chunk, scale=0.25)
        for name, parameter in chunk.named_parameters():
            parameter.requires_grad_(not case.frozen or name.startswith("mtp."))
            if case.nudge and name.startswith("mtp.layers.0."):
                parameter.data += case.nudge * direction(name, parameter.shape)
        chunks.append(chunk)
    return chunks


def make_forward_step(denominator: float, labels_given: bool) -> Any:
    """Megatron's forward step; the language-model loss is normalised by a constant, so that it fits every layout."""

    def forward_step(data_iterator: Any, model: Any) -> Any:
        batch = next(data_iterator)
        if labels_given:
            known = {"labels": batch["labels"], "loss_mask": batch["loss_mask"]}
        else:
            batch = batch[0]
            # without labels a mask says which tokens may be targets: the next position's label is this token
            known = {"loss_mask": batch["loss_mask"].roll(1, 1)}
        if "cu_seqlens" in batch:
            from megatron.core.packed_seq_params import PackedSeqParams

            bounds = batch["cu_seqlens"][0]
            known["packed_seq_params"] = PackedSeqParams(
                qkv_format="thd", cu_seqlens_q=bounds, cu_seqlens_kv=bounds, max_seqlen_q=LENGTH, max_seqlen_kv=LENGTH
            )
        out = model(batch["tokens"], batch["position_ids"], None, **known)

        def loss(output: torch.Tensor) -> Any:
            from megatron.core.utils import get_model_config

            if not labels_given:
                output = torch.nn.functional.cross_entropy(output.transpose(1, 2), batch["labels"], reduction="none")
            total = (output.float() * batch["loss_mask"]).sum()
            if get_model_config(model).calculate_per_token_loss:
                return total, batch["loss_mask"].sum().to(torch.int), {"lm": total.detach()}
            return total / denominator, {"lm": total.detach()}

        return out, loss

    return forward_step


def wrap(case: Case, chunks: list[Any]) -> list[Any]:
    """Megatron's data-parallel wrapper, with the functions its training loop would set."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads

    config = chunks[0].config
    settings = {"use_distributed_optimizer": case.optimizer.get("use_distributed_optimizer", False)} | case.ddp
    ddp = DistributedDataParallelConfig(**settings)
    wrapped = [
        DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0) for index, chunk in enumerate(chunks)
    ]
    one = lambda functions: functions if len(functions) > 1 else functions[0]  # noqa: E731
    config.finalize_model_grads_func = finalize_model_grads
    if ddp.overlap_grad_reduce:
        config.no_sync_func = one([chunk.no_sync for chunk in wrapped])
    if ddp.overlap_param_gather and ddp.align_param_gather:
        config.param_sync_func = one([chunk.start_param_sync for chunk in wrapped])
    for chunk in wrapped:
        chunk.zero_grad_buffer()
    return wrapped


def forward_backward(case: Case, wrapped: list[Any]) -> list[dict[str, torch.Tensor]]:
    """Megatron's schedule over this rank's part of the global batch."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    batch, dp = global_batch(), parallel_state.get_data_parallel_world_size()
    if case.mode in ("no-labels", "last-masked"):
        batch["loss_mask"][:, -1] = 0
    per_rank = SEQUENCES // dp
    first, count = parallel_state.get_data_parallel_rank() * per_rank, per_rank // case.micro_batch
    batches = [
        {k: v[first + i * case.micro_batch : first + (i + 1) * case.micro_batch] for k, v in batch.items()}
        for i in range(count)
    ]
    if case.packed:
        for item in batches:
            item["cu_seqlens"] = torch.tensor([[0, 5, LENGTH]], dtype=torch.int32)
    if case.mode == "no-labels":
        # a reinforcement-learning loop's own form, which cannot be counted ahead
        batches = [(item,) for item in batches]
    iterators = [iter(batches) for _ in wrapped]
    return get_forward_backward_func()(
        forward_step_func=make_forward_step(float(batch["loss_mask"].sum()) / (dp * count), case.mode != "no-labels"),
        data_iterator=iterators if len(wrapped) > 1 else iterators[0],
        model=wrapped if len(wrapped) > 1 else wrapped[0],
        num_microbatches=count,
        seq_length=LENGTH,
        micro_batch_size=case.micro_batch,
        forward_only=case.mode == "eval",
    )


def make_optimizer(case: Case, wrapped: list[Any]) -> Any:
    """Adam with an epsilon far above the gradients, so that a step is linear in them and rounding stays small."""
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    defaults = {"optimizer": "adam", "lr": 0.1, "adam_eps": 1.0, "weight_decay": 0.01, "clip_grad": 0.0}
    config = OptimizerConfig(**(defaults | {"params_dtype": torch.float32} | case.optimizer))
    return get_megatron_optimizer(config, wrapped)


def _sharded(chunks: list[Any], optimizer: Any, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state

    metadata = {
        "dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True),
        "distrib_optim_sharding_type": "fully_reshardable",
    }
    state = {f"model{i}": chunk.sharded_state_dict(metadata=metadata) for i, chunk in enumerate(chunks)}
    if optimizer is not None:
        model = {key: value for part in state.values() for key, value in part.items()}
        if len(chunks) == 1:
            model = state["model0"]
        state["optimizer"] = optimizer.sharded_state_dict(model, is_loading=loading, metadata=metadata)
    return state


def save(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Write a checkpoint that any layout can read."""
    from megatron.core import dist_checkpointing

    if torch.distributed.get_rank() == 0:
        folder.mkdir()
    torch.distributed.barrier()
    dist_checkpointing.save(_sharded(chunks, optimizer, False), str(folder))
    torch.distributed.barrier()


def load(chunks: list[Any], optimizer: Any, folder: Path) -> None:
    """Read a checkpoint into chunks whose weights are known to be others."""
    from megatron.core import dist_checkpointing

    for chunk in chunks:
        for parameter in chunk.parameters():
            parameter.data.fill_(0.01)
    state = dist_checkpointing.load(_sharded(chunks, optimizer, True), str(folder))
    for i, chunk in enumerate(chunks):
        chunk.load_state_dict(state[f"model{i}"], strict=True)
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
        optimizer.reload_model_params()


def _collect(wrapped: list[Any], read: Any) -> dict[str, torch.Tensor]:
    out = {}
    for chunk in wrapped:
        model = chunk.module
        for name, parameter in model.named_parameters():
            if model.share_embeddings_and_output_weights and name == "output_layer.weight" and model.mtp_process:
                # beside MTP layers a tied LM head multiplies by the embedding, and this weight is idle
                continue
            out[global_name(name, model)] = whole(name, read(parameter), parameter, model.config)
    return out


@dataclass(frozen=True)
class Job:
    """What a world does at a time: run a case, or save the checkpoint that a case of this name starts from."""

    name: str
    case: Case
    saves: bool = False

    @property
    def title(self) -> str:
        """Its key in the world's table."""
        return f"save for {self.name}" if self.saves else self.name

    def layout(self) -> tuple[Any, ...]:
        """Jobs with the same one have the same process groups."""
        case = self.case
        loss_alone = (case.stages or "").endswith("|L")
        return case.tp, case.pp, case.ep, case.vpp or 1, loss_alone, loss_alone and case.kind == "tied"


def run_job(job: Job, folder: Path) -> dict[str, Any]:
    """Run one job on this rank."""
    checkpoint = folder.with_name(f"for {job.name.replace('/', ' ')}")
    if job.saves:
        run_and_save(job.case, checkpoint)
        return {}
    return run_case(job.case, checkpoint)


def run_case(case: Case, checkpoint: Path) -> dict[str, Any]:
    """Run one case on this rank: loss and acceptance, finalized gradients, weights after its optimizer steps."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing import load_tensors_metadata

    from bebop_megatron.mcore import attached

    out: dict[str, Any] = {}
    if case.saved_as is not None:
        out["keys"] = list(load_tensors_metadata(str(checkpoint)))
    chunks = build(case)
    config = chunks[0].config
    if case.saved_as is not None and not case.steps:
        load(chunks, None, checkpoint)
    wrapped = wrap(case, chunks)
    for chunk in wrapped:
        chunk.train(case.mode != "eval")
    optimizer = make_optimizer(case, wrapped) if case.steps else None
    if case.saved_as is not None and optimizer is not None:
        load(chunks, optimizer, checkpoint)
    done = 1 if case.saved_as is not None else 0
    for _ in range(max(1, case.steps - done)):
        attachment = attached(config)
        if attachment is not None:
            attachment.loss_sums = None
            attachment.meter.reset()
        if optimizer is not None:
            optimizer.zero_grad()
        for chunk in wrapped:
            chunk.zero_grad_buffer()
        losses = forward_backward(case, wrapped)
        if optimizer is not None:
            out["grad_norm"] = optimizer.step()[1]
    out["lm"] = float(sum(float(item["lm"]) for item in losses)) if losses else None
    out["grads"] = _collect(wrapped, lambda p: p.main_grad if p.requires_grad else torch.zeros_like(p))
    if case.ddp.get("overlap_param_gather"):
        for chunk in wrapped:
            # as before a checkpoint: updated weights are otherwise gathered by the next forward pass
            chunk.start_param_sync(force_sync=True)
    out["weights"] = _collect(wrapped, lambda p: p.detach()) if case.steps else {}
    attachment = attached(config)
    if attachment is not None and attachment.loss_sums is not None:
        total = torch.cat([attachment.loss_sums, attachment.meter.state().double()])
        torch.distributed.all_reduce(total, group=parallel_state.get_data_parallel_group())
        out["loss"], out["alpha"] = float(total[0] / total[1]), total[2:]
    return out


def run_and_save(case: Case, folder: Path) -> None:
    """Build a case, make its optimizer step where it has one, and save."""
    chunks = build(case)
    wrapped = wrap(case, chunks)
    optimizer = make_optimizer(case, wrapped) if case.steps else None
    if optimizer is not None:
        optimizer.zero_grad()
        forward_backward(case, wrapped)
        optimizer.step()
    save(chunks, optimizer, folder)


def _merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"grads": {}, "weights": {}, "drifted": []}
    for rank in ranks:
        for weight, value in rank["weights"].items():
            if not torch.allclose(value, merged["weights"].get(weight, value), rtol=1e-5, atol=1e-6):
                merged["drifted"].append(weight)
        for key in ("grads", "weights"):
            merged[key].update(rank[key])
        merged |= {k: v for k, v in rank.items() if k not in ("grads", "weights") and v is not None}
    return merged


def _jobs(cases: dict[str, Case]) -> list[Job]:
    """All checkpoints, then all cases; each time neighbours of one layout share their process groups."""
    saved = {name: (case.saved_as, case.steps and 1) for name, case in cases.items() if case.saved_as is not None}
    saves = [Job(name, replace(source, steps=steps), saves=True) for name, (source, steps) in saved.items()]
    runs = [Job(name, case) for name, case in cases.items()]
    return sorted(saves, key=Job.layout) + sorted(runs, key=Job.layout)


def run(worlds: dict[int, dict[str, Case]]) -> dict[str, dict[str, Any]]:
    """Run each table of cases in its world of processes.

    Gives name -> loss, acceptance, gradients and weights under their global names.

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    tables = {size: {job.title: job for job in _jobs(cases)} for size, cases in worlds.items()}
    found = run_worlds(run_job, tables)
    return {name: _merge(found[size][name]) for size, cases in worlds.items() for name in cases}
