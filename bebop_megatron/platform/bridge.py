"""Megatron Bridge on a CPU: three packages that it imports and a CPU run never uses, and a CPU's settings.

`transformer_engine` and `nvidia_resiliency_ext` (its recent releases) have no build without CUDA; `megatron.energon`
loads multimodal data from object stores and brings their clients. All stand at the top of Bridge's own modules. While
Bridge is imported, placeholders satisfy these imports. They are taken away again afterwards: whoever asks later whether
the packages are there gets a true answer. Using anything of a placeholder is an error that says so.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

from bebop_megatron.platform.cpu import enter

# module -> names in it that Bridge imports or subclasses; with any other name an import fails, as it would without it
_PLACEHOLDERS: dict[str, tuple[str, ...]] = {
    "transformer_engine": (),
    "transformer_engine.pytorch": ("Linear", "LayerNormLinear", "ops"),
    "transformer_engine.pytorch.ops": ("Sequential",),
    "nvidia_resiliency_ext": (),
    "nvidia_resiliency_ext.inprocess": ("CallWrapper",),
}
# package of which Bridge imports so much that every name is answered
_WHOLE = "megatron.energon"


class _Absent(torch.nn.Module):
    """Stands for a class that is not there; may be subclassed and subscripted, not used."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError(
            f"{type(self).__module__} is not installed, and this CPU run came to its {type(self).__name__}"
        )

    def __class_getitem__(cls, _: Any) -> type[_Absent]:
        return cls


class _Placeholder(ModuleType):
    # a version that every check for a minimum refuses
    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        known = _PLACEHOLDERS.get(self.__name__)
        if name.startswith("__") or (known is not None and name not in known):
            raise AttributeError(f"{self.__name__} is a placeholder without {name}")
        below = f"{self.__name__}.{name}"
        if below in _PLACEHOLDERS:
            return importlib.import_module(below)
        made = type(name, (_Absent,), {"__module__": self.__name__})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds placeholders for the packages that are absent."""

    def __init__(self, absent: set[str]) -> None:
        self.absent = absent

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        package = _WHOLE if (fullname + ".").startswith(_WHOLE + ".") else fullname.partition(".")[0]
        if package not in self.absent or (package != _WHOLE and fullname not in _PLACEHOLDERS):
            return None
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Placeholder(spec.name)

    def exec_module(self, module: ModuleType) -> None: ...


@contextmanager
def _placeholders() -> Iterator[None]:
    packages = {_WHOLE, *(name.partition(".")[0] for name in _PLACEHOLDERS)}
    finder = _Finder({package for package in packages if importlib.util.find_spec(package) is None})
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, module in sys.modules.items() if isinstance(module, _Placeholder)]:
            del sys.modules[name]


def enter_bridge() -> None:
    """Enter the CPU platform and import Megatron Bridge on it. Calling it again does nothing.

    Raises:
        RuntimeError: a CUDA device is present.
        ImportError: Megatron Bridge, or a package that it needs, is not installed.
    """
    enter()
    # Megatron looks for Transformer Engine when it is imported, and must find none
    for module in ("megatron.core.extensions.transformer_engine", "megatron.core.models.gpt", "transformers"):
        importlib.import_module(module)
    before = logging.root.manager.disable
    # Bridge tells at length, once per module, which optional names it did not find
    logging.disable(logging.INFO)
    try:
        with _placeholders():
            importlib.import_module("megatron.bridge")
            importlib.import_module("megatron.bridge.training.pretrain")
    finally:
        logging.disable(before)


def use_cpu(container: Any) -> None:
    """Set what a ConfigContainer needs on a CPU: gloo, fp32, and none of the fused kernels."""
    off = ("gradient_accumulation", "masked_softmax", "bias_dropout", "bias_activation", "cross_entropy_loss")
    for name in off:
        setattr(container.model, f"{name}_fusion", False)
    settings = {
        "apply_rope_fusion": False,
        "persist_layer_norm": False,
        "moe_permute_fusion": False,
        "moe_grouped_gemm": False,
        "use_cpu_initialization": True,
        "params_dtype": torch.float32,
        "pipeline_dtype": torch.float32,
        "bf16": False,
    }
    for name, value in settings.items():
        setattr(container.model, name, value)
    container.optimizer.bf16 = False
    container.mixed_precision = None
    container.dist.distributed_backend = "gloo"
