"""Hugging Face -> Megatron."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from torch import Tensor

from bebop_megatron.bridges.arguments import command_line, model_arguments
from bebop_megatron.bridges.checkpoint_keys import CheckpointKeys
from bebop_megatron.bridges.families import (
    hybrid_pattern,
    model_kind,
    mtp_layers_in,
    read_config,
    sizes_of,
    text_config,
    with_mtp_layers,
)
from bebop_megatron.bridges.huggingface import FolderReader, copy_files
from bebop_megatron.bridges.initial_head import initial_head
from bebop_megatron.bridges.names import LM_HEAD
from bebop_megatron.bridges.plan import Place, Row, Style, backbone_rows, extra_states, mtp_rows
from bebop_megatron.convert.findings import in_folder, mtp_layers_named
from bebop_megatron.mcore.checkpoint_arguments import arguments_from, common_state
from bebop_megatron.mcore.torch_dist import TorchDistWriter

FLAGS_FILE = "megatron_arguments.txt"
REFERENCE_FOLDER = "huggingface"


def _packed(reader: FolderReader, row: Row) -> tuple[Tensor, ...]:
    return row.pack(tuple(reader.read(place.name, place.index) for place in row.hf))


def write_rows(
    writer: TorchDistWriter, keys: CheckpointKeys, tensors: Iterable[tuple[Place, Tensor]], extra: Iterable[Place]
) -> None:
    """Write parameters by their GPTModel names, and the empty extra states that Megatron's modules ask for."""
    for place, tensor in tensors:
        at = keys.locate(place)
        writer.add(at.name, tensor, at.index, at.counts)
    for place in extra:
        at = keys.locate(place)
        writer.add_object(at.name, None, at.index, at.counts)


def _mtp_layers(config: dict, names: Iterable[str], init_mtp: str | None, folder: str | Path) -> int:
    """Physical MTP layers in a folder.

    Raises:
        ValueError: config.json and the tensors disagree, or a head is to be made where there is one.
    """
    named, stated = mtp_layers_named(names), mtp_layers_in(config)
    if named and stated and named != stated:
        raise ValueError(f"{folder}: config.json states {stated} MTP layers, the tensors are those of {named}")
    if named and init_mtp:
        raise ValueError(f"{folder} has MTP weights already: leave out --init-mtp")
    if stated and not named and not init_mtp:
        raise ValueError(
            f"{folder}: config.json states {stated} MTP layers, but no tensor is named mtp.*. Get the missing file, or "
            "make a head with --init-mtp last-layer"
        )
    return named


def import_checkpoint(
    hf: str | Path,
    output: str | Path,
    *,
    kind: str | None = None,
    init_mtp: str | None = None,
    depth: int | None = None,
    seed: int = 0,
    note: Callable[[str], None] = print,
) -> None:
    """Write the model of a Hugging Face folder as a `torch_dist` checkpoint that loads under any layout.

    `kind` is `gpt` or `hybrid`; `depth` is the number of draft steps that the checkpoint's arguments ask for.

    Memory: the tensors of one row of the table, at most the embedding.

    Raises:
        ValueError: with every missing, extra and misshapen tensor; the output exists; an unknown family.
    """
    hf = Path(hf)
    config, reader = read_config(hf), FolderReader(hf)
    sizes = sizes_of(config)
    named = _mtp_layers(config, reader.tensors, init_mtp, hf)
    layers = named or (1 if init_mtp else 0)
    style = Style.of(reader.tensors, sizes, named)
    backbone, head = list(backbone_rows(sizes, style)), list(mtp_rows(sizes, named, style))
    in_folder(reader, [*backbone, *head], sizes).refuse(str(hf))
    if style.tied_head_too and not torch.equal(
        reader.read(LM_HEAD.hf[0]), reader.read(f"{sizes.prefix}embed_tokens.weight")
    ):
        raise ValueError(f"{hf} ties embedding and LM head by config.json, but {LM_HEAD.hf[0]} is another tensor")

    kind, depth = model_kind(sizes, kind), depth or layers
    pattern = hybrid_pattern(sizes, depth) if kind == "hybrid" else ""
    flags = command_line(model_arguments(config, kind, layers, depth if layers else 0), sizes.family)
    common = common_state(arguments_from(flags, sizes.vocab))
    keys = CheckpointKeys.to_write(sizes, pattern)
    with TorchDistWriter(output) as writer:
        rows = ((place, tensor) for row in (*backbone, *head) for place, tensor in _each(reader, row))
        write_rows(writer, keys, rows, extra_states(sizes, layers))
        if init_mtp:
            by_place = {place: (row, i) for row in backbone for i, place in enumerate(row.megatron)}

            def read(place: Place) -> Tensor:
                row, i = by_place[place]
                return _packed(reader, row)[i]

            dtype = reader.tensors[f"{sizes.prefix}embed_tokens.weight"].dtype
            std = text_config(config).get("initializer_range", 0.02)
            write_rows(writer, keys, initial_head(sizes, init_mtp, read, dtype=dtype, std=std, seed=seed), ())
        reference = writer.partial / REFERENCE_FOLDER
        reference.mkdir()
        copy_files(hf, reference)
        stated = with_mtp_layers(config, sizes.family, layers)
        (reference / "config.json").write_text(json.dumps(stated, indent=2, ensure_ascii=False) + "\n")
        writer.finish(common, [(FLAGS_FILE, shlex.join(flags) + "\n")])
    reader.close()
    note(f"{hf} -> {output}: {sizes.family.name}, {sizes.layers} layers, {layers} MTP layer(s), {kind} model")
    note(f"Megatron arguments (also in {Path(output) / FLAGS_FILE}):\n{shlex.join(flags)}")
    # Megatron pads the tokenizer's size, not the model's
    note(
        f"and under tensor parallel size T, --make-vocab-size-divisible-by {sizes.vocab:,}/T, for {sizes.vocab:,} rows"
    )


def _each(reader: FolderReader, row: Row) -> Iterable[tuple[Place, Tensor]]:
    return zip(row.megatron, _packed(reader, row), strict=True)
