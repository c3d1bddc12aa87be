"""Packages that an adapter is for, and that nothing else here needs."""

from __future__ import annotations

import importlib.util


def require(module: str, message: str) -> None:
    """See that a module can be imported, without importing it.

    Raises:
        RuntimeError: it cannot, with `message`.
    """
    try:
        found = importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # of a package around it
        found = False
    if not found:
        raise RuntimeError(message)
