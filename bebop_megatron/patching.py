"""Reversible replacement of attributes, so that a shim can be taken off again exactly."""

from __future__ import annotations

from typing import Any

_MISSING = object()


class Patcher:
    """Remembers what it replaced, newest last."""

    def __init__(self) -> None:
        self._undo: list[tuple[Any, str, Any]] = []

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Replace `owner.name` by `value`; a name that did not exist is removed again by `restore`."""
        # a class's own __dict__ entry, not the bound attribute: staticmethods must come back as they were
        before = vars(owner).get(name, _MISSING) if isinstance(owner, type) else getattr(owner, name, _MISSING)
        self._undo.append((owner, name, before))
        setattr(owner, name, value)

    def restore(self) -> None:
        """Undo every replacement, in reverse order."""
        while self._undo:
            owner, name, before = self._undo.pop()
            if before is _MISSING:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

    @property
    def active(self) -> bool:
        """Whether anything is replaced at the moment."""
        return bool(self._undo)
