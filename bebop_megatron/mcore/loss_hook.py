"""Stands where Megatron computes its MTP loss: hidden states and LM head in, our objective attached to the backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel import gather_from_sequence_parallel_region
from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler
from torch import Tensor

from bebop_megatron.alignment import align, packed_segments
from bebop_megatron.losses import fused_linear_objective
from bebop_megatron.mcore import compat
from bebop_megatron.mcore.attachment import Attachment, attached
from bebop_megatron.mcore.freeze_state import freeze_state, is_frozen
from bebop_megatron.reduction import StepCounts, local_counts


def _whole_sequence(hidden: Tensor, config: Any, tp_group: Any) -> Tensor:
    """Rows of the sequence-parallel ranks put together: [s/tp, b, h] -> [s * b, h]."""
    if config.sequence_parallel:
        # the objective returns the complete gradient on every rank, so the way back is a split, not a sum
        hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False, group=tp_group)
    return hidden.reshape(-1, hidden.shape[-1])


def _labels_and_mask(labels: Tensor | None, mask: Tensor | None, input_ids: Tensor) -> tuple[Tensor, Tensor]:
    """Labels and mask [b, s]; without labels (RL-style forward) both come from the ids, the last position has none."""
    if labels is not None:
        return labels, torch.ones_like(labels, dtype=torch.float32) if mask is None else mask
    # such a mask says which *tokens* may be targets, as the ids do: both move together
    of_tokens = torch.ones_like(input_ids, dtype=torch.float32) if mask is None else mask
    last = torch.zeros_like(of_tokens[:, :1])
    return torch.roll(input_ids, -1, dims=1), torch.cat([of_tokens[:, 1:], last], dim=1)


def _segments(packed_seq_params: Any, length: int) -> Tensor | None:
    if packed_seq_params is None or packed_seq_params.cu_seqlens_q is None:
        return None
    padded = packed_seq_params.cu_seqlens_q_padded
    return packed_segments(packed_seq_params.cu_seqlens_q if padded is None else padded, length)


def _counts(attachment: Attachment, valid: Tensor, mask: Tensor) -> tuple[StepCounts, int]:
    """The counts to normalise by, and over how many data x context parallel ranks they run."""
    if attachment.counts is not None:
        return attachment.counts, parallel_state.get_data_parallel_world_size(with_context_parallel=True)
    # a training loop of the caller's own: Megatron's normalisation, by the micro-batch's own count
    return local_counts(valid, mask, attachment.objective.resolved_horizon), 1


def make_process_mtp_loss(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Wrap Megatron's `process_mtp_loss`; models without our objective still call the original.

    Collectives: those of `fused_linear_objective` over the tensor-parallel group, and under sequence parallelism one
    all-gather of hidden states for the backbone and one for each depth.
    """

    def process_mtp_loss(
        hidden_states: Tensor,
        labels: Tensor | None,
        loss_mask: Tensor | None,
        output_layer: Any,
        output_weight: Tensor | None,
        runtime_gather_output: bool | None,
        is_training: bool,
        compute_language_model_loss: Callable[..., Tensor],
        config: Any,
        cp_group: Any = None,
        tp_group: Any = None,
        packed_seq_params: Any = None,
        scale_logits_fn: Callable[[Tensor], Tensor] | None = None,
        input_ids: Tensor | None = None,
    ) -> Tensor:
        attachment = attached(config)
        if attachment is None:
            return original(
                hidden_states=hidden_states,
                labels=labels,
                loss_mask=loss_mask,
                output_layer=output_layer,
                output_weight=output_weight,
                runtime_gather_output=runtime_gather_output,
                is_training=is_training,
                compute_language_model_loss=compute_language_model_loss,
                config=config,
                cp_group=cp_group,
                tp_group=tp_group,
                packed_seq_params=packed_seq_params,
                scale_logits_fn=scale_logits_fn,
                input_ids=input_ids,
            )
        if is_frozen(config, "mtp"):
            # no MTP layer has run, the hidden states are the backbone's alone
            return hidden_states
        depths = config.mtp_num_layers
        backbone, *drafts = torch.chunk(hidden_states, 1 + depths, dim=0)
        if not is_training or (labels is None and input_ids is None):
            return backbone
        if cp_group is not None and cp_group.size() > 1:
            raise NotImplementedError(
                f"--mtp-loss {attachment.objective.loss} does not support context parallelism yet "
                f"(--context-parallel-size {cp_group.size()})"
            )
        objective = attachment.objective
        assert objective.loss is not None
        compat.finish_param_gather(output_layer)
        known = labels if input_ids is None else input_ids
        assert known is not None
        ids, mask = _labels_and_mask(labels, loss_mask, known)
        table = align(mask, depths, _segments(packed_seq_params, ids.shape[1]))
        weight = output_layer.weight if output_weight is None else output_weight
        # MuP scales logits by a constant
        logit_scale = 1.0 if scale_logits_fn is None else float(scale_logits_fn(torch.ones(())))
        target = _whole_sequence(backbone.detach(), config, tp_group)
        draft = torch.stack([_whole_sequence(hidden, config, tp_group) for hidden in drafts])
        # while the backbone is frozen, its own loss is only looked at: it shares the target's projection
        state = freeze_state(config)
        alone = state if state is not None and "backbone" in state.frozen else None
        row_labels = None
        if alone is not None and labels is not None:
            row_labels = torch.where(mask > 0, labels, -1).t().reshape(-1)
        joint = objective.joint and alone is None
        counts, replicas = _counts(attachment, table.valid, mask)
        out = fused_linear_objective(
            draft,
            target,
            weight if joint else weight.detach(),
            target_rows=table.target_rows,
            kind=objective.loss,
            valid=table.valid,
            labels=ids.t().reshape(-1)[table.target_rows],
            group=tp_group if tp_group is not None and tp_group.size() > 1 else None,
            vocab_size=attachment.vocab_size,
            draft_temperature=objective.temperature,
            target_temperature=objective.temperature,
            logit_scale=logit_scale,
            horizon=objective.resolved_horizon,
            reduction="sum",
            row_scale=counts.mean_scale(),
            weight_requires_grad=joint and weight.requires_grad,
            row_labels=row_labels,
        )
        attachment.meter.update(out.stats, table.valid)
        attachment.add_loss(out.loss, 1 / (counts.num_microbatches * replicas))
        divisor = counts.megatron_divisor(config.calculate_per_token_loss, replicas)
        loss = config.mtp_loss_scaling_factor * divisor * out.loss
        if alone is not None:
            # tied to the model's output instead, so that nothing is propagated back through the LM head
            alone.pending = loss
            alone.lm_loss = None if out.row_nll is None else out.row_nll.view(-1, mask.shape[0]).t().contiguous()
            return backbone
        return MTPLossAutoScaler.apply(backbone, loss)

    process_mtp_loss.__wrapped__ = original  # pyright: ignore[reportFunctionMemberAccess]
    return process_mtp_loss
