"""How many rows of logits one chunk of the fused objective may have: its working memory has a budget of bytes."""

from __future__ import annotations

import torch

from bebop_megatron.losses.options import Options

# of the logits of both sides, and of what backend and options need beside them
CHUNK_BYTES = {"cpu": 148 * 2**20, "cuda": 1024 * 2**20}


def bytes_per_logit(dtype: torch.dtype, options: Options, *, triton: bool, to_weight: bool) -> tuple[int, int]:
    """Most that a draft's logit and a target's hold at one time, in bytes; `dtype` that of the matrix products.

    PyTorch keeps probabilities in fp32 (in the place of fp32 logits), Triton the logits alone; one result for each
    objective in play, of which the last replaces what it is made from.
    """
    wide = torch.promote_types(dtype, torch.float32)
    half, own, results = dtype != wide, dtype.itemsize, len(options.shares)
    if triton:
        # the gradient of the weight takes its direction in fp32
        draft, target = max(own * results, own + wide.itemsize * (half and to_weight)), own
    else:
        # with the logits themselves, and a result in half precision for the product with the weight
        draft, target = wide.itemsize * results + 2 * own * half, wide.itemsize + own * half
        if options.needs_reverse_kl:
            draft, target = draft + wide.itemsize, target + wide.itemsize
    if options.truncate_top_k:
        # a copy of each side, and what is left out of it
        draft, target = draft + own + 1, target + own + 1
    if options.filters:
        # see `target_filter.py`: a wide copy, one without the small logits, and three more while top-p bisects
        target += wide.itemsize * (1 + bool(options.target_top_k) + 3 * (options.target_top_p < 1)) + 1
    return draft, target


def row_limit(columns: int, dtype: torch.dtype, options: Options, *, device: str, triton: bool, to_weight: bool) -> int:
    """How many draft rows, and as many target rows, of `columns` logits fit into the budget of a device; at least one.

    Give the columns that every rank has, padding included, so that all ranks cut alike.
    """
    per_row = columns * sum(bytes_per_logit(dtype, options, triton=triton, to_weight=to_weight))
    return max(1, CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) // max(per_row, 1))
