"""Makes Megatron's distributed optimizer resume where neither Apex nor Transformer Engine is installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from bebop_megatron.patching import Patcher


def patch_distributed_optimizer(patcher: Patcher) -> None:
    """Let a distributed optimizer resume with torch's Adam, whose state holds a step that Apex's and TE's does not.

    Megatron reads it before a resumed run has any state, looks for it among saved tensors, where it is not, and gives
    every parameter one and the same step tensor, which each of them then advances. From its default format it writes
    into fp32 parameters while autograd watches.
    """
    optimizer = importlib.import_module("megatron.core.optimizer.distrib_optimizer")
    if optimizer.HAVE_APEX_OR_TE:
        return
    original = optimizer.DistributedOptimizer.sharded_state_dict

    @functools.wraps(original)
    def sharded_state_dict(self: Any, model: Any = None, is_loading: bool = False, **kwargs: Any) -> Any:
        if is_loading and not self.optimizer.state:
            groups = self.optimizer.param_groups
            before = [(group["lr"], group["weight_decay"]) for group in groups]
            for group in groups:
                # the step that makes the state must move nothing
                group["lr"] = group["weight_decay"] = 0.0
            self._init_optimizer_states_with_dummy_values()
            for group, (rate, decay) in zip(groups, before, strict=True):
                group["lr"], group["weight_decay"] = rate, decay
        return original(self, model or {}, is_loading, **kwargs)

    place = optimizer.DistributedOptimizer._set_main_param_and_optimizer_states

    @functools.wraps(place)
    @torch.no_grad()
    def set_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # None is skipped: the step comes with the parameter groups
        place(self, model_param, {**tensors, "step": None})

    load = optimizer.DistributedOptimizer.load_state_dict

    @functools.wraps(load)
    def load_state_dict(self: Any, state_dict: Any) -> None:
        load(self, state_dict)
        for state in self.optimizer.state.values():
            state["step"] = state["step"].clone()

    patcher.set(optimizer.DistributedOptimizer, "sharded_state_dict", sharded_state_dict)
    patcher.set(optimizer.DistributedOptimizer, "load_state_dict", load_state_dict)
    patcher.set(optimizer.DistributedOptimizer, "_set_main_param_and_optimizer_states", set_states)
