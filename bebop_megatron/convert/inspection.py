"""What a checkpoint of either kind holds."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.bridges.arguments import config_of_arguments
from bebop_megatron.bridges.checkpoint_keys import CheckpointKeys
from bebop_megatron.bridges.families import Sizes, mtp_layers_in, read_config, sizes_of
from bebop_megatron.bridges.huggingface import FolderReader
from bebop_megatron.bridges.plan import Style, backbone_rows, mtp_rows
from bebop_megatron.convert.findings import Findings, in_checkpoint, in_folder, mtp_layers_named
from bebop_megatron.mcore.checkpoints import is_checkpoint
from bebop_megatron.mcore.torch_dist import TorchDistReader


def _size(tensors: dict[str, tuple[torch.dtype, torch.Size]]) -> str:
    counts: Counter[torch.dtype] = Counter()
    for dtype, shape in tensors.values():
        counts[dtype] += shape.numel()
    total = sum(count * dtype.itemsize for dtype, count in counts.items())
    kinds = ", ".join(f"{str(dtype)[6:]} {count:,}" for dtype, count in counts.most_common())
    return f"{len(tensors)} tensors, {total / 2**20:,.1f} MiB; parameters by type: {kinds}"


def _model(sizes: Sizes, layers: int) -> list[str]:
    experts = f", {sizes.experts} experts in {sum(sizes.experts_in)} layers" if sizes.experts else ""
    delta = f", {sum(sizes.linear)} of them gated delta net" if any(sizes.linear) else ""
    return [
        f"decoder layers: {sizes.layers}{delta}{experts}",
        f"MTP layers: {layers}",
        f"hidden size {sizes.hidden}, vocabulary {sizes.vocab:,}, LM head {'tied' if sizes.tied else 'untied'}",
    ]


def _found(findings: Findings) -> list[str]:
    return findings.lines() or ["tensors: all there, none too many, every shape as the config says"]


def _folder(path: Path) -> list[str]:
    config, reader = read_config(path), FolderReader(path)
    sizes = sizes_of(config)
    named, stated = mtp_layers_named(reader.tensors), mtp_layers_in(config)
    style = Style.of(reader.tensors, sizes, named or stated)
    rows = [*backbone_rows(sizes, style), *mtp_rows(sizes, named or stated, style)]
    tensors = {name: (info.dtype, info.shape) for name, info in reader.tensors.items()}
    lines = [f"{path}: Hugging Face folder", f"family: {sizes.family.name}", *_model(sizes, named), _size(tensors)]
    if named != stated:
        lines.append(f"warning: config.json states {stated} MTP layers")
    return lines + _found(in_folder(reader, rows, sizes))


def _checkpoint(path: Path) -> list[str]:
    reader = TorchDistReader(path)
    common = reader.common()
    args: Any = common.get("args")
    if args is None:
        return [f"{path}: torch_dist checkpoint without the arguments of its run: its model's shape is unknown"]
    sizes = sizes_of(config_of_arguments(args))
    pattern = getattr(args, "hybrid_layer_pattern", None) or ""
    keys = CheckpointKeys.of(reader.tensors, sizes.layers, pattern)
    named, depth = keys.mtp_layers(reader.tensors), getattr(args, "mtp_num_layers", None) or 0
    rows = [*backbone_rows(sizes, Style()), *mtp_rows(sizes, named or min(depth, 1), Style())]
    mine = keys.model_keys(reader.tensors)
    tensors = {key: (value.properties.dtype, value.size) for key, value in reader.tensors.items() if key in mine}
    family = sizes.family.name
    if sizes.experts and sizes.gated:
        family = "qwen3-next or qwen3.5-moe (one model to Megatron)"
    lines = [
        f"{reader.folder}: torch_dist checkpoint, iteration {common.get('iteration')}",
        f"family: {family}, built as {f'HybridModel {pattern}' if pattern else 'GPTModel'}",
        *_model(sizes, named),
        f"draft steps in training: {depth}",
        f"{_size(tensors)}; {len(reader.tensors) - len(mine)} tensors of the optimizer and the run",
    ]
    return lines + _found(in_checkpoint(reader, keys, rows))


def inspect_path(path: str | Path) -> list[str]:
    """Lines on family, layers, MTP layers, types, sizes, and what is missing.

    Raises:
        ValueError: neither kind of checkpoint, or a damaged one.
    """
    path = Path(path)
    return _checkpoint(path) if is_checkpoint(path) else _folder(path)
