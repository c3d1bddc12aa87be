"""Trains a tiny Megatron GPT with MTP through freeze phases under any layout, and looks at every bit in between."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from tests.mcore.freeze_counts import counting
from tests.mcore.groups import join_groups
from tests.mcore.settings import QWEN
from tests.mcore.weights import same_weights_everywhere
from tests.mcore.world import LENGTH, VOCAB, forward_step
from tests.worlds import run_worlds

DEPTHS = 2
SCHEDULE = "backbone:2,mtp:2,none:1"


@dataclass(frozen=True)
class Case:
    """One layout and optimizer; `only` trains without a schedule, on these iterations' batches alone."""

    tp: int = 1
    pp: int = 1
    ep: int = 1
    vpp: int | None = None
    schedule: str | None = SCHEDULE
    iterations: int = 15
    only: tuple[int, ...] | None = None
    stages: str | None = None
    tied: bool = False
    experts: int | None = None
    bf16: bool = False
    distributed: bool = False
    overlap: bool = False
    loss: str = "tv"
    joint: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    overrides: dict[str, Any] = field(default_factory=dict)


def batch(iteration: int) -> dict[str, torch.Tensor]:
    """The global batch of four sequences of one iteration."""
    generator = torch.Generator().manual_seed(100 + iteration)
    tokens = torch.randint(0, VOCAB, (4, LENGTH + 1), generator=generator)
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "labels": tokens[:, 1:].contiguous(),
        "loss_mask": (torch.rand(4, LENGTH, generator=generator) < 0.9).float(),
        "position_ids": torch.arange(LENGTH).expand(4, -1).contiguous(),
    }


def _chunks(case: Case) -> list[Any]:
    """The model chunks of this rank: one, or one for each of its interleaved stages."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.multi_token_prediction import get_mtp_ranks
    from megatron.core.transformer.transformer_config import TransformerConfig

    from bebop_megatron.config import ObjectiveConfig
    from bebop_megatron.mcore import attach

    settings: dict[str, Any] = QWEN | {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "pipeline_model_parallel_layout": case.stages,
        "pipeline_dtype": torch.bfloat16 if case.bf16 else torch.float32,
        "params_dtype": torch.bfloat16 if case.bf16 else torch.float32,
        "bf16": case.bf16,
        "mtp_num_layers": DEPTHS,
        "mtp_loss_scaling_factor": 0.3,
        "sequence_parallel": case.tp > 1 and case.experts is None,
        "qk_layernorm": False,
    }
    if case.experts:
        settings |= {
            "num_moe_experts": case.experts,
            "moe_router_topk": 2,
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.01,
            "moe_router_bias_update_rate": 0.05,
            "moe_ffn_hidden_size": 16,
            "moe_token_dispatcher_type": "alltoall",
            "expert_model_parallel_size": case.ep,
        }
    if case.vpp:
        settings |= {"overlap_p2p_comm": True, "batch_p2p_comm": False}
    config = TransformerConfig(**(settings | case.overrides))

    def embedding_ranks(ranks: list[int], *_: Any) -> list[int]:
        return sorted({ranks[0], ranks[-1], *(get_mtp_ranks(ranks, config) if len(ranks) > 1 else ())})

    sizes = {"expert_model_parallel_size": case.ep, "virtual_pipeline_model_parallel_size": case.vpp}
    join_groups(case.tp, case.pp, embedding_ranks=embedding_ranks, **sizes)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    attach(config, ObjectiveConfig(loss=case.loss, joint=case.joint))
    spec = get_gpt_layer_with_transformer_engine_spec(num_experts=case.experts)
    chunks = []
    for stage in range(case.vpp or 1):
        place = {"ignore_virtual": False, "vp_stage": stage if case.vpp else None}
        chunk = GPTModel(
            config,
            spec,
            vocab_size=VOCAB,
            max_sequence_length=LENGTH,
            pre_process=parallel_state.is_pipeline_first_stage(**place),
            post_process=parallel_state.is_pipeline_last_stage(**place),
            position_embedding_type="rope",
            share_embeddings_and_output_weights=case.tied,
            mtp_block_spec=get_gpt_mtp_block_spec(
                config, spec, use_transformer_engine=True, vp_stage=place["vp_stage"]
            ),
            vp_stage=place["vp_stage"],
        )
        same_weights_everywhere(chunk)
        chunks.append(chunk)
    return chunks


class Training:
    """A model, its optimizer and the controller of its phases, stepped as Megatron's loop does."""

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module

        from bebop_megatron.config import FreezeConfig
        from bebop_megatron.mcore.freeze_control import FreezeController
        from bebop_megatron.mcore.freeze_install import install_freezing, prepare_chunks, uninstall_freezing
        from bebop_megatron.mcore.freeze_optimizer import part_overrides
        from bebop_megatron.mcore.freeze_state import follow_schedule
        from bebop_megatron.schedule.phases import FreezeSchedule

        self.case = case
        options = FreezeConfig(schedule=case.schedule, **case.options)
        uninstall_freezing()
        self.chunks = _chunks(case)
        config = self.chunks[0].config
        if case.schedule:
            install_freezing(options)
            state = follow_schedule(config, FreezeSchedule.parse(case.schedule))
            prepare_chunks(self.chunks, state)
        config.finalize_model_grads_func = finalize_model_grads
        ddp = DistributedDataParallelConfig(
            use_distributed_optimizer=case.distributed,
            overlap_grad_reduce=case.overlap,
            overlap_param_gather=case.overlap and case.distributed,
            bucket_size=2000 if case.overlap else None,
            grad_reduce_in_fp32=True,
        )
        inner = [Float16Module(config, chunk.bfloat16()) if case.bf16 else chunk for chunk in self.chunks]
        self.wrapped = [
            DistributedDataParallel(config, ddp, chunk, disable_bucketing=index > 0)
            for index, chunk in enumerate(inner)
        ]
        if case.overlap:
            # Megatron takes a function for one chunk, a list for several
            config.no_sync_func = [w.no_sync for w in self.wrapped] if case.vpp else self.wrapped[0].no_sync
        optimizer = OptimizerConfig(
            optimizer="adam",
            lr=1e-2,
            weight_decay=0.1,
            clip_grad=0.5,
            bf16=case.bf16,
            use_distributed_optimizer=case.distributed,
            params_dtype=config.params_dtype,
        )
        overrides = part_overrides(optimizer, None, options) if case.schedule else None
        self.optimizer = get_megatron_optimizer(optimizer, self.wrapped, config_overrides=overrides)
        self.hooks_off = case.overlap and case.distributed
        if self.hooks_off:
            for wrapped in self.wrapped:
                wrapped.disable_forward_pre_hook(param_sync=False)
        self.controller = FreezeController(self.wrapped, self.optimizer, options) if case.schedule else None
        self.rank = parallel_state.get_data_parallel_rank()
        self.replicas = parallel_state.get_data_parallel_world_size()

    def step(self, iteration: int) -> Any:
        """One iteration of training: two micro-batches on each data-parallel rank (four without)."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if self.controller is not None:
            self.controller.before_step(iteration)
        for wrapped in self.wrapped:
            wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        share = 4 // self.replicas
        mine = {k: v[self.rank * share : (self.rank + 1) * share] for k, v in batch(iteration).items()}
        data = [{k: v[i : i + 1] for k, v in mine.items()} for i in range(share)]
        losses = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(data) for _ in self.wrapped],
            model=self.wrapped,
            num_microbatches=share,
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=False,
        )
        assert self.optimizer.step()[0]
        if self.hooks_off:
            for wrapped in self.wrapped:
                wrapped.enable_forward_pre_hook()
            self.hooks_off = False
        return losses

    def settle(self) -> None:
        """Gather what an overlapped optimizer step still owes, as Megatron does before it evaluates or saves."""
        if self.case.overlap and self.case.distributed and not self.hooks_off:
            for wrapped in self.wrapped:
                wrapped.disable_forward_pre_hook()
                wrapped.enable_forward_pre_hook()

    def bits(self) -> dict[str, torch.Tensor]:
        """Everything that training could move, by name; names start with the part."""
        from bebop_megatron.schedule.freezing import part_of

        found = {}
        for index, chunk in enumerate(self.chunks):
            at = f"{index}." if self.case.vpp else ""
            for name, tensor in [*chunk.named_parameters(), *chunk.named_buffers()]:
                if not name.endswith(("local_tokens_per_expert", "inv_freq")):
                    found[f"{part_of(name)} model {at}{name}"] = tensor.detach().clone()
        for i, member in enumerate(getattr(self.optimizer, "chained_optimizers", [self.optimizer])):
            for j, group in enumerate(member.optimizer.param_groups):
                part = group.get("bebop_part", "all")
                for k, parameter in enumerate(group["params"]):
                    key = f"{part} optimizer {i}.{j}.{k}"
                    found[f"{key} master"] = parameter.detach().clone()
                    for name, value in member.optimizer.state[parameter].items():
                        found[f"{key} {name}"] = value.detach().clone()
                found[f"{part} optimizer {i}.{j} steps"] = torch.tensor(group.get("bebop_part_steps", 0))
        return found


def train(case: Case, unused: Path) -> dict[str, Any]:
    """Three cycles of the schedule; what a frozen part changed, what an active one did not, and counts by phase."""
    training = Training(case)
    if case.only is not None:
        for iteration in case.only:
            training.step(iteration)
        training.settle()
        return {"bits": training.bits()}
    counts: Counter[str] = Counter()
    with counting(training, counts):
        return _train_in_phases(training, counts)


def _train_in_phases(training: Training, counts: Counter[str]) -> dict[str, Any]:
    from bebop_megatron.mcore import attached
    from bebop_megatron.schedule.freezing import parameters_of

    case = training.case
    losses: list[str] = []
    lm_losses: list[float] = []
    mtp_losses: list[float | None] = []
    changed_while_frozen, still_while_active, by_phase = set(), set(), {}
    entry: dict[str, torch.Tensor] = {}
    for iteration in range(case.iterations):
        assert training.controller is not None
        # no gather of parameters here other than what the switch itself and the next forward pass bring about
        phase = training.controller.before_step(iteration)
        if iteration == phase.start:
            entry = training.bits()
        counts.clear()
        attachment = attached(training.chunks[0].config)
        attachment.loss_sums = None
        lm_losses.append(float(sum(micro["lm"][0] for micro in training.step(iteration))))
        losses.append(attachment.objective.loss)
        sums = attachment.loss_sums
        mtp_losses.append(None if sums is None else float(sums[0] / sums[1]))
        by_phase.setdefault(phase.name, Counter()).update(counts)
        now = training.bits()
        assert now.keys() == entry.keys()
        for key, value in now.items():
            same = torch.equal(value, entry[key])
            if key.split()[0] in phase.frozen:
                changed_while_frozen |= set() if same else {f"{iteration} {key}"}
            elif same and "steps" not in key and "expert_bias" not in key and not (case.overlap and " model " in key):
                still_while_active.add(f"{iteration} {key}")
    training.settle()
    return {
        "changed while frozen": sorted(changed_while_frozen),
        "still while active": sorted(still_while_active),
        "counts": {name: dict(c) for name, c in by_phase.items()},
        "numel": {part: sum(p.numel() for p in parameters_of(training.chunks, part)) for part in ("backbone", "mtp")},
        "losses": losses,
        "lm losses": lm_losses,
        "mtp losses": mtp_losses,
        "bits": training.bits(),
    }


def run(worlds: dict[int, dict[str, Case]]) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Run each table of cases in its world of processes: world -> name -> what each rank saw.

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    return run_worlds(train, worlds)
