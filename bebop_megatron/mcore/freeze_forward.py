"""A frozen part costs no more than its forward pass, a frozen MTP head not even that.

While the backbone is frozen, its modules and the language-model loss run without autograd: no activation is kept and
no backward pass reaches them. The MTP loss is then tied to the model's output, behind the LM head, not before it, and
brings the language-model loss with it, from rows that it projects anyway.
While the MTP head is frozen, the model runs as if this rank held none.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

from bebop_megatron.mcore.attachment import attached
from bebop_megatron.mcore.freeze_state import FreezeState
from bebop_megatron.schedule.freezing import part_of


def _detached(value: Any) -> Any:
    # Megatron's viewless tensors ask for a gradient, also where none is recorded
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, tuple):
        return tuple(_detached(item) for item in value)
    return value


def _without_grad(function: Callable[..., Any], state: FreezeState) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if "backbone" not in state.frozen or not torch.is_grad_enabled():
            return function(*args, **kwargs)
        with torch.no_grad():
            return _detached(function(*args, **kwargs))

    return run


def _unless_frozen(handler: Callable[[], Any], state: FreezeState) -> Callable[[], Any]:
    return lambda: contextlib.nullcontext() if "backbone" in state.frozen else handler()


def _without_logits(project: Callable[..., Any], state: FreezeState) -> Callable[..., Any]:
    @functools.wraps(project)
    def run(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if state.lm_loss is not None:
            return hidden_states.new_zeros(1), None
        return project(hidden_states, *args, **kwargs)

    return run


def _known_loss(compute: Callable[..., Any], state: FreezeState) -> Callable[..., Any]:
    @functools.wraps(compute)
    def run(labels: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        known, state.lm_loss = state.lm_loss, None
        return compute(labels, logits) if known is None else known

    return run


def _guard(model: Any, state: FreezeState) -> None:
    for name, child in model.named_children():
        # a stage behind the MTP layers has an empty decoder, through which their outputs pass
        empty = name == "decoder" and not len(child.layers)
        if part_of(name) == "backbone" and not empty:
            child.forward = _without_grad(child.forward, state)
            for layer in child.modules():
                # Megatron turns autograd back on around each residual sum
                handler = getattr(layer, "bias_dropout_add_exec_handler", None)
                if handler is not None:
                    layer.bias_dropout_add_exec_handler = _unless_frozen(handler, state)
    model.compute_language_model_loss = _known_loss(_without_grad(model.compute_language_model_loss, state), state)
    if hasattr(model, "output_layer"):
        model.output_layer.forward = _without_logits(model.output_layer.forward, state)
    has_mtp = model.mtp_process

    def before(module: Any, _: Any) -> None:
        # a validation pass measures the head also while it is frozen
        attachment = None if module.training else attached(module.config)
        measured = attachment is not None and attachment.validation is not None
        module.mtp_process = has_mtp and (measured or "mtp" not in state.frozen)

    def after(module: Any, _: Any, output: Any) -> Any:
        module.mtp_process = has_mtp
        pending, state.pending = state.pending, None
        return None if pending is None else MTPLossAutoScaler.apply(output, pending)

    model.register_forward_pre_hook(before)
    model.register_forward_hook(after, always_call=True)


def guard_models(chunks: Iterable[Any], state: FreezeState) -> None:
    """Make unwrapped model chunks (GPTModel or HybridModel) spend nothing on what is frozen."""
    for chunk in chunks:
        _guard(chunk, state)


def with_gradient_for_every_input(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap Megatron's backward step of one micro-batch on one pipeline stage.

    A stage that keeps no graph has no gradient for its input, but with interleaving the stage before it still waits for
    one: it gets zeros, which its own frozen layers ignore.
    """

    def filled(tensor: Any, grad: Any) -> Any:
        return torch.zeros_like(tensor) if grad is None and tensor is not None else grad

    @functools.wraps(backward_step)
    def wrapper(input_tensor: Any, output_tensor: Any, output_tensor_grad: Any, config: Any) -> Any:
        grad = backward_step(input_tensor, output_tensor, output_tensor_grad, config)
        if isinstance(input_tensor, list):
            return [filled(t, g) for t, g in zip(input_tensor, grad, strict=True)]
        return filled(input_tensor, grad)

    return wrapper
