"""Safetensors folders, read and written tensor by tensor, and their config and tokenizer files.

The reader is safetensors' own. The writer is not: its `save_file` wants a whole shard in memory, where the format
itself (a JSON header, then bytes) lets every tensor go straight to its place.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from bebop_megatron.outputs import PartialFolder, read_json

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_TORCH = {name: dtype for dtype, name in _DTYPES.items()}
# pages of a mapped file count as this process's memory until the file is closed
_REOPEN_BYTES = 64 << 20
_NOT_COPIED = (".safetensors", ".bin", ".pt", ".pth", ".py", ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
_COPIED = ("token", "vocab", "merges", "special_tokens", "chat_template", "generation_config", "preprocessor")


@dataclass(frozen=True)
class TensorInfo:
    """One tensor of a folder."""

    file: str
    dtype: torch.dtype
    shape: torch.Size

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def _header(path: Path) -> dict[str, Any]:
    with path.open("rb") as file:
        start = file.read(8)
        size = int.from_bytes(start, "little")
        if len(start) < 8 or size > path.stat().st_size - 8:
            raise ValueError(f"{path} is not a whole safetensors file")
        try:
            header = json.loads(file.read(size))
        except ValueError as error:
            raise ValueError(f"{path} is damaged: its header is no JSON ({error})") from error
    header.pop("__metadata__", None)
    end = max((value["data_offsets"][1] for value in header.values()), default=0)
    if 8 + size + end != path.stat().st_size:
        raise ValueError(
            f"{path} is {path.stat().st_size:,} bytes long, its header says {8 + size + end:,}: cut short?"
        )
    return header


class FolderReader:
    """The tensors of a Hugging Face folder.

    Raises:
        ValueError: no safetensors in it, a file of its index is missing or cut short, or the index names other tensors
            than the files hold.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        index = self.folder / INDEX
        if index.is_file():
            places = read_json(index)["weight_map"]
            files = sorted(set(places.values()))
        elif (self.folder / SINGLE).is_file():
            places, files = None, [SINGLE]
        else:
            raise ValueError(f"{self.folder} has neither {INDEX} nor {SINGLE}")
        missing = [name for name in files if not (self.folder / name).is_file()]
        if missing:
            raise ValueError(f"{index} names files that do not exist: {', '.join(missing)}")
        self.tensors: dict[str, TensorInfo] = {}
        for name in files:
            for key, value in _header(self.folder / name).items():
                if places is None or places.get(key) == name:
                    if value["dtype"] not in _TORCH:
                        raise ValueError(f"{key} in {name} has dtype {value['dtype']}, which is not converted")
                    self.tensors[key] = TensorInfo(name, _TORCH[value["dtype"]], torch.Size(value["shape"]))
        lost = sorted(set(places or ()) - set(self.tensors))
        if lost:
            raise ValueError(f"{index} names tensors that their files do not hold: {', '.join(lost)}")
        self._open: tuple[str, Any] | None = None
        self._read_bytes = 0

    def read(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """`tensor[index]` as a copy of its own."""
        info = self.tensors[name]
        if self._open is None or self._open[0] != info.file or self._read_bytes > _REOPEN_BYTES:
            self._open, self._read_bytes = None, 0
            self._open = (info.file, safe_open(self.folder / info.file, framework="pt"))
        file = self._open[1]
        tensor = file.get_slice(name)[index[0]] if index else file.get_tensor(name)
        tensor = tensor.clone()
        self._read_bytes += tensor.nbytes
        return tensor

    def close(self) -> None:
        """Let go of the file that is open."""
        self._open = None


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written."""

    name: str
    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        return self.shape.numel() * self.dtype.itemsize


def into_shards(tensors: Iterable[Planned], limit: int) -> dict[str, list[Planned]]:
    """File name -> tensors, in their order; a tensor larger than the limit has a file of its own."""
    groups: list[list[Planned]] = [[]]
    size = 0
    for tensor in tensors:
        if groups[-1] and size + tensor.nbytes > limit:
            groups.append([])
            size = 0
        groups[-1].append(tensor)
        size += tensor.nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{i + 1:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups)}


class FolderWriter:
    """Writes a Hugging Face folder; used as a context manager.

    Files go to a folder beside it, which is renamed at the end: an interrupted run leaves nothing under its name.

    Raises:
        ValueError: the folder exists and is not empty, or another process is writing it.
    """

    def __init__(self, folder: str | Path, shards: dict[str, list[Planned]]) -> None:
        self._output = PartialFolder(Path(folder))
        self.partial = self._output.path
        self.shards = shards
        self._at: dict[str, tuple[str, int, Planned]] = {}
        self._written: dict[str, set[tuple[int, ...]]] = {}
        self._filled: dict[str, int] = {}
        self._files: dict[str, Any] = {}

    def __enter__(self) -> FolderWriter:
        self._output.begin()
        try:
            self._begin_files()
        except BaseException:
            self.__exit__(BaseException)
            raise
        return self

    def _begin_files(self) -> None:
        for file, tensors in self.shards.items():
            header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
            offset = 0
            for tensor in tensors:
                if tensor.name in self._at:
                    raise ValueError(f"{tensor.name} would be written twice")
                self._at[tensor.name] = (file, offset, tensor)
                header[tensor.name] = {
                    "dtype": _DTYPES[tensor.dtype],
                    "shape": list(tensor.shape),
                    "data_offsets": [offset, offset + tensor.nbytes],
                }
                offset += tensor.nbytes
            text = json.dumps(header, separators=(",", ":")).encode()
            text += b" " * (-len(text) % 8)
            self._files[file] = (self.partial / file).open("wb")
            self._files[file].write(len(text).to_bytes(8, "little") + text)
            start = 8 + len(text)
            self._files[file].truncate(start + offset)
            for tensor in tensors:
                name, at, planned = self._at[tensor.name]
                self._at[tensor.name] = (name, start + at, planned)

    def __exit__(self, kind: Any, *_: Any) -> None:
        for file in self._files.values():
            # the error that ended the block is the one to hear of; `finish` has closed them where there was none
            with contextlib.suppress(OSError):
                file.close()
        self._output.end(kind)

    def write(self, name: str, value: Tensor, index: tuple[int, ...] = ()) -> None:
        """Write `tensor[index]`.

        Raises:
            ValueError: it is not what was planned, or has been written already.
        """
        file, offset, planned = self._at[name]
        if value.shape != planned.shape[len(index) :] or value.dtype != planned.dtype:
            raise ValueError(f"{name}{list(index) or ''} is {value.dtype} {list(value.shape)}, planned was {planned}")
        if index in self._written.setdefault(name, set()):
            raise ValueError(f"{name}{list(index) or ''} was written twice")
        self._written[name].add(index)
        at = 0
        for position, count in zip(index, planned.shape, strict=False):
            at = at * count + position
        self._filled[name] = self._filled.get(name, 0) + value.nbytes
        self._files[file].seek(offset + at * value.nbytes)
        self._files[file].write(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    def finish(
        self, config: dict[str, Any], reference: Path, others: dict[str, str] | None = None, other_bytes: int = 0
    ) -> list[str]:
        """Write index, config and tokenizer files, then give the folder its name; returns the files copied.

        `others` are tensors of the index that lie in files outside this folder.

        Raises:
            ValueError: a planned tensor was not written, or not wholly.
        """
        holes = [name for name, (_, _, planned) in self._at.items() if self._filled.get(name, 0) != planned.nbytes]
        if holes:
            raise ValueError(f"not written: {', '.join(holes)}")
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())
            file.close()
        copied = copy_files(reference, self.partial)
        (self.partial / "config.json").write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n")
        if list(self.shards) != [SINGLE] or others:
            total = other_bytes + sum(planned.nbytes for _, _, planned in self._at.values())
            places = {name: file for name, (file, _, _) in self._at.items()} | (others or {})
            index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
            (self.partial / INDEX).write_text(json.dumps(index, indent=2) + "\n")
        self._output.publish()
        return copied


def copy_files(source: Path, target: Path) -> list[str]:
    """Copy tokenizer and generation files: no weights and no code."""
    copied = []
    for path in sorted(source.iterdir()):
        name = path.name.lower()
        if path.is_file() and not name.endswith(_NOT_COPIED) and any(part in name for part in _COPIED):
            shutil.copyfile(path, target / path.name)
            copied.append(path.name)
    return copied
