"""NeMo 2.7.3 imports modules that Megatron-core has removed since. Placeholders let it be imported with Megatron 0.19.

They stand for Megatron's inference engines, which training does not use. A name of theirs that is used is an error.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

from megatron.core import parallel_state

from bebop_megatron.optional import has

# module that is gone -> the names that NeMo imports from it
_REMOVED: dict[str, tuple[str, ...]] = {
    "megatron.core.inference.model_inference_wrappers.inference_wrapper_config": ("InferenceWrapperConfig",),
}


# function that NeMo calls -> its name today
_RENAMED = {"get_data_modulo_expert_parallel_group": "get_expert_data_parallel_group"}


def _refuse(self: Any, *_: Any, **__: Any) -> None:
    raise RuntimeError(f"this Megatron-core has no {type(self).__module__} any more, which NeMo 2.7.3 uses here")


def import_llm() -> Any:
    """`nemo.collections.llm`, imported with what it misses in this Megatron-core."""
    for module, names in _REMOVED.items():
        if module in sys.modules or has(module):
            continue
        made = ModuleType(module)
        made.__spec__ = importlib.machinery.ModuleSpec(module, None)
        made.__dict__.update({name: type(name, (), {"__init__": _refuse, "__module__": module}) for name in names})
        sys.modules[module] = made
    for old, new in _RENAMED.items():
        if not hasattr(parallel_state, old):
            setattr(parallel_state, old, getattr(parallel_state, new))
    return importlib.import_module("nemo.collections.llm")
