"""Stands where Megatron computes its MTP loss: hidden states and LM head in, our objective attached to the backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from bebop_megatron.losses import fused_linear_objective
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import Attachment, attached, layout_of
from bebop_megatron.mcore.freeze_state import FreezeState, freeze_state
from bebop_megatron.mcore.targets import Targets, targets_of
from bebop_megatron.reduction import StepCounts, local_counts


def _whole_sequence(hidden: Tensor, config: Any, tp_group: Any) -> Tensor:
    """Rows of the sequence-parallel ranks put together: [s/cp/tp, b, h] -> [s/cp, b, h]."""
    return gather_from_sequence_parallel_region(hidden, group=tp_group) if config.sequence_parallel else hidden


def _counts(attachment: Attachment, targets: Targets, cp_group: Any) -> tuple[StepCounts, int]:
    """The counts to normalise by, and over how many data x context parallel ranks they run.

    Collectives: none, or in a training loop of the caller's own one all-reduce over the context-parallel group.
    """
    if attachment.counts is not None:
        return attachment.counts, parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    # a training loop of the caller's own: Megatron's normalisation, by the micro-batch's own count
    counts = local_counts(
        targets.alignment.valid, targets.num_tokens, attachment.objective.resolved_horizon, group=cp_group
    )
    return counts, 1 if cp_group is None else cp_group.size()


def _row_labels(labels: Tensor, mask: Tensor | None) -> Tensor:
    """Labels of this rank's rows, -1 where the language-model loss does not count: [b, s/cp] -> [s/cp * b]."""
    counts = labels >= 0 if mask is None else (labels >= 0) & (mask > 0)
    return torch.where(counts, labels, -1).t().flatten()


def _frozen(config: Any, part: str) -> FreezeState | None:
    """The freeze state of this config, if the part is frozen at the moment."""
    state = freeze_state(config)
    return state if state is not None and part in state.frozen else None


def _tied_objective(
    attachment: Attachment,
    *,
    hidden_states: Tensor,
    labels: Tensor | None,
    loss_mask: Tensor | None,
    output_layer: Any,
    output_weight: Tensor | None,
    is_training: bool,
    config: Any,
    cp_group: Any = None,
    tp_group: Any = None,
    packed_seq_params: Any = None,
    scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
    input_ids: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """The backbone's hidden states, with our objective tied to their backward pass.

    In evaluation mode the objective is measured while a validation pass runs (`measuring`), and skipped otherwise.

    Shape: hidden_states [(1 + k) * s/cp/tp, b, h], backbone first, /tp under sequence parallelism only; labels,
    loss_mask, input_ids [b, s/cp] -> [s/cp/tp, b, h].
    Collectives: those of `fused_linear_objective` over the tensor-parallel group, and under sequence parallelism one
    all-gather of the backbone's hidden states. Under context parallelism, two all-gathers of
    the halo over its group, one of labels and masks and one of backbone hidden states, whatever the number of depths.
    """
    measured = None if is_training else attachment.validation
    if _frozen(config, "mtp") is not None and measured is None:
        # no MTP layer has run, the hidden states are the backbone's alone
        return hidden_states
    depths = config.mtp_num_layers
    backbone, *drafts = torch.chunk(hidden_states, 1 + depths, dim=0)
    if labels is None and (input_ids is None or measured is not None):
        return backbone
    if not is_training and measured is None:
        return backbone
    objective = attachment.objective
    assert objective.loss is not None
    targets = targets_of(labels, loss_mask, input_ids, depths, packed_seq_params, cp_group, layout_of(config))
    table = targets.alignment
    compat.finish_param_gather(output_layer)
    weight = output_layer.weight if output_weight is None else output_weight
    # MuP scales logits by a constant
    logit_scale = 1.0 if scale_logits_fn is None else float(scale_logits_fn(torch.ones(())))
    # while the backbone is frozen its own loss is only looked at, and shares the target's projection
    alone = _frozen(config, "backbone") if measured is None else None
    metrics = attachment.metrics.measures
    looked_at = metrics or measured is not None or alone is not None
    target = None
    if looked_at or objective.needs_target(attachment.current_iteration()):
        target = targets.reach.extend(_whole_sequence(backbone.detach(), config, tp_group), cp_group).flatten(0, 1)
    draft = torch.stack([hidden.flatten(0, 1) for hidden in drafts])
    fused = functools.partial(
        fused_linear_objective,
        draft,
        target,
        weight,
        target_rows=table.target_rows,
        valid=table.valid,
        labels=targets.labels,
        group=tp_group if tp_group is not None and tp_group.size() > 1 else None,
        vocab_size=attachment.vocab_size,
        logit_scale=logit_scale,
        sequence_parallel=config.sequence_parallel,
        reduction="sum",
    )
    if measured is not None:
        with torch.no_grad():
            out = fused(**objective.final_keywords())
        measured.update(objective, out.stats, table.valid)
        return backbone
    counts, replicas = _counts(attachment, targets, cp_group)
    joint = objective.joint and alone is None
    out = fused(
        row_scale=counts.mean_scale(),
        weight_requires_grad=joint and weight.requires_grad,
        row_labels=None if alone is None or labels is None else _row_labels(labels, loss_mask),
        **objective.keywords(attachment.current_iteration()),
    )
    if metrics:
        attachment.meter.update(out.stats, table.valid)
    attachment.add_loss(out.loss, 1 / (counts.num_microbatches * replicas))
    divisor = counts.megatron_divisor(config.calculate_per_token_loss, replicas)
    loss = config.mtp_loss_scaling_factor * divisor * out.loss
    if alone is not None:
        # tied to the model's output instead, so that nothing is propagated back through the LM head
        alone.pending = loss
        if labels is not None and out.row_nll is not None:
            alone.lm_loss = out.row_nll.view(-1, labels.shape[0]).t().contiguous()
        return backbone
    return MTPLossAutoScaler.apply(backbone, loss)


def make_process_mtp_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's `process_mtp_loss`; models without our objective still call the original."""

    @functools.wraps(original)
    def process_mtp_loss(**inputs: Any) -> Tensor:
        attachment = attached(inputs["config"])
        return original(**inputs) if attachment is None else _tied_objective(attachment, **inputs)

    return process_mtp_loss
