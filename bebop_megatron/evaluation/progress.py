"""A progress bar on standard error, drawn by the first of the processes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from bebop_megatron.launcher import is_first


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
