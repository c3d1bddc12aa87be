"""Batches and datasets for GPT training: what the repository's `pretrain_gpt.py` does, which the wheel lacks."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDatasetConfig, MockGPTDataset
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.multi_token_prediction import mtp_on_this_rank
from megatron.core.utils import get_attr_wrapped_model, get_batch_on_this_tp_rank
from megatron.training import get_args, get_timers, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split
from torch import Tensor

from bebop_megatron.data import MaskedGPTDataset
from bebop_megatron.mcore.conversations import ConversationDataset
from bebop_megatron.mcore.sharding import pack, shard

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")
_DOCUMENTS = ("cu_seqlens", "cu_seqlens_padded", "max_seqlen")


def _is_packed(args: Any) -> bool:
    return args.sft or args.dataloader_inter_document_masking


def prepare_packed_arguments(args: Any) -> None:
    """Refuse what packed batches do not go together with, before anything is built, and ask for none of their masks.

    Raises:
        ValueError: naming the flags.
    """
    if args.hybrid_context_parallel:
        raise ValueError(
            "--hybrid-context-parallel changes the context-parallel group from batch to batch, which the MTP loss does "
            "not support: use --context-parallel-size alone"
        )
    if not _is_packed(args):
        return
    flag = "--sft" if args.sft else "--dataloader-inter-document-masking"
    if args.pipeline_model_parallel_size > 1 and args.micro_batch_size > 1:
        raise ValueError(
            f"{flag} packs a micro-batch into one row, and pipeline stages would exchange it in another shape: "
            f"use --micro-batch-size 1 (got {args.micro_batch_size}) and a longer --seq-length"
        )
    if not args.sft and args.context_parallel_size > 1:
        raise ValueError(
            "--dataloader-inter-document-masking cuts documents anywhere, and context parallelism needs each to be a "
            "multiple of 2 x --context-parallel-size long: use --sft, which pads them"
        )
    if args.sft and args.mock_data:
        raise ValueError("--sft needs conversations: give --data-path FILE.jsonl instead of --mock-data")
    # packed samples carry their boundaries, not a mask
    args.create_attention_mask_in_dataloader = False


def _mtp_here(config: Any, vp_stage: int | None) -> bool:
    return mtp_on_this_rank(
        layout=config.pipeline_model_parallel_layout,
        mtp_num_layers=config.mtp_num_layers,
        ignore_virtual=False,
        vp_stage=vp_stage,
    )


def _get_batch(
    data_iterator: Any, config: Any, vp_stage: int | None
) -> tuple[list[Tensor | None], PackedSeqParams | None]:
    args = get_args()
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    mtp = _mtp_here(config, vp_stage)
    packed_data = _is_packed(args)
    if not (first or last or mtp or packed_data):
        return [None] * len(_KEYS), None
    batch: dict[str, Any] = {}
    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    if tensor_rank == 0:
        data = next(data_iterator)
        keys = (*_KEYS, *_DOCUMENTS)
        batch = {key: data[key].cuda(non_blocking=True) if key in data else None for key in keys}
    batch = get_batch_on_this_tp_rank(
        batch,
        has_cu_seqlens=packed_data,
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
    batch, packed = pack(batch)
    batch = shard(batch, packed, parallel_state.get_context_parallel_group())
    return [batch.get(key) for key in _KEYS], packed


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
    (tokens, labels, loss_mask, attention_mask, position_ids), packed = _get_batch(data_iterator, config, vp_stage)
    timers("batch-generator").stop()
    run = model.build_schedule_plan if return_schedule_plan else model
    documents = {} if packed is None else {"packed_seq_params": packed}
    output = run(tokens, position_ids, attention_mask, labels=labels, loss_mask=loss_mask, **documents)
    return output, partial(_loss, loss_mask)


def _built_here(config: Any, vp_stage: int | None) -> bool:
    if parallel_state.get_tensor_model_parallel_rank() != 0:
        return False
    first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
    # every stage needs the boundaries of packed documents
    return first or last or _mtp_here(config, vp_stage) or _is_packed(get_args())


def make_dataset_provider(config: Any) -> Any:
    """Megatron's dataset provider for `.bin/.idx` files (with our side mask, if any), conversations and mock data."""

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
            context_parallel_size=args.context_parallel_size,
            inter_document_masking=args.dataloader_inter_document_masking,
        )
        kind = MockGPTDataset if args.mock_data else ConversationDataset if args.sft else MaskedGPTDataset
        built_here = partial(_built_here, config, vp_stage)
        return BlendedMegatronDatasetBuilder(kind, samples, built_here, dataset_config).build()

    # every rank calls it: the builder itself decides where data is read
    provider.is_distributed = True  # pyright: ignore[reportFunctionMemberAccess]
    return provider
