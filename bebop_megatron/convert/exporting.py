"""Megatron -> Hugging Face: a whole folder, or the files that give an existing folder another MTP head."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.bridges.arguments import config_of_arguments, differences
from bebop_megatron.bridges.checkpoint_keys import CheckpointKeys
from bebop_megatron.bridges.families import read_config, sizes_of, text_config, with_mtp_layers
from bebop_megatron.bridges.huggingface import INDEX, SINGLE, FolderReader, FolderWriter, Planned, into_shards
from bebop_megatron.bridges.names import LM_HEAD
from bebop_megatron.bridges.plan import Place, Row, Style, backbone_rows, mtp_rows
from bebop_megatron.bridges.saved_arguments import saved_arguments
from bebop_megatron.convert.findings import carried, in_checkpoint, located
from bebop_megatron.mcore.torch_dist import TorchDistReader

MTP_FILE = "model-mtp.safetensors"
DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class MegatronModel:
    """A checkpoint read by GPTModel's names.

    `config` is the Hugging Face config of the same model; without one the checkpoint's own arguments say its sizes.

    Raises:
        ValueError: no whole checkpoint, its arguments describe another model, or an MTP head is promised and missing.
    """

    def __init__(self, root: str | Path, config: dict[str, Any] | None = None) -> None:
        self.root, self.reader = root, TorchDistReader(root)
        args = saved_arguments(self.reader)
        if args is None:
            raise ValueError(f"{root} does not hold the arguments it was trained with, so its model's shape is unknown")
        wrong = [] if config is None else differences(config, args)
        if wrong:
            raise ValueError(f"{root} is another model than config.json describes:\n  " + "\n  ".join(wrong))
        self.sizes = sizes_of(config_of_arguments(args) if config is None else config)
        pattern = getattr(args, "hybrid_layer_pattern", None) or ""
        self.keys = CheckpointKeys.of(self.reader.tensors, self.sizes.layers, pattern)
        self.mtp_layers = self.keys.mtp_layers(self.reader.tensors)
        self.depth = getattr(args, "mtp_num_layers", None) or 0
        if self.depth and not self.mtp_layers:
            raise ValueError(f"{root} was trained with {self.depth} draft steps, but no tensor in it is named mtp.*")

    def read(self, place: Place) -> Tensor:
        """One parameter by its GPTModel name."""
        at = located(self.reader, self.keys, place)
        assert at is not None, place
        return self.reader.read(at.name, at.index)

    def dtype(self, place: Place) -> torch.dtype:
        """Its type."""
        at = located(self.reader, self.keys, place)
        assert at is not None, place
        return self.reader.tensors[at.name].properties.dtype

    def unpacked(self, row: Row) -> tuple[Tensor, ...]:
        """The Hugging Face tensors of a row; padding rows of the vocabulary are cut off."""
        tensors = tuple(self.read(place) for place in row.megatron)
        if row.is_vocabulary:
            tensors = tuple(tensor[: self.sizes.vocab] for tensor in tensors)
        return row.unpack(tensors)

    def own_outer(self) -> frozenset[int]:
        """MTP layers after the first whose projection and norms are not the first one's."""
        own = set()
        for k in range(1, self.mtp_layers):
            for name in ("eh_proj", "enorm", "hnorm", "final_layernorm"):
                pair = [self.read(Place(f"mtp.layers.{i}.{name}.weight")) for i in (0, k)]
                if not torch.equal(*pair):
                    own.add(k)
        return frozenset(own)


def _planned(model: MegatronModel, rows: Iterable[Row], dtype: torch.dtype | None) -> Iterator[Planned]:
    """The tensors that rows write, each once."""
    seen = set()
    for row in rows:
        meta = (
            torch.empty(shape, dtype=model.dtype(place), device="meta")
            for place, shape in zip(row.megatron, row.megatron_shapes(), strict=True)
        )
        for place, tensor in zip(row.hf, row.unpack(tuple(meta)), strict=True):
            if place.name not in seen:
                seen.add(place.name)
                yield Planned(place.name, torch.Size((*place.counts, *tensor.shape)), dtype or tensor.dtype)


def _write(writer: FolderWriter, model: MegatronModel, rows: Iterable[Row], dtype: torch.dtype | None) -> None:
    for row in rows:
        for place, tensor in zip(row.hf, model.unpacked(row), strict=True):
            writer.write(place.name, tensor if dtype is None else tensor.to(dtype), place.index)


def _reference(folder: Path) -> FolderReader | None:
    return FolderReader(folder) if (folder / INDEX).is_file() or (folder / SINGLE).is_file() else None


def _with_dtype(config: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    for part in {id(part): part for part in (config, text_config(config))}.values():
        for key in ("dtype", "torch_dtype"):
            if key in part:
                part[key] = str(dtype).removeprefix("torch.")
    return config


def export_checkpoint(
    load: str | Path,
    hf: str | Path,
    output: str | Path,
    *,
    only_mtp: bool = False,
    dtype: str | None = None,
    shard_bytes: int = 5_000_000_000,
    note: Callable[[str], None] = print,
) -> None:
    """Write the newest checkpoint below `load` as a Hugging Face folder.

    `hf` is a folder of the same model: config and tokenizer come from it, and where it has weights, the way in which
    experts are stored, and a vision model beside the text model. With `only_mtp` the output holds only what has to be
    copied over that folder.

    Memory: the tensors of one row of the table, at most the embedding.

    Raises:
        ValueError: with every missing, extra and misshapen tensor; the output exists; another model.
    """
    hf = Path(hf)
    config = read_config(hf)
    model, reference = MegatronModel(load, config), _reference(hf)
    sizes, layers = model.sizes, model.mtp_layers
    style = Style.of(reference.tensors if reference else (), sizes, layers)
    if layers > 1:
        style = replace(style, own_outer=model.own_outer())
        note(
            f"warning: {load} holds {layers} distinct MTP layers. Engines may apply only the first at every draft "
            "step; train with --mtp-use-repeated-layer for them"
        )
    backbone, head = list(backbone_rows(sizes, style)), list(mtp_rows(sizes, layers, style))
    in_checkpoint(model.reader, model.keys, [*backbone, *head]).refuse(str(load))
    # a layer that shares the first one's projection has nothing of its own to write there
    written = {place.name for row in head if row.megatron[0].name.startswith("mtp.layers.0.") for place in row.hf}
    head = [r for r in head if r.megatron[0].name.startswith("mtp.layers.0.") or r.hf[0].name not in written]
    config = with_mtp_layers(config, sizes.family, layers)
    target = DTYPES[dtype] if dtype else None
    if only_mtp:
        if not layers:
            raise ValueError(f"{load} has no MTP weights (no tensor is named mtp.*): there is nothing to export")
        if reference is None:
            raise ValueError(f"--only-mtp is laid over a folder with weights, {hf} has none")
        _export_overlay(model, head, reference, Path(output), config, target, note)
        return
    if sizes.multimodal and reference is None:
        raise ValueError(f"{hf} describes a model with a vision part, whose weights are read from it: it has none")
    rows = [*backbone, *head]
    planned = list(_planned(model, rows, target))
    kept = [name for name in (reference.tensors if reference else ()) if carried(name, sizes)]
    if reference:
        planned += [Planned(name, reference.tensors[name].shape, reference.tensors[name].dtype) for name in kept]
    if style.tied_head_too:
        planned.append(Planned(LM_HEAD.hf[0], planned[0].shape, planned[0].dtype))
    with FolderWriter(output, into_shards(planned, shard_bytes)) as writer:
        _write(writer, model, rows, target)
        for name in kept:
            assert reference is not None
            writer.write(name, reference.read(name))
        if style.tied_head_too:
            writer.write(LM_HEAD.hf[0], model.unpacked(backbone[0])[0].to(planned[0].dtype))
        copied = writer.finish(_with_dtype(config, planned[0].dtype), hf)
    note(
        f"{load} -> {output}: {sizes.family.name}, {sizes.layers} layers, {layers} MTP layer(s), {len(planned)} tensors"
        f" in {len(writer.shards)} file(s); copied {', '.join(copied) or 'no tokenizer file'}"
    )


def _export_overlay(
    model: MegatronModel,
    head: list[Row],
    reference: FolderReader,
    output: Path,
    config: dict[str, Any],
    dtype: torch.dtype | None,
    note: Callable[[str], None],
) -> None:
    """Files to copy over `reference`: the head, index, config, and the files of the reference that held an old head.

    An engine may load every tensor of every file, whatever the index says: an old head must not stay behind.
    """
    planned = list(_planned(model, head, dtype))
    files: dict[str, list[str]] = {}
    for name, info in reference.tensors.items():
        files.setdefault(info.file, []).append(name)
    old = {file: [n for n in names if n.startswith("mtp.")] for file, names in files.items()}
    only_old = sorted(file for file, names in files.items() if len(old[file]) == len(names))
    mtp_file = only_old[0] if only_old else MTP_FILE
    shards = {mtp_file: planned}
    rewritten = {}
    for file, names in files.items():
        if old[file] and file not in only_old:
            rewritten[file] = [name for name in names if name not in old[file]]
            shards[file] = [Planned(n, reference.tensors[n].shape, reference.tensors[n].dtype) for n in rewritten[file]]
    others = {n: info.file for n, info in reference.tensors.items() if info.file not in old or not old[info.file]}
    total = sum(reference.tensors[name].nbytes for name in others)
    with FolderWriter(output, shards) as writer:
        _write(writer, model, head, dtype)
        for names in rewritten.values():
            for name in names:
                writer.write(name, reference.read(name))
        writer.finish(config, reference.folder, others, total)
    reference.close()
    note(f"{model.root} -> {output}: {model.mtp_layers} MTP layer(s), {len(planned)} tensors in {mtp_file}")
    if rewritten:
        note(f"rewritten without the old head: {', '.join(rewritten)}")
    note(f"lay it over the folder: cp {output}/* {reference.folder}/")
    if len(only_old) > 1:
        note(f"then delete what held the old head: {', '.join(only_old[1:])} in {reference.folder}")
