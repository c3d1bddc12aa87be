"""Megatron's `torch_dist` checkpoints as streams of tensors: no process group, no model, one tensor in memory.

Nothing is unpickled but plain descriptions of tensors, and a checkpoint appears under its name only when whole.
"""

from __future__ import annotations

import contextlib
import io
import itertools
import json
import os
import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from bebop_megatron.mcore.checkpoints import UNREADABLE, latest_iteration_dir, require_whole_files, unreadable
from bebop_megatron.outputs import PartialFolder

_COMMON = "common_state/shard_0_1"
_FILE_BYTES = 4 << 30
# a checkpoint's description is pickled by torch: these are the names that it is made of
_DESCRIPTION = {
    "torch": {"Size"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    # the plans that each rank of a run saved by
    "torch.distributed.checkpoint.planner": {
        "BytesIOWriteData",
        "SavePlan",
        "TensorWriteData",
        "WriteItem",
        "WriteItemType",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo", "_StoragePrefix"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
    "collections": {"OrderedDict"},
    "megatron.core.dist_checkpointing.strategies.torch": {"MCoreMetadata", "MCoreSavePlan"},
}


class _Description(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if name in _DESCRIPTION.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            return getattr(torch, name)
        raise ValueError(
            f"the checkpoint's .metadata wants to load {module}.{name}, which describes no tensor: refused"
        )


class TorchDistReader:
    """The newest checkpoint below `root`, tensor by tensor.

    Raises:
        ValueError: `root` holds no whole `torch_dist` checkpoint, or a damaged one.
    """

    def __init__(self, root: str | Path) -> None:
        self.folder = latest_iteration_dir(root)
        if not (self.folder / ".metadata").is_file() or not (self.folder / "metadata.json").is_file():
            raise ValueError(
                f"{self.folder} is not a whole torch_dist checkpoint: .metadata or metadata.json is missing"
            )
        with (self.folder / ".metadata").open("rb") as file:
            try:
                metadata = _Description(file).load()
            except UNREADABLE as error:
                raise unreadable(self.folder, error) from error
        require_whole_files(self.folder, metadata)
        self._files = FileSystemReader(self.folder)
        self._where: dict[MetadataIndex, Any] = metadata.storage_data
        described = metadata.state_dict_metadata
        self.tensors: dict[str, TensorStorageMetadata] = {
            key: value for key, value in described.items() if isinstance(value, TensorStorageMetadata)
        }
        self._cells: dict[tuple[str, int], dict[tuple[int, ...], list[ChunkStorageMetadata]]] = {}

    def _load(self, view: Any, what: str) -> Any:
        try:
            return torch.load(view, map_location="cpu", weights_only=True)
        except (*UNREADABLE, RuntimeError) as error:
            # torch's own text recommends to load without weights_only
            said = f"{what} cannot be read ({type(error).__name__}): its file is damaged"
            raise ValueError(f"{self.folder}: {said}") from error

    def _open(self, index: MetadataIndex) -> Any:
        info = self._where[index]
        file = (self.folder / info.relative_path).open("rb")
        return file, self._files._slice_file(file, info)

    def common(self) -> dict[str, Any]:
        """What is no tensor: the arguments of the run, the iteration, Megatron's own marks."""
        import megatron.core  # noqa: F401 - it tells torch which of its classes are plain data

        if (self.folder / "common.pt").is_file():
            return self._load(self.folder / "common.pt", "the common state")
        index = MetadataIndex(_COMMON)
        if index not in self._where:
            raise ValueError(f"{self.folder} has neither a common state nor common.pt: it is no Megatron checkpoint")
        file, view = self._open(index)
        with file:
            return self._load(io.BytesIO(view.read()), "the common state")[0]

    def _chunks(self, key: str, index: tuple[int, ...]) -> list[ChunkStorageMetadata]:
        """Chunks that hold a part of `tensor[index]`; found in one look-up, as there may be tens of thousands."""
        depth = len(index)
        if (key, depth) not in self._cells:
            cells: dict[tuple[int, ...], list[ChunkStorageMetadata]] = {}
            for chunk in self.tensors[key].chunks:
                covered = (range(o, o + s) for o, s in zip(chunk.offsets[:depth], chunk.sizes[:depth], strict=True))
                for cell in itertools.product(*covered):
                    cells.setdefault(cell, []).append(chunk)
            self._cells[key, depth] = cells
        return self._cells[key, depth].get(index, [])

    def read(self, key: str, index: tuple[int, ...] = ()) -> Tensor:
        """`tensor[index]`, put together from the chunks that the ranks of a run wrote.

        Memory: the result and one chunk.

        Raises:
            ValueError: a part of it is in no chunk.
        """
        described, depth = self.tensors[key], len(index)
        shape = described.size[depth:]
        out, filled = None, 0
        for chunk in self._chunks(key, index):
            file, view = self._open(MetadataIndex(key, chunk.offsets))
            with file:
                part = self._load(view, key)
            part = part.reshape(chunk.sizes)[tuple(i - o for i, o in zip(index, chunk.offsets[:depth], strict=True))]
            if part.shape == shape:
                return part if part.untyped_storage().nbytes() == part.nbytes else part.clone()
            out = torch.empty(shape, dtype=described.properties.dtype) if out is None else out
            at = zip(chunk.offsets[depth:], chunk.sizes[depth:], strict=True)
            out[tuple(slice(o, o + s) for o, s in at)] = part
            filled += part.numel()
        if out is None or filled != shape.numel():
            raise ValueError(f"{self.folder}: {key}{list(index) or ''} is not complete in the checkpoint")
        return out


class TorchDistWriter:
    """Writes a checkpoint below `root` that any layout loads; used as a context manager.

    Files go to a folder beside it, which is renamed at the end: an interrupted run leaves nothing under `root`.

    Raises:
        ValueError: `root` exists and is not empty, or another process is writing it.
    """

    def __init__(self, root: str | Path) -> None:
        self._output = PartialFolder(Path(root))
        self.partial = self._output.path
        # a checkpoint that was converted, not trained: Megatron starts it at iteration 0 without an optimizer
        self.folder = self.partial / "release"
        self._file: Any = None
        self._count = 0
        self._described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._seen: dict[str, set[tuple[int, ...]]] = {}
        self._results: list[WriteResult] = []

    def __enter__(self) -> TorchDistWriter:
        self._output.begin()
        try:
            self.folder.mkdir(parents=True)
        except OSError as error:
            self._output.end(error)
            raise
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self._file is not None:
            # the error that ended the block is the one to hear of; `finish` has closed it where there was none
            with contextlib.suppress(OSError):
                self._file.close()
        self._output.end(kind)

    def _write(self, index: MetadataIndex, value: Any) -> None:
        if self._file is not None and self._file.tell() >= _FILE_BYTES:
            self._close_file()
        if self._file is None:
            self._file = (self.folder / f"__0_{self._count}.distcp").open("wb")
            self._count += 1
        start = self._file.tell()
        try:
            torch.save(value, self._file)
        except RuntimeError as error:
            # torch reports a full disk as a position in the file that it did not expect
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise
        length = self._file.tell() - start
        info = _StorageInfo(Path(self._file.name).name, start, length)
        self._results.append(WriteResult(index=index, size_in_bytes=length, storage_data=info))

    def _close_file(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._file = None

    def add(self, key: str, value: Tensor, index: tuple[int, ...] = (), counts: tuple[int, ...] = ()) -> None:
        """Write `tensor[index]` of a tensor whose leading dimensions are `counts`.

        Raises:
            ValueError: it has been written already, or does not fit what was.
        """
        if index in self._seen.setdefault(key, set()):
            raise ValueError(f"{key}{list(index) or ''} was written twice")
        self._seen[key].add(index)
        size = torch.Size((*counts, *value.shape))
        if key not in self._described:
            self._described[key] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [])
        described: Any = self._described[key]
        if described.size != size or described.properties.dtype != value.dtype:
            raise ValueError(
                f"{key}{list(index)} is {value.dtype} {list(size)}, but another part of it is "
                f"{described.properties.dtype} {list(described.size)}"
            )
        offsets = torch.Size((*index, *(0 for _ in value.shape)))
        sizes = torch.Size((*(1 for _ in index), *value.shape))
        described.chunks.append(ChunkStorageMetadata(offsets, sizes))
        value = value.detach().reshape(sizes).contiguous()
        if value.untyped_storage().nbytes() != value.nbytes:
            # the rest of the tensor that it was cut out of would be written too
            value = value.clone()
        self._write(MetadataIndex(key, offsets, len(described.chunks) - 1), value)

    def add_object(self, key: str, value: Any, index: tuple[int, ...] = (), counts: tuple[int, ...] = ()) -> None:
        """Write something that is no tensor, such as a layer's extra state."""
        text = [".".join(map(str, numbers)) for numbers in (index or (0,), counts or (1,))]
        unique = f"{key}/shard_{text[0]}_{text[1]}"
        self._described[unique] = BytesStorageMetadata()
        self._write(MetadataIndex(unique), [value])

    def finish(self, common: dict[str, Any], extra_files: Iterable[tuple[str, str]] = ()) -> None:
        """Write what is no tensor and the description, then give the checkpoint its name.

        Raises:
            ValueError: a tensor has holes.
        """
        for key, seen in self._seen.items():
            described: Any = self._described[key]
            depth = len(next(iter(seen)))
            if len(seen) != described.size[:depth].numel():
                raise ValueError(f"{key} has {described.size[:depth].numel()} parts, {len(seen)} were written")
        self.add_object("common_state", common)
        self._close_file()
        writer = FileSystemWriter(self.folder)
        writer.finish(Metadata(self._described), [self._results])
        (self.folder / "metadata.json").write_text(
            json.dumps({"sharded_backend": "torch_dist", "sharded_backend_version": 1})
        )
        for name, text in extra_files:
            (self.partial / name).write_text(text)
        (self.partial / "latest_checkpointed_iteration.txt").write_text("release")
        self._output.publish()
