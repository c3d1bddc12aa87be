"""A corpus that every machine has: the Python sources of the running interpreter's standard library."""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

# tests repeat themselves and hold broken sources; the others are not the standard library, or are generated
_SKIPPED = frozenset(
    (
        "test",
        "tests",
        "idle_test",
        "site-packages",
        "dist-packages",
        "__pycache__",
        "_bundled",
        "pydoc_data",
    )
)


def stdlib_files() -> Iterator[Path]:
    """The library's `.py` files in an order that depends on their names only."""
    for folder, names, files in os.walk(sysconfig.get_paths()["stdlib"]):
        # in place: os.walk then leaves the others out, and visits these in order
        names[:] = sorted(name for name in names if name not in _SKIPPED and not name.startswith("config-"))
        yield from (Path(folder, name) for name in sorted(files) if name.endswith(".py"))
