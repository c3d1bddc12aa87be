"""Counts what a training step runs, keeps, reduces and sends, by part; Megatron gets its names back afterwards."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def _outputs_with_graph(output: Any) -> bool:
    outputs = output if isinstance(output, tuple) else (output,)
    return any(isinstance(o, torch.Tensor) and o.grad_fn is not None for o in outputs)


def _watch_modules(model: torch.nn.Module, counts: Counter[str]) -> None:
    """Forward passes and outputs that keep a graph of modules without children, and gradients that arrive."""
    from bebop_megatron.schedule.freezing import part_of

    def forward(part: str) -> Any:
        def hook(_: Any, __: Any, output: Any) -> None:
            counts.update([f"forward {part}"])
            counts[f"graph {part}"] += _outputs_with_graph(output)

        return hook

    def backward(part: str) -> Any:
        return lambda *_: counts.update([f"backward {part}"])

    for name, module in model.named_modules():
        if name and not list(module.children()):
            module.register_forward_hook(forward(part_of(name)))
    for name, parameter in model.named_parameters():
        parameter.register_hook(backward(part_of(name)))


@contextmanager
def counting(training: Any, counts: Counter[str]) -> Iterator[None]:
    """Fill `counts` while a training goes on: `forward|graph|backward <part>`, gradient values `reduced` over data
    parallel ranks, `gradients sent` and `awaited` between pipeline stages, and `weight on its way`: how often the
    objective read an LM head whose gather had not been waited for.
    """
    from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

    from bebop_megatron.mcore import loss_hook

    for chunk in training.chunks:
        _watch_modules(chunk, counts)
    all_reduce, objective = torch.distributed.all_reduce, loss_hook.fused_linear_objective
    communicate = P2PCommunicator._communicate
    groups = [group for wrapped in training.wrapped for group in wrapped.bucket_groups]
    buffers = {id(bucket.grad_data) for group in groups for bucket in group.buckets}

    def reducing(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        counts["reduced"] += tensor.numel() if id(tensor) in buffers else 0
        return all_reduce(tensor, *args, **kwargs)

    def comparing(*args: Any, **kwargs: Any) -> Any:
        # the loss is on the last chunk
        tied, model = training.case.tied, training.chunks[-1]
        weight = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
        group = training.wrapped[-1].param_to_bucket_group[weight]
        counts["weight on its way"] += group.param_gather_handle is not None
        return objective(*args, **kwargs)

    def sending(self: Any, *args: Any, **kwargs: Any) -> Any:
        counts["gradients sent"] += kwargs["tensor_send_prev"] is not None
        counts["gradients awaited"] += bool(kwargs["recv_next"])
        return communicate(self, *args, **kwargs)

    torch.distributed.all_reduce, loss_hook.fused_linear_objective = reducing, comparing
    P2PCommunicator._communicate = sending
    try:
        yield
    finally:
        torch.distributed.all_reduce, loss_hook.fused_linear_objective = all_reduce, objective
        P2PCommunicator._communicate = communicate
