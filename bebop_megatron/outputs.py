"""Outputs that are checked before the work, written by one process at a time, and there whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

_LOCK = ".writer"
# what a file system answers that has no locks, or none in this mount
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL)


def reason(error: OSError) -> str:
    """What the system says, without its number; with the file that it says it of."""
    text = error.strerror or str(error)
    return f"{error.filename}: {text}" if error.filename else text


def check_writable(path: str | Path, option: str, *, is_folder: bool = False) -> None:
    """See that `path` can be written, before hours of work depend on it; makes the folder that it lies in.

    Raises:
        ValueError: it cannot, with the option that asked for it and the system's reason.
    """
    path = Path(path)
    folder = path if is_folder else path.parent
    if not is_folder and path.is_dir():
        raise ValueError(f"{option} {path} is a folder: give a file")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as probe:
            # a full disk takes an empty file
            probe.write(bytes(4096))
            probe.flush()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be written: {error.strerror}") from error


def hold(folder: str | Path, option: str, name: str = _LOCK) -> IO[str]:
    """Lock a folder, or one file of it, for as long as this process lives or until the result is closed.

    The lock belongs to the process alone, not to those that it forks, and ends with it however it ends.

    Raises:
        ValueError: another process holds it.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    path = Path(folder) / name
    lock = path.open("a")
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # whoever held it may have removed it in between
        taken = not path.exists() or not os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except OSError as error:
        taken = error.errno not in _NO_LOCKS
    if taken:
        lock.close()
        raise ValueError(
            f"{option}: another run is writing there ({path} is locked). Wait for its end, or give another place"
        )
    return lock


@contextmanager
def held(path: str | Path, option: str) -> Iterator[None]:
    """Lock one file, or all files of a prefix, while a block runs; nothing stays behind.

    Raises:
        ValueError: another process holds it.
    """
    path = Path(path)
    lock = hold(path.parent, f"{option} {path}", f".{path.name}.writer")
    try:
        yield
    finally:
        Path(lock.name).unlink(missing_ok=True)
        lock.close()


@contextmanager
def replacing(path: str | Path) -> Iterator[Path]:
    """A path to write to that takes `path`'s place when all is written."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield partial
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write all of it or nothing."""
    with replacing(path) as partial:
        partial.write_text(text)


def finite(value: Any) -> Any:
    """Plain data whose NaN and infinity, which JSON has not, have become None."""
    if isinstance(value, dict):
        return {key: finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | Path, payload: dict[str, Any]) -> None:
    """Write all of it or nothing; NaN and infinity, which JSON has not, become null."""
    write_text(path, json.dumps(finite(payload), indent=2, allow_nan=False) + "\n")


def read_json(path: str | Path, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> dict[str, Any]:
    """The object that a file holds; `object_hook` as for `json.loads`.

    Raises:
        ValueError: no JSON, or no object, with the file's name.
    """
    try:
        payload = json.loads(Path(path).read_text(), object_hook=object_hook)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(payload, dict):
        raise ValueError(f"{path} is JSON, but no object")
    return payload


class PartialFolder:
    """A folder that is made beside its place and renamed when whole: an interrupted run leaves nothing at its place.

    Raises:
        ValueError: the place is taken, or another process is making it.
    """

    def __init__(self, place: Path) -> None:
        if place.exists() and (not place.is_dir() or any(place.iterdir())):
            raise ValueError(f"{place} exists: give a new folder, nothing is overwritten")
        self.place = place
        self.path = place.with_name(f".{place.name}.partial")
        self._lock: IO[str] | None = None

    def begin(self) -> None:
        """Make it, empty."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = hold(self.path, f"--output {self.place}")
        for left in self.path.iterdir():
            if left.name != _LOCK:
                shutil.rmtree(left) if left.is_dir() else left.unlink()

    def publish(self) -> None:
        """Give it its name."""
        self.path.replace(self.place)
        # not before: another process would take the folder for left behind
        (self.place / _LOCK).unlink()

    def end(self, failed: Any) -> None:
        """Let go; what is there of it goes away where it failed."""
        if self._lock is None:
            return
        if failed:
            shutil.rmtree(self.path, ignore_errors=True)
        self._lock.close()
        self._lock = None
