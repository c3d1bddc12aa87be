"""Tasks by name; options of a task are written behind its name: `arithmetic:difficulty=2`."""

from __future__ import annotations

import importlib
from typing import Any

from bebop_megatron.rl.task import Task

# name -> module:class; imported when asked for
TASKS = {
    "arithmetic": "bebop_megatron.rl.tasks.arithmetic:Arithmetic",
    "gsm8k": "bebop_megatron.rl.tasks.gsm8k:GSM8K",
    "letters": "bebop_megatron.rl.tasks.letters:Letters",
}


def _value(text: str) -> Any:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def make_task(text: str) -> Task:
    """The task of `name` or `name:option=value,option=value`; the options are keywords of its class.

    Raises:
        ValueError: an unknown task, options it does not have.
    """
    name, _, options = text.partition(":")
    where = TASKS.get(name, name.replace("/", ":") if "/" in name else None)
    if where is None:
        raise ValueError(f"unknown task {name!r}: choose one of {', '.join(sorted(TASKS))}, or give module/Class")
    pairs = [part.partition("=") for part in options.split(",") if part]
    module, _, cls = where.partition(":")
    try:
        found = getattr(importlib.import_module(module), cls)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"task {name!r}: {error}") from error
    try:
        return found(**{key: _value(value) for key, _, value in pairs})
    except TypeError as error:
        raise ValueError(f"task {text!r}: {error}") from error
