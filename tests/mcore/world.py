"""A tiny Megatron GPT with MTP, run under any layout on CPU processes; what each layout computed comes back as data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.patching import Patcher
from tests.mcore import batch
from tests.mcore.groups import join_groups
from tests.mcore.settings import QWEN
from tests.mcore.weights import same_weights_everywhere, whole
from tests.worlds import run_worlds

DEPTHS = 3
VOCAB, LENGTH = batch.VOCAB, batch.LENGTH


@dataclass(frozen=True)
class Layout:
    """How the same global batch of four sequences is cut up."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    micro_batch: int = 1
    cp: int = 1
    cp_layout: str = "zigzag"
    # one of batch.FORMS
    data: str = "plain"
    # as a training loop of the user's own may bring it: `unreadable`, or `cut` over the ranks before it is read
    batches: str = "whole"
    evaluate: bool = False
    # measure a validation pass behind the step; one process also counts it by hand
    validate: bool = False
    fp16: bool = False
    positions: str = "rope"
    # --mtp-attention; None: Megatron's own layers
    attention: str | None = None
    stages: str | None = None
    overrides: dict[str, Any] = field(default_factory=dict)

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp * self.cp


def micro_batches(layout: Layout, rank: int) -> list[Any]:
    """The micro-batches of one data-parallel rank."""
    data = batch.FORMS[layout.data]()
    if isinstance(data, list):
        return data
    per_rank, size = len(data["tokens"]) // layout.dp, layout.micro_batch
    starts = range(rank * per_rank, (rank + 1) * per_rank, size)
    return [{k: v[start : start + size] for k, v in data.items()} for start in starts]


def build(layout: Layout) -> Any:
    """One model chunk of this rank, with Transformer Engine's parameter names."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_with_transformer_engine_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed
    from megatron.core.transformer.transformer_config import TransformerConfig

    from bebop_megatron.mcore.mtp_attention import set_mtp_attention

    join_groups(layout.tp, layout.pp, context_parallel_size=layout.cp)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    settings: dict[str, Any] = QWEN | {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "ffn_hidden_size": 48,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "pipeline_model_parallel_layout": layout.stages,
        "context_parallel_size": layout.cp,
        "pipeline_dtype": torch.float32,
        "mtp_num_layers": DEPTHS,
        "mtp_loss_scaling_factor": 0.3,
    }
    if layout.fp16:
        settings |= {"fp16": True, "params_dtype": torch.float16, "pipeline_dtype": torch.float16}
    config = TransformerConfig(**(settings | layout.overrides))
    if layout.attention is not None:
        set_mtp_attention(config, layout.attention)
    spec = get_gpt_layer_with_transformer_engine_spec(qk_layernorm=True)
    model = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        position_embedding_type=layout.positions,
        share_embeddings_and_output_weights=False,
        mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=True),
    )
    same_weights_everywhere(model)
    return model


def forward_step(data_iterator: Any, model: Any) -> Any:
    """Megatron's forward step over batches of whole sequences, packed or not, which this rank cuts."""
    from megatron.core import parallel_state
    from megatron.core.utils import get_model_config

    from bebop_megatron.mcore.attachment import layout_of
    from bebop_megatron.mcore.sharding import pack, shard

    group = parallel_state.get_context_parallel_group()
    data = next(data_iterator)
    whole, packed = pack(data if isinstance(data, dict) else dict(data))
    mine = whole
    if packed is not None or whole["tokens"].shape[1] == LENGTH:
        mine = shard(whole, packed, group, layout_of(get_model_config(model)))
    mask = mine["loss_mask"]
    output = model(
        mine["tokens"],
        mine["position_ids"],
        None,
        labels=mine.get("labels"),
        loss_mask=mask,
        packed_seq_params=packed,
    )

    def loss(output: torch.Tensor) -> Any:
        # without labels the model gives logits [b, s, v/tp], as a policy loss would use them
        value = output.float() if "labels" in mine else output.float().mean(-1)
        total, tokens = (value * mask).sum(), mask.sum().to(torch.int)
        return total, tokens, {"lm": torch.stack([total.detach(), tokens.float()])}

    return output, loss


@contextmanager
def recorded_collectives(point_to_point: bool) -> Iterator[list[tuple[str, bool, bool]]]:
    """Every collective while it runs: (name, whether it names its group, whether it carries fractions)."""
    calls: list[tuple[str, bool, bool]] = []
    patcher = Patcher()

    def recorder(name: str, original: Any) -> Any:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            tensor = next(value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor))
            calls.append((name, kwargs.get("group") is not None, tensor.is_floating_point()))
            return original(*args, **kwargs)

        return wrapper

    # torch compares a pipeline's operations with its own functions, so they cannot be wrapped there
    single = ("isend", "irecv") if point_to_point else ()
    for name in ("all_gather_into_tensor", "all_reduce", "broadcast", *single):
        patcher.set(torch.distributed, name, recorder(name, getattr(torch.distributed, name)))
    try:
        yield calls
    finally:
        patcher.restore()


def step(case: tuple[Layout, Any], unused: Path) -> dict[str, Any]:
    """One forward and backward pass over the global batch, gradients finalized as the optimizer would see them."""
    layout, objective = case
    from megatron.core import parallel_state
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer.grad_scaler import DynamicGradScaler
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer.module import Float16Module

    from bebop_megatron.mcore import attach, attached
    from bebop_megatron.mcore.sharding import shard

    model = build(layout)
    config = model.config
    if objective is None:
        config.mtp_detach_heads = True
        config.bebop_objective = None
    else:
        attach(config, objective, cp_layout=layout.cp_layout)
    config.finalize_model_grads_func = finalize_model_grads
    module: Any = model
    if layout.fp16:
        scaler = DynamicGradScaler(
            2.0**14, min_scale=1.0, growth_factor=2.0, backoff_factor=0.5, growth_interval=1000, hysteresis=2
        )
        config.grad_scale_func = lambda loss: scaler.scale * loss
        module = Float16Module(config, model)
    ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    wrapped = DistributedDataParallel(config, ddp, module)
    wrapped.zero_grad_buffer()
    wrapped.train(not layout.evaluate)

    batches = micro_batches(layout, parallel_state.get_data_parallel_rank())
    if layout.batches == "unreadable":
        batches = [tuple(item.items()) for item in batches]
    elif layout.batches == "cut":
        cp_group = parallel_state.get_context_parallel_group()
        batches = [shard(item, None, cp_group, layout.cp_layout) for item in batches]
    with recorded_collectives(point_to_point=layout.pp == 1) as collectives:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[wrapped],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=layout.micro_batch,
            forward_only=layout.evaluate,
        )
    grads = {}
    for name, parameter in model.named_parameters():
        grad = parameter.main_grad / float(scaler.scale) if layout.fp16 else parameter.main_grad
        grads[name] = whole(name, grad, parameter, config)
    out: dict[str, Any] = {"grads": grads, "loss": None, "collectives": collectives}
    attachment = attached(config) if objective is not None else None
    if attachment is not None and attachment.loss_sums is not None:
        sums = torch.cat([attachment.loss_sums, attachment.meter.state()])
        torch.distributed.all_reduce(sums, group=parallel_state.get_data_parallel_group(with_context_parallel=True))
        out["loss"] = float(sums[0] / sums[1])
        out["metrics"] = attachment.meter.compute(sums[2:])
    if layout.validate:
        out |= _validation(layout, config, wrapped)
    return out


def _validation(layout: Layout, config: Any, wrapped: Any) -> dict[str, Any]:
    """Metrics of the same global batch in evaluation mode, over all ranks."""
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from bebop_megatron.mcore import attached, measuring
    from bebop_megatron.mcore.logging import summed_over_ranks
    from tests.mcore.direct import direct_metrics, recorded_batches

    attachment = attached(config)
    assert attachment is not None
    before = attachment.meter.state().clone()
    batches = micro_batches(layout, parallel_state.get_data_parallel_rank())
    wrapped.eval()
    with torch.no_grad(), recorded_batches() as seen, measuring(config) as sums:
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(batches),
            model=[wrapped],
            num_microbatches=len(batches),
            seq_length=LENGTH,
            micro_batch_size=layout.micro_batch,
            forward_only=True,
        )
    assert torch.equal(before, attachment.meter.state()), "validation data in the training metrics"
    values = sums.compute(summed_over_ranks(sums.state()), str(attachment.objective.loss), per_depth=True)
    out: dict[str, Any] = {"validation": values} if values else {}
    if layout.world == 1 and layout.data == "plain":
        out["direct"] = direct_metrics(seen, DEPTHS)
    return out


def _merge(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    merged: dict[str, Any] = {"loss": None, "grads": {}, "backbone": {}}
    merged["collectives"] = [rank["collectives"] for rank in ranks]
    for rank in ranks:
        merged["grads"].update({k: v for k, v in rank["grads"].items() if k.startswith("mtp.")})
        merged["backbone"].update(rank["grads"])
        merged |= {key: rank[key] for key in ("validation", "direct") if key in rank}
        if rank["loss"] is not None:
            merged |= {key: rank[key] for key in ("loss", "metrics")}
    return merged


def run(cases: list[tuple[str, Layout, Any]]) -> dict[str, dict[str, Any]]:
    """Run each case in a world of as many processes as it needs: name -> loss, and gradients of the rank that has them.

    Raises:
        AssertionError: with the traceback of every rank that failed.
    """
    worlds: dict[int, dict[str, tuple[Layout, Any]]] = {}
    # neighbours of one layout share their process groups
    for name, layout, objective in sorted(cases, key=lambda case: (case[1].tp, case[1].pp, case[1].cp)):
        worlds.setdefault(layout.world, {})[name] = (layout, objective)
    assert sum(map(len, worlds.values())) == len(cases), "two cases have one name"
    found = run_worlds(step, worlds)
    return {name: _merge(ranks) for of_world in found.values() for name, ranks in of_world.items()}
