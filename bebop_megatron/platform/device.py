"""The `torch.cuda` that Megatron asks for, answered by the CPU.

Megatron names the device "cuda" in hundreds of places. Factory functions and a few tensor methods are wrapped one by
one: a `TorchFunctionMode` would intercept every operation of every layer and slow the small models this runs.
"""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable
from typing import Any

import torch

from bebop_megatron.patching import Patcher

_FACTORIES = (
    "arange",
    "as_tensor",
    "empty",
    "empty_like",
    "empty_strided",
    "eye",
    "full",
    "full_like",
    "linspace",
    "logspace",
    "normal",
    "ones",
    "ones_like",
    "rand",
    "rand_like",
    "randint",
    "randint_like",
    "randn",
    "randn_like",
    "randperm",
    "scalar_tensor",
    "tensor",
    "tril_indices",
    "triu_indices",
    "zeros",
    "zeros_like",
)
_NEW_METHODS = ("new_empty", "new_full", "new_ones", "new_tensor", "new_zeros")
_MEMORY_COUNTERS = (
    "memory_allocated",
    "max_memory_allocated",
    "memory_reserved",
    "max_memory_reserved",
    "reset_peak_memory_stats",
    "empty_cache",
)


def _names_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    if isinstance(device, torch.device):
        return device.type == "cuda"
    # Megatron also passes device indices
    return isinstance(device, int) and not isinstance(device, bool)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return function(*args, **kwargs)

    return wrapper


class _Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._time = 0.0

    def record(self, *_: Any) -> None:
        self._time = time.perf_counter()

    def elapsed_time(self, other: _Event) -> float:
        return (other._time - self._time) * 1e3

    def synchronize(self) -> None: ...

    def wait(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True


class _Stream:
    device = torch.device("cpu")
    cuda_stream = 0

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Stream)

    def __hash__(self) -> int:
        return 0

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *_: Any) -> bool:
        return False

    def wait_stream(self, *_: Any) -> None: ...

    def wait_event(self, *_: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: _Event | None = None) -> _Event:
        event = event or _Event()
        event.record()
        return event


class _Properties:
    name = "cpu"
    major = 0
    minor = 0
    multi_processor_count = 1
    total_memory = 1 << 34


def _returns(value: Any) -> Callable[..., Any]:
    # a new function each time: dynamo refuses one function under two names
    return lambda *_, **__: value


def _patch_queries(patcher: Patcher) -> None:
    cuda = torch.cuda
    for name, value in {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: "cpu",
        "set_device": _returns(None),
        "synchronize": _returns(None),
        "get_device_capability": lambda *_: (0, 0),
        "get_device_properties": lambda *_: _Properties,
        "get_device_name": lambda *_: "cpu",
        "memory_stats": lambda *_, **__: collections.defaultdict(int),
        "get_rng_state": lambda *_, **__: torch.random.get_rng_state(),
        "set_rng_state": lambda state, *_, **__: torch.random.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        # called by torch.manual_seed itself, which has seeded the one generator already
        "manual_seed_all": _returns(None),
        "is_current_stream_capturing": lambda: False,
        "Stream": _Stream,
        "Event": _Event,
        "current_stream": lambda *_, **__: _Stream(),
        "default_stream": lambda *_, **__: _Stream(),
        "stream": lambda stream=None: stream or _Stream(),
        **{name: _returns(0) for name in _MEMORY_COUNTERS},
    }.items():
        patcher.set(cuda, name, value)
    # Adam's health check and torch's own loaders ask the accelerator, which would now be believed to exist
    patcher.set(torch.accelerator, "is_available", lambda *_, **__: False)
    patcher.set(torch.optim.Optimizer, "_accelerator_graph_capture_health_check", lambda self: None)


def _patch_tensors(patcher: Patcher) -> None:
    for name in _FACTORIES:
        patcher.set(torch, name, _on_cpu(getattr(torch, name)))
    for name in _NEW_METHODS:
        patcher.set(torch.Tensor, name, _on_cpu(getattr(torch.Tensor, name)))

    move, module_move, kind = torch.Tensor.to, torch.nn.Module.to, torch.Tensor.type

    def to(self: Any, *args: Any, **kwargs: Any) -> Any:
        args = tuple("cpu" if isinstance(a, str | torch.device) and _names_cuda(a) else a for a in args)
        if _names_cuda(kwargs.get("device")):
            kwargs["device"] = "cpu"
        return (module_move if isinstance(self, torch.nn.Module) else move)(self, *args, **kwargs)

    def type_(self: torch.Tensor, dtype: Any = None, *args: Any, **kwargs: Any) -> Any:
        # Megatron's optimizer asserts on the string "torch.cuda.FloatTensor"
        if dtype is None:
            return kind(self).replace("torch.", "torch.cuda.", 1)
        if isinstance(dtype, str):
            dtype = dtype.replace("torch.cuda.", "torch.")
        return kind(self, dtype, *args, **kwargs)

    patcher.set(torch.Tensor, "to", to)
    patcher.set(torch.nn.Module, "to", to)
    patcher.set(torch.Tensor, "type", type_)
    patcher.set(torch.Tensor, "cuda", lambda self, *_, **__: self)
    patcher.set(torch.nn.Module, "cuda", lambda self, *_, **__: self)
    patcher.set(torch.Tensor, "pin_memory", lambda self, *_, **__: self)
    patcher.set(torch.Tensor, "record_stream", lambda self, *_: None)

    loader_init = torch.utils.data.DataLoader.__init__

    # Lightning reads the parameters' names
    @functools.wraps(loader_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        kwargs["pin_memory"] = False
        loader_init(self, *args, **kwargs)

    patcher.set(torch.utils.data.DataLoader, "__init__", init)


def patch_torch(patcher: Patcher) -> None:
    """Answer for `torch.cuda` with the CPU until `patcher.restore()`."""
    _patch_queries(patcher)
    _patch_tensors(patcher)
