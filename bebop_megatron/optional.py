"""Packages that only some of us need: whether they are there, asked without importing them."""

from __future__ import annotations

import importlib.util


def has(module: str) -> bool:
    """Whether a module can be imported."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        # of a package around it
        return False


def require(module: str, message: str) -> None:
    """See that a module can be imported.

    Raises:
        RuntimeError: it cannot, with `message`.
    """
    if not has(module):
        raise RuntimeError(message)
