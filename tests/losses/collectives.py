"""Records the collectives that run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor


@contextmanager
def counting(group: Any, size: Callable[[Tensor], int] = Tensor.numel) -> Iterator[list[tuple[str, int]]]:
    """Names and sizes (elements, or what `size` says) of the collectives that run; each must name its group."""
    calls: list[tuple[str, int]] = []
    names = [name for name in dir(dist) if name.startswith(("all_", "broadcast", "reduce", "gather", "scatter"))]
    originals = {name: getattr(dist, name) for name in names if callable(getattr(dist, name))}

    def counted(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            assert kwargs.get("group") is group, f"{name} does not name its group"
            tensor = args[1] if name.startswith("all_gather") else args[0]
            calls.append((name, size(tensor)))
            return originals[name](*args, **kwargs)

        return call

    for name in originals:
        setattr(dist, name, counted(name))
    try:
        yield calls
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)
