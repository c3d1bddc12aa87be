"""What metrics must be: counted anchor by anchor in float64, from the hidden states that one process gives the loss."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy
import torch

from bebop_megatron.patching import Patcher


@contextmanager
def recorded_batches() -> Iterator[list[dict[str, Any]]]:
    """Every micro-batch that reaches the MTP loss meanwhile."""
    from megatron.core.models.gpt import gpt_model

    batches: list[dict[str, Any]] = []
    inner = gpt_model.process_mtp_loss
    patcher = Patcher()

    def process_mtp_loss(**inputs: Any) -> Any:
        weight = inputs["output_layer"].weight if inputs["output_weight"] is None else inputs["output_weight"]
        batches.append(
            {
                "hidden": inputs["hidden_states"].detach().double(),
                "weight": weight.detach().double(),
                "labels": inputs["labels"],
                "mask": inputs["loss_mask"],
            }
        )
        return inner(**inputs)

    patcher.set(gpt_model, "process_mtp_loss", process_mtp_loss)
    try:
        yield batches
    finally:
        patcher.restore()


def _anchors(batch: dict[str, Any], depths: int) -> Iterator[list[dict[str, float]]]:
    """For each anchor what its depths say, up to the end of the sequence; {} where a depth is not valid."""
    length = batch["labels"].shape[1]
    logits = (batch["hidden"] @ batch["weight"].t()).view(1 + depths, length, len(batch["labels"]), -1)
    log_prob = logits.log_softmax(-1)
    for sample, (labels, mask) in enumerate(zip(batch["labels"], batch["mask"], strict=True)):
        for t in range(length):
            chain: list[dict[str, float]] = []
            for depth in range(1, depths + 1):
                if t + depth >= length or not mask[t + depth]:
                    chain.append({})
                    continue
                q, p = log_prob[depth, t, sample], log_prob[0, t + depth, sample]
                best, label = int(q.argmax()), int(labels[t + depth])
                chain.append(
                    {
                        "rejection": float(torch.minimum(p.exp(), q.exp()).sum()),
                        "target-only": float(p.exp()[best]),
                        "greedy-target": float(best == int(p.argmax())),
                        "greedy-label": float(best == label),
                        "target entropy": float(-(p.exp() * p).sum()),
                        "draft entropy": float(-(q.exp() * q).sum()),
                        "kl": float((p.exp() * (p - q)).sum()),
                        "ce": float(-q[label]),
                    }
                )
            yield chain


def direct_metrics(batches: list[dict[str, Any]], depths: int) -> dict[str, float]:
    """Metrics of everything recorded, with `mtp tv loss` and `mtp ce loss`."""
    chains = [chain for batch in batches for chain in _anchors(batch, depths)]
    entries = [entry for chain in chains for entry in chain if entry]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    out: dict[str, float] = {}
    for rule in ("rejection", "target-only", "greedy-target", "greedy-label"):
        length = 1.0
        for depth in range(1, depths + 1):
            out[f"mtp accept/{rule}/{depth}"] = mean([chain[depth - 1][rule] for chain in chains if chain[depth - 1]])
            whole = [chain[:depth] for chain in chains if all(chain[:depth])]
            prefix = mean([float(numpy.prod([entry[rule] for entry in chain])) for chain in whole])
            out[f"mtp accept-prefix/{rule}/{depth}"] = prefix
            length += prefix
        out[f"mtp accept-length/{rule}"] = length
    for depth in range(1, depths + 1):
        out[f"mtp alpha/{depth}"] = out[f"mtp accept/rejection/{depth}"]
        out[f"mtp_{depth}_acceptance_rate"] = 100 * out[f"mtp accept/greedy-label/{depth}"]
    for name in ("target entropy", "draft entropy", "kl"):
        out[f"mtp {name}"] = mean([entry[name] for entry in entries])
    for rule in ("rejection", "target-only"):
        points = [[entry["target entropy"] for entry in entries], [entry[rule] for entry in entries]]
        out[f"mtp entropy slope/{rule}"] = float(numpy.polyfit(*points, 1)[0])
        out[f"mtp entropy r/{rule}"] = float(numpy.corrcoef(*points)[0, 1])
    complete = [chain for chain in chains if all(chain)]
    products = [numpy.cumprod([entry["rejection"] for entry in chain]) for chain in complete]
    out["mtp tv loss"] = 1 - mean([float(product.mean()) for product in products])
    of_depth = [[chain[depth]["ce"] for chain in chains if chain[depth]] for depth in range(depths)]
    out["mtp ce loss"] = mean([mean(values) for values in of_depth])
    return out
