"""What a Megatron checkpoint holds, read from its metadata without loading a tensor."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_TRACKER = "latest_checkpointed_iteration.txt"
# what a damaged pickle may end in
UNREADABLE = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)


def is_checkpoint(root: str | Path) -> bool:
    """Whether a Megatron checkpoint has been written below `root`."""
    return (Path(root) / _TRACKER).is_file()


def latest_iteration_dir(root: str | Path) -> Path:
    """The folder of the newest checkpoint below `root`.

    Raises:
        ValueError: `root` is not a Megatron checkpoint folder, or does not say which checkpoint is the newest.
    """
    root = Path(root)
    tracker = root / _TRACKER
    if not tracker.is_file():
        raise ValueError(f"{root} is not a Megatron checkpoint: it has no {_TRACKER}")
    name = tracker.read_text().strip()
    if name != "release" and not name.isdigit():
        saved = sorted(path.name for path in root.glob("iter_*"))
        raise ValueError(
            f"{tracker} is damaged: it should hold a number or release, not {name[:20]!r}. Write the number of a "
            f"checkpoint into it ({', '.join(saved) or 'there is none'})"
        )
    folder = root / (name if name == "release" else f"iter_{int(name):07d}")
    if not folder.is_dir():
        raise ValueError(f"{tracker} names iteration {name}, but {folder} does not exist")
    return folder


def starting_dir(root: str | Path, step: int | None = None) -> Path:
    """The folder that Megatron reads below `root`: that of --ckpt-step, which may not exist, else the newest.

    Raises:
        ValueError: as `latest_iteration_dir`.
    """
    return Path(root) / f"iter_{step:07d}" if step else latest_iteration_dir(root)


def checkpoint_keys(root: str | Path) -> set[str]:
    """Tensor names in the newest `torch_dist` checkpoint below `root`.

    Raises:
        ValueError: not a checkpoint, or not in the `torch_dist` format.
    """
    folder = latest_iteration_dir(root)
    if not (folder / ".metadata").is_file():
        raise ValueError(f"{folder} is not a torch_dist checkpoint: it has no .metadata (use --ckpt-format torch_dist)")
    return set(_description(folder).state_dict_metadata)


def _description(folder: Path) -> Any:
    from torch.distributed.checkpoint import FileSystemReader

    try:
        return FileSystemReader(folder).read_metadata()
    except UNREADABLE as error:
        raise unreadable(folder, error) from error


def unreadable(folder: Path, error: BaseException) -> ValueError:
    """What is said of a checkpoint in `folder` whose description does not load."""
    return ValueError(f"{folder / '.metadata'} cannot be read, is it damaged? {error or type(error).__name__}")


@contextmanager
def damage_named(folder: str | Path) -> Iterator[None]:
    """Around what loads a checkpoint: a file of it that does not decode is named as that.

    Raises:
        ValueError: instead of the exception, which is torch's and no subclass of `Exception`.
    """
    from torch.distributed.checkpoint import CheckpointException

    try:
        yield
    except CheckpointException as error:
        cause = next(iter(error.failures.values()))[0]
        if not isinstance(cause, pickle.UnpicklingError | EOFError):
            raise
        raise ValueError(f"a file of the checkpoint {folder} is damaged: {cause or type(cause).__name__}") from error


def _damage(file: Path, end: int) -> str | None:
    """What is wrong with a file that should be `end` bytes long and begin as torch writes it."""
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size < end:
        return f"{file.name} has {size:,} bytes of {end:,}"
    with file.open("rb") as opened:
        # every part of a file is an archive of torch.save
        return None if opened.read(4) == b"PK\x03\x04" else f"{file.name} begins with other bytes than were written"


def require_whole_files(folder: Path, description: Any) -> None:
    """See that every file of a checkpoint is there and as long as its description says; four bytes of each are read.

    Raises:
        ValueError: the files that are missing, cut short or overwritten at their head.
    """
    ends: dict[str, int] = {}
    for info in (description.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    wrong = [said for name, end in sorted(ends.items()) if (said := _damage(folder / name, end))]
    if wrong:
        more = f" and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"the checkpoint {folder} is damaged: {'; '.join(wrong[:5])}{more}. Go back to an earlier one")


def require_whole(root: str | Path) -> None:
    """Refuse a damaged checkpoint before anything is built; other formats than `torch_dist` are Megatron's to check.

    Raises:
        ValueError: its description cannot be read, a file is missing, cut short or overwritten at its head.
    """
    folder = latest_iteration_dir(root)
    if (folder / ".metadata").is_file():
        require_whole_files(folder, _description(folder))


def weight_bytes(root: str | Path) -> int:
    """Size of the newest checkpoint's parameters, optimizer state not counted.

    Raises:
        ValueError: not a checkpoint, or not in the `torch_dist` format.
    """
    checkpoint_keys(root)
    described = _description(latest_iteration_dir(root)).state_dict_metadata
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
            f"the checkpoint {root} has no MTP weights (no tensor is named mtp.*). Give it some by python -m "
            "bebop_megatron.convert attach, or start without --mtp-freeze-schedule to train a head from scratch"
        )
