"""Batches and datasets for GPT training: what the repository's `pretrain_gpt.py` does, which the wheel lacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_cp_rank, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from bebop_megatron.data import MaskedGPTDataset

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def _mtp_here(config: Any, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _get_batch(data_iterator: Any, config: Any, vp_stage: int | None) -> list[Tensor | None]:
    args = get_args()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp = _mtp_here(config, vp_stage)
    if not (first or last or mtp):
        return [None] * len(_KEYS)
    batch: dict[str, Any] = {}
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        data = next(data_iterator)
        batch = {key: data[key].cuda(non_blocking=True) if key in data else None for key in _KEYS}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=False,
        is_hybrid_cp=False,
        create_attention_mask_in_dataloader=args.create_attention_mask_in_dataloader,
        broadcast_src_rank=parallel_state.get_tensor_model_parallel_src_rank(),
        broadcast_group=parallel_state.get_tensor_model_parallel_group(),
        cp_size=args.context_parallel_size,
        tp_rank=tensor_rank,
        micro_batch_size=args.micro_batch_size,
        seq_length=args.seq_length,
        mtp_on_this_rank=mtp,
        pipeline_model_parallel_size=args.pipeline_model_parallel_size,
        is_pipeline_first_stage=first,
        is_pipeline_last_stage=last,
    )
    batch = get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=parallel_state.get_context_parallel_group())
    return [batch.get(key) for key in _KEYS]


def _loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    mask = loss_mask.view(-1).float()
    # where: a masked position may hold any value, also an infinite one
    total = torch.where(mask > 0, output.view(-1).float() * mask, 0.0).sum()
    tokens = mask.sum().detach().to(torch.int)
    return total, tokens, {"lm loss": torch.cat([total.detach().view(1), tokens.view(1)])}


def forward_step(data_iterator: Any, model: Any, return_schedule_plan: bool = False) -> tuple[Any, partial[Any]]:
    """Megatron's forward step for GPT and hybrid models; the loss mask reaches the model, for the MTP loss."""
    timers = get_timers()
    config = get_attr_wrapped_model(model, "config")
    vp_stage = get_attr_wrapped_model(model, "vp_stage")
    timers("batch-generator", log_level=2).start()
    tokens, labels, loss_mask, attention_mask, position_ids = _get_batch(data_iterator, config, vp_stage)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask)
    return output, partial(_loss, loss_mask)


def _built_here(config: Any, vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    return first or last or _mtp_here(config, vp_stage)


def make_dataset_provider(config: Any) -> Any:
    """Megatron's dataset provider for `.bin/.idx` files (with our side mask where there is one) and mock data."""

    def provider(samples: Any, vp_stage: int | None = None) -> Any:
        args = get_args()
        blend, blend_per_split = get_blend_and_blend_per_split(args)
        dataset_config = GPTDatasetConfig(
            random_seed=args.seed,
            sequence_length=args.seq_length,
            blend=blend,
            blend_per_split=blend_per_split,
            split=args.split,
            multiple_validation_sets=args.multiple_validation_sets,
            full_validation=args.full_validation,
            num_dataset_builder_threads=args.num_dataset_builder_threads,
            path_to_cache=args.data_cache_path,
            mmap_bin_files=args.mmap_bin_files,
            tokenizer=get_tokenizer(),
            reset_position_ids=args.reset_position_ids,
            reset_attention_mask=args.reset_attention_mask,
            eod_mask_loss=args.eod_mask_loss,
            create_attention_mask=args.create_attention_mask_in_dataloader,
            object_storage_cache_path=args.object_storage_cache_path,
            mid_level_dataset_surplus=args.mid_level_dataset_surplus,
            allow_ambiguous_pad_tokens=args.allow_ambiguous_pad_tokens,
        )
        kind = MockGPTDataset if args.mock_data else MaskedGPTDataset
        built_here = partial(_built_here, config, vp_stage)
        return BlendedMegatronDatasetBuilder(kind, samples, built_here, dataset_config).build()

    # every rank calls it: the builder itself decides where data is read
    provider.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    return provider
