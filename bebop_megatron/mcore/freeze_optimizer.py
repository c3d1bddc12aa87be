"""An optimizer whose parts can be frozen: their groups are absent from a step, and each part counts its own steps.

Backbone and MTP head get parameter groups of their own. While a part is frozen its groups are taken out of the
optimizer for the length of `step()`: no gradient is copied, nothing is clipped, decayed or moved, no Adam step is
counted. Megatron stores one Adam step for all parameters, so each part's count travels in its groups, through which
it is also restored.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.optimizer import ParamKey, get_standard_config_overrides
from megatron.core.optimizer.optimizer_config import ParamWithNamePredicate

from bebop_megatron.config import FreezeConfig
from bebop_megatron.mcore import compat
from bebop_megatron.schedule.freezing import part_of

# keys of a parameter group; the first tells groups of different parts apart in Megatron's checkpoints
PART, STEPS = "bebop_part", "bebop_part_steps"
_PARTS = ("backbone", "mtp")
# lists of the optimizers that run parallel to their parameter groups
_PARALLEL_LISTS = (
    "float16_groups",
    "fp32_from_float16_groups",
    "fp32_from_fp32_groups",
    "model_float16_groups",
    "model_fp32_groups",
    "shard_float16_groups",
    "shard_fp32_groups",
    "shard_fp32_from_float16_groups",
)
_MOMENTS = ("exp_avg", "exp_avg_sq")


def part_overrides(config: Any, overrides: dict[Any, Any] | None, options: FreezeConfig) -> dict[Any, Any]:
    """Megatron's parameter-group overrides, with groups of its own for each part and the MTP head's learning rate.

    Raises:
        ValueError: --mtp-lr together with a width-scaled (MuP) learning rate.
    """
    result = dict(get_standard_config_overrides(config) if overrides is None else overrides)
    if options.lr is not None and any("max_lr" in o for k, o in result.items() if "mup" in str(k)):
        raise ValueError("--mtp-lr sets one rate for the MTP head: it cannot be combined with --use-mup")
    for part in _PARTS:
        override: dict[str, Any] = {PART: part}
        if part == "mtp" and options.lr is not None:
            # the main schedule's shape, scaled
            floor = config.min_lr / config.lr if config.min_lr and config.lr else 0.0
            override |= {"max_lr": options.lr, "min_lr": options.lr * floor}
        belongs = functools.partial(_belongs, part)
        result[ParamKey(with_name_predicate=ParamWithNamePredicate(name=f"bebop_{part}", fn=belongs))] = override
    return result


def _belongs(part: str, _: torch.nn.Parameter, name: str) -> bool:
    return part_of(name) == part


def _members(optimizer: Any) -> list[Any]:
    """The optimizers of a chain that hold parameter groups."""
    chain = getattr(optimizer, "chained_optimizers", [optimizer])
    return [member for member in chain if member.optimizer is not None]


def _groups(optimizer: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
    for member in _members(optimizer):
        for group in member.optimizer.param_groups:
            yield member.optimizer, group


def _set_adam_step(inner: Any, group: dict[str, Any], step: float) -> None:
    """Where torch's Adam keeps the count: by parameter; Apex and Transformer Engine: by group."""
    if "step" in group:
        group["step"] = int(step)
    for parameter in group["params"]:
        state = inner.state[parameter]
        if "step" in state:
            state["step"] = torch.full_like(state["step"], step)


class PartOptimizer:
    """Gives a Megatron Adam (or a chain of them) parts that can be frozen. Its own methods are replaced in place.

    Collectives: one all-reduce at construction, to see whether the MTP head has a gradient norm of its own.
    Memory: Adam's moments are allocated at construction rather than in the first step.
    Raises:
        ValueError: parameter groups that were made without `part_overrides`.
    """

    def __init__(self, optimizer: Any, options: FreezeConfig) -> None:
        self.optimizer = optimizer
        self.options = options
        self.frozen: frozenset[str] = frozenset()
        self.after_step: Callable[[], None] = lambda: None
        for _, group in _groups(optimizer):
            if PART not in group:
                raise ValueError("the optimizer was not built with parameter groups for backbone and MTP head")
            group[STEPS] = 0
        self._allocate()
        if hasattr(optimizer, "has_grad_norm_group"):
            # the answer is cached, and would be wrong if it were first asked for while the head is frozen
            optimizer.has_grad_norm_group("mtp")
        for name in ("step", "state_dict", "sharded_state_dict", "load_state_dict"):
            setattr(optimizer, name, getattr(self, "_" + name))

    def _original(self, name: str) -> Callable[..., Any]:
        return getattr(type(self.optimizer), name).__get__(self.optimizer)

    def _allocate(self) -> None:
        # a part that has never trained must be in the checkpoint all the same
        for member in _members(self.optimizer):
            member.init_state_fn(member.optimizer, member.config)
            for group in member.optimizer.param_groups:
                if isinstance(member.optimizer, torch.optim.Adam | torch.optim.AdamW):
                    self._allocate_torch_steps(member.optimizer, group)
                else:
                    group.setdefault("step", 0)

    @staticmethod
    def _allocate_torch_steps(inner: Any, group: dict[str, Any]) -> None:
        on_device = group.get("capturable") or group.get("fused")
        for parameter in group["params"]:
            device = parameter.device if on_device else "cpu"
            inner.state[parameter].setdefault("step", torch.zeros((), dtype=torch.float32, device=device))

    @contextmanager
    def _only_active(self) -> Iterator[None]:
        kept: list[tuple[Any, str, Any]] = []
        for member in _members(self.optimizer):
            active = [i for i, group in enumerate(member.optimizer.param_groups) if group[PART] not in self.frozen]
            owned = [(member.optimizer, "param_groups")]
            owned += [(member, name) for name in _PARALLEL_LISTS if hasattr(member, name)]
            for owner, name in owned:
                values = getattr(owner, name)
                kept.append((owner, name, values))
                setattr(owner, name, [values[i] for i in active])
        try:
            yield
        finally:
            for owner, name, values in kept:
                setattr(owner, name, values)

    def _step(self, *args: Any, **kwargs: Any) -> Any:
        with self._only_active():
            outcome = self._original("step")(*args, **kwargs)
        if outcome[0]:
            for _, group in _groups(self.optimizer):
                group[STEPS] += group[PART] not in self.frozen
        self.after_step()
        return outcome

    @contextmanager
    def _common_step(self) -> Iterator[None]:
        """Show Megatron one Adam step for all, as it insists; each part's own count lies in its groups."""
        groups = list(_groups(self.optimizer))
        common = max((group[STEPS] for _, group in groups), default=0)
        for inner, group in groups:
            _set_adam_step(inner, group, common)
        try:
            yield
        finally:
            self._restore_steps()

    def _restore_steps(self) -> None:
        for inner, group in _groups(self.optimizer):
            _set_adam_step(inner, group, group[STEPS])

    def _state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self._common_step():
            return self._original("state_dict")(*args, **kwargs)

    def _sharded_state_dict(self, model_state: Any, is_loading: bool = False, **kwargs: Any) -> Any:
        with self._common_step():
            result = self._original("sharded_state_dict")(model_state, is_loading, **kwargs)
        if is_loading:
            # Megatron merges groups one by one with those of the checkpoint, which may have other ones
            for piece in self._pieces(result):
                holder = piece.get("optimizer", piece)
                if isinstance(holder, dict):
                    holder.pop("param_groups", None)
        return result

    def _pieces(self, state_dict: Any) -> list[Any]:
        """The state of each optimizer in the chain."""
        chain = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        return [state_dict] if len(chain) == 1 else [state_dict[i] for i in range(len(chain))]

    # fp32 masters of the distributed optimizer are views of parameters, which may only be written without autograd
    @torch.no_grad()
    def _load_state_dict(self, state_dict: Any) -> None:
        chain = getattr(self.optimizer, "chained_optimizers", [self.optimizer])
        steps: dict[str, int] = {}
        for member, piece in zip(chain, self._pieces(state_dict), strict=True):
            if member.optimizer is not None:
                _fit_groups(member.optimizer, piece, steps)
                compat.let_steps_be_missing(member)
        self._original("load_state_dict")(state_dict)
        for _, group in _groups(self.optimizer):
            group[STEPS] = steps.get(group[PART], 0)
        self._restore_steps()

    @torch.no_grad()
    def reset_moments(self, part: str) -> None:
        """Start a part's Adam afresh: moments and step count zero."""
        for inner, group in _groups(self.optimizer):
            if group[PART] == part:
                for parameter in group["params"]:
                    for name in _MOMENTS:
                        inner.state[parameter][name].zero_()
                group[STEPS] = 0
        self._restore_steps()


def _fit_groups(inner: Any, saved: dict[str, Any], steps: dict[str, int]) -> None:
    """Rewrite a loaded state's groups to those of this run, and collect each part's steps.

    A checkpoint that was written without parts has one group where this run has two; a run may also have other
    learning rates than the checkpoint, which the scheduler sets anyway.
    """
    holder = saved.get("optimizer", saved)
    state = holder.get("state") or {}
    candidates = holder["param_groups"]
    packed = inner.state_dict()["param_groups"]
    fitted = []
    for mine, live in zip(packed, inner.param_groups, strict=True):
        best = max(candidates, key=functools.partial(_likeness, mine))
        common = state.get("common_step", best.get("step", 0))
        steps[live[PART]] = int(best.get(STEPS, common) if best.get(PART, live[PART]) == live[PART] else common)
        own = {key: mine[key] for key in mine if key not in ("step", STEPS)}
        fitted.append({**best, **own, STEPS: steps[live[PART]]})
    holder["param_groups"] = fitted


def _likeness(mine: dict[str, Any], other: dict[str, Any]) -> tuple[bool, ...]:
    """How well a saved group stands for one of ours; the first keys weigh most."""
    keys = ("is_expert_parallel", PART, "wd_mult", "is_decoupled_lr", "max_lr")
    return tuple(mine.get(key) == other.get(key) for key in keys)


def with_own_learning_rate(scheduler: Any, options: FreezeConfig) -> None:
    """Let the MTP head's groups follow `--mtp-lr-schedule` and their own warm-up, counted in steps of the head."""
    original = scheduler.get_lr

    def get_lr(group: dict[str, Any]) -> float:
        if group.get(PART) != "mtp":
            return original(group)
        constant = options.lr_schedule == "constant"
        value = group["max_lr"] if constant else original(group)
        warmup = options.lr_warmup_iters
        return value * min(1.0, (group[STEPS] + 1) / warmup) if warmup else value

    scheduler.get_lr = get_lr
    scheduler.step(0)
