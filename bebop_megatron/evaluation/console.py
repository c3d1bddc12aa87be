"""What an evaluation shows while it runs: by the first of its processes, on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_first() -> bool:
    """Whether this process writes files and talks."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def progress_bar(description: str, total: int, quiet: bool) -> Iterator[Callable[[int], None]]:
    """A bar that is gone when the block ends, on a terminal only; yields what takes the tokens done so far."""
    from tqdm import tqdm

    shown = not quiet and is_first() and sys.stderr.isatty()
    with tqdm(total=total, desc=description, unit=" tokens", file=sys.stderr, disable=not shown, leave=False) as bar:

        def advance(done: int) -> None:
            if shown:
                bar.update(min(done, total) - bar.n)

        yield advance
