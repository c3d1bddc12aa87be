"""What a Megatron checkpoint holds, read from its metadata without loading a tensor."""

from __future__ import annotations

from pathlib import Path

_TRACKER = "latest_checkpointed_iteration.txt"


def is_checkpoint(root: str | Path) -> bool:
    """Whether a Megatron checkpoint has been written below `root`."""
    return (Path(root) / _TRACKER).is_file()


def latest_iteration_dir(root: str | Path) -> Path:
    """The folder of the newest checkpoint below `root`.

    Raises:
        ValueError: `root` is not a Megatron checkpoint folder.
    """
    root = Path(root)
    tracker = root / _TRACKER
    if not tracker.is_file():
        raise ValueError(f"{root} is not a Megatron checkpoint: it has no {_TRACKER}")
    name = tracker.read_text().strip()
    folder = root / (name if name == "release" else f"iter_{int(name):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names iteration {name}, but {folder} does not exist")
    return folder


def checkpoint_keys(root: str | Path) -> set[str]:
    """Tensor names in the newest `torch_dist` checkpoint below `root`.

    Raises:
        ValueError: not a checkpoint, or not in the `torch_dist` format.
    """
    folder = latest_iteration_dir(root)
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder} is not a torch_dist checkpoint: it has no .metadata (use --ckpt-format torch_dist)")
    from torch.distributed.checkpoint import FileSystemReader

    return set(FileSystemReader(folder).read_metadata().state_dict_metadata)


def weight_bytes(root: str | Path) -> int:
    """Size of the newest checkpoint's parameters, optimizer state not counted.

    Raises:
        ValueError: not a checkpoint, or not in the `torch_dist` format.
    """
    from torch.distributed.checkpoint import FileSystemReader

    checkpoint_keys(root)
    described = FileSystemReader(latest_iteration_dir(root)).read_metadata().state_dict_metadata
    return sum(
        tensor.size.numel() * tensor.properties.dtype.itemsize
        for key, tensor in described.items()
        if hasattr(tensor, "size") and not key.startswith(("optimizer", "rng_state", "chained_"))
    )


def has_mtp_weights(root: str | Path) -> bool:
    """Whether the newest checkpoint below `root` holds MTP layers."""
    # optimizer states repeat the parameter's name behind a prefix
    return any(key.startswith("mtp.") or key.startswith("model.mtp.") for key in checkpoint_keys(root))


def require_mtp_weights(root: str | Path) -> None:
    """Refuse a checkpoint without MTP layers before anything is built.

    Raises:
        ValueError: the checkpoint cannot be read or holds no `mtp.*` tensors.
    """
    if not has_mtp_weights(root):
        raise ValueError(
            f"the checkpoint {root} has no MTP weights (no tensor is named mtp.*). Train it with --mtp-num-layers, "
            "or start without --mtp-freeze-schedule to train a head from scratch"
        )
