"""A head for a Megatron checkpoint that has none."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

from torch import Tensor

from bebop_megatron.bridges.checkpoint_keys import CheckpointKeys
from bebop_megatron.bridges.families import hybrid_pattern
from bebop_megatron.bridges.initial_head import initial_head
from bebop_megatron.bridges.plan import Place, Style, backbone_rows, extra_states
from bebop_megatron.convert.exporting import MegatronModel
from bebop_megatron.convert.findings import in_checkpoint
from bebop_megatron.convert.importing import write_rows
from bebop_megatron.mcore.checkpoint_arguments import common_state
from bebop_megatron.mcore.torch_dist import TorchDistWriter


def attach_head(
    load: str | Path,
    output: str | Path,
    *,
    init_mtp: str = "last-layer",
    depth: int = 1,
    seed: int = 0,
    note: Callable[[str], None] = print,
) -> None:
    """Copy the newest checkpoint below `load`, without its optimizer, and give it one MTP layer.

    Raises:
        ValueError: it has a head, was written by Megatron Bridge, is none of the families, or lacks tensors; the
            output exists.
    """
    model = MegatronModel(load)
    args = model.reader.common().get("args")
    if args is None:
        raise ValueError(
            f"{load} has the config of Megatron Bridge, from which no run's arguments can be made: export it, and "
            "import the folder with --init-mtp"
        )
    if model.mtp_layers:
        raise ValueError(f"{load} has {model.mtp_layers} MTP layer(s) already")
    sizes, pattern = model.sizes, model.keys.pattern
    rows = list(backbone_rows(sizes, Style()))
    in_checkpoint(model.reader, model.keys, rows).refuse(str(load))
    if pattern:
        args.hybrid_layer_pattern = pattern.split("/")[0] + hybrid_pattern(sizes, depth)[2 * sizes.layers :]
    args.mtp_num_layers, args.mtp_use_repeated_layer, args.iteration = depth, True, 0
    keys = CheckpointKeys(model.keys.stacked, sizes.layers, getattr(args, "hybrid_layer_pattern", None) or "")

    def copies() -> Iterator[tuple[Place, Tensor]]:
        for row in rows:
            for place in row.megatron:
                yield place, model.read(place)

    with TorchDistWriter(output) as writer:
        write_rows(writer, keys, copies(), extra_states(sizes, 1))
        dtype = model.dtype(rows[0].megatron[0])
        std = getattr(args, "init_method_std", None) or 0.02
        write_rows(writer, keys, initial_head(sizes, init_mtp, model.read, dtype=dtype, std=std, seed=seed), ())
        writer.finish(common_state(args))
    note(f"{load} -> {output}: one MTP layer ({init_mtp}), {depth} draft step(s); optimizer states are left behind")
