"""Megatron's MTP layer with a choice of what later draft steps attend to, and with token shifts that respect layouts.

`MultiTokenPredictionBlock` calls the layer once per depth and hands whatever it returned as `input_ids` to the next
call: that is how state travels between depths. No module keeps any, so micro-batches in flight cannot mix, and with
full recompute every tensor of it is an input of the checkpointed function.
"""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.utils import make_viewless_tensor
from torch import Tensor

from bebop_megatron.mcore.anchors import Anchors, find_anchors
from bebop_megatron.mcore.attachment import layout_of
from bebop_megatron.mcore.mtp_attention import PER_DEPTH, mtp_attention, require_supported
from bebop_megatron.mcore.rolling import rolls
from bebop_megatron.mcore.shared_keys import Call, Carried, ShiftedRotary, stepping, with_shared_keys


@dataclasses.dataclass(frozen=True)
class DepthState:
    """What one depth hands to the next.

    Shape: tokens [k] of (ids [b, s], position_ids [b, s] or None, padding [b, s] or None), shifted for each depth;
    step [1, 1, d] float32, how far rotary angles advance from one position to the next, or None.
    """

    depth: int
    anchors: Anchors
    tokens: list[list[Tensor | None]]
    step: Tensor | None
    carried: tuple[Carried, ...] = ()


def _rotary_step(table: Tensor | None, anchors: Anchors, packed: bool) -> Tensor | None:
    """Rotary angles of position 1: they are linear in the position for every rotary type that Megatron has."""
    if table is None:
        return None
    if anchors.order is None or packed:
        # row = position in the document
        return table[min(1, len(table) - 1)]
    # a context-parallel rank holds the rows of its own positions
    return table[-1] / max(1, int(anchors.host[0][-1]))


class DraftStepLayer(MultiTokenPredictionLayer):
    """Stands where a `MultiTokenPredictionLayer` stands in a spec; same parameters and checkpoint names.

    `mode` is `per-depth`, `chain` or `first-depth`; None takes the one that the model config carries.

    Raises:
        ValueError: the mode does not work with this config or with the layer's kind of attention.
    """

    def __init__(
        self, config: Any, submodules: Any, *, mode: str | None = None, hybrid_submodules: Any = None, **kwargs: Any
    ) -> None:
        self_mode = mode or mtp_attention(config)
        if self_mode != PER_DEPTH:
            require_supported(config, self_mode)
            if hybrid_submodules is not None:
                kinds = {
                    name: with_shared_keys(getattr(hybrid_submodules, name))
                    for name in ("attention_layer", "mla_layer")
                    if hasattr(getattr(hybrid_submodules, name, None), "submodules")
                }
                hybrid_submodules = dataclasses.replace(hybrid_submodules, **kinds)
            elif submodules.mtp_model_layer is not None:
                submodules = dataclasses.replace(
                    submodules, mtp_model_layer=with_shared_keys(submodules.mtp_model_layer)
                )
        super().__init__(config, submodules, hybrid_submodules=hybrid_submodules, **kwargs)
        self.mode = self_mode
        self.attentions: list[Any] = []
        if self_mode != PER_DEPTH:
            self._prepare_attentions()

    def _prepare_attentions(self) -> None:
        for module in self.mtp_model_layer.modules():
            mixer = getattr(module, "mixer", None) or getattr(module, "self_attention", None)
            if mixer is not None and type(mixer).__name__ != "IdentityOp" and not hasattr(mixer, "core_attention"):
                raise ValueError(
                    f"--mtp-attention {self.mode} needs attention with keys and values in the MTP layer, and it has "
                    f"{type(mixer).__name__}: use --mtp-attention per-depth"
                )
        self.attentions = [m for m in self.mtp_model_layer.modules() if hasattr(m, "core_attention")]
        for attention in self.attentions:
            # a recomputed core attention would look for its call when there is none; ours saves no scores anyway
            attention.checkpoint_core_attention = False
            if hasattr(attention, "rotary_pos_emb"):
                attention.rotary_pos_emb = ShiftedRotary(attention.rotary_pos_emb)
        if self.mtp_layer_pattern is not None and self.config.recompute_granularity == "full":
            # this layer is recomputed as a whole: a second checkpoint inside would lose sight of the carried keys
            self.mtp_model_layer.config = copy.copy(self.config)
            self.mtp_model_layer.config.recompute_granularity = None

    def _begin(
        self, ids: Tensor, position_ids: Tensor | None, padding: Tensor | None, packed: Any, rotary: Tensor | None
    ) -> DepthState:
        """State before depth 1, from what the block was called with: tensors [..., s] of this rank's sequence.

        Collectives: under context parallelism one all-gather over its group, for all depths.
        """
        layout = layout_of(self.config)
        anchors = find_anchors(ids.shape[-1], packed, self.cp_group, layout, ids.device)
        if padding is not None and padding.shape[-1] != ids.shape[-1]:
            # the model has scattered it over the tensor-parallel ranks, but a shift needs the neighbours' entries
            rows = padding.t().to(torch.uint8).contiguous()
            gather = tensor_parallel.gather_from_sequence_parallel_region
            padding = gather(rows, tensor_parallel_output_grad=False, group=self.tp_group).t().bool()
        depths = self.config.mtp_num_layers
        tokens = rolls([ids, position_ids, padding], packed, self.cp_group, layout, depths)
        return DepthState(0, anchors, tokens, _rotary_step(rotary, anchors, packed is not None))

    def _inputs(self, state: DepthState, embedding: Callable[..., Tensor]) -> tuple[Tensor, Tensor | None]:
        """Embeddings [s/tp, b, h] and padding mask [b, s/tp] of this depth's tokens, x_{t + depth} for anchor t."""
        ids, position_ids, padding = state.tokens[state.depth - 1]
        embedded = embedding(input_ids=ids, position_ids=position_ids)
        if self.config.mtp_detach_heads:
            embedded = embedded.detach()
        if padding is not None and self.sequence_parallel:
            padding = padding.chunk(self.tp_group.size(), 1)[self.tp_group.rank()]
        return embedded, padding

    def _step(self, state: DepthState, hidden: Tensor, embedded: Tensor, tensors: dict[str, Any], packed: Any) -> Any:
        """Depth `state.depth` in mode chain or first-depth: -> (hidden states, the state it leaves).

        With full recompute only the inputs are saved, among them the carried keys and values, which other depths and
        this one share.
        """
        names, sizes = list(tensors), [len(carried) for carried in state.carried]
        last = state.depth == self.config.mtp_num_layers

        def run(hidden: Tensor, embedded: Tensor, *flat: Any) -> tuple[Tensor, ...]:
            arguments, carried = dict(zip(names, flat[: len(names)], strict=True)), list(flat[len(names) :])
            calls = []
            for index in range(len(self.attentions)):
                mine = tuple(carried.pop(0) for _ in range(sizes[index] if sizes else 0))
                calls.append(Call(state.depth, state.anchors, self.mode == "chain", mine))
            with stepping(self.attentions, calls):
                out = self._proj_and_transformer_layer(
                    hidden_states=hidden, decoder_input=embedded, packed_seq_params=packed, **arguments
                )
            return (out, *(x for call in calls for x in call.made if not last))

        flat = [*tensors.values(), *(x for carried in state.carried for x in carried)]
        recompute = self.training and self.config.recompute_granularity == "full"
        if recompute and self.config.recompute_method != "uniform":
            warnings.warn("--recompute-method block does not reach MTP layers: they are not recomputed", stacklevel=2)
            recompute = False
        if recompute:
            out, *made = tensor_parallel.checkpoint(
                run, self.config.distribute_saved_activations, hidden, embedded, *flat
            )
        else:
            out, *made = run(hidden, embedded, *flat)
        if made:
            share = len(made) // len(self.attentions)
            before = state.carried or ((),) * len(self.attentions)
            new = [tuple(made[i * share : (i + 1) * share]) for i in range(len(self.attentions))]
            state = dataclasses.replace(state, carried=tuple(a + b for a, b in zip(before, new, strict=True)))
        return out, state

    def forward(
        self,
        input_ids: Tensor | DepthState,
        position_ids: Tensor | None,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        padding_mask: Tensor | None = None,
        context: Tensor | None = None,
        context_mask: Tensor | None = None,
        rotary_pos_emb: Any = None,
        packed_seq_params: Any = None,
        embedding: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, DepthState, Tensor | None, Tensor | None]:
        """One depth: hidden states of the previous one in, its own out.

        Shape: input_ids and position_ids [b, s], hidden_states [s/tp, b, h] -> (hidden states [s/tp, b, h], the state
        for the next depth in the place of input_ids, position_ids and padding_mask as they were).
        Collectives: Megatron's own of one layer; at depth 1 under context parallelism all-gathers over its group, of
        the ids and, in modes chain and first-depth, of keys and values.
        """
        assert context is None, "multi-token prediction has no cross attention"
        if isinstance(input_ids, DepthState):
            state = input_ids
        else:
            state = self._begin(input_ids, position_ids, padding_mask, packed_seq_params, rotary_pos_emb)
        state = dataclasses.replace(state, depth=state.depth + 1)
        embedded, padding = self._inputs(state, embedding)
        hidden_states = make_viewless_tensor(inp=hidden_states, requires_grad=True, keep_graph=True)
        if not hidden_states.requires_grad:
            # detached heads: a recomputed function needs an input that asks for a gradient
            hidden_states.requires_grad_(True)
        tensors = {
            "attention_mask": attention_mask,
            "padding_mask": padding,
            "rotary_pos_emb": rotary_pos_emb,
        }
        if self.mode == PER_DEPTH:
            whole = self.training and self.config.recompute_granularity == "full"
            run = self._checkpointed_forward if whole else self._proj_and_transformer_layer
            out = run(
                hidden_states=hidden_states,
                decoder_input=embedded,
                packed_seq_params=packed_seq_params,
                **tensors,
                **kwargs,
            )
            return out, state, position_ids, padding_mask
        if state.step is not None:
            tensors["rotary_pos_emb"] = rotary_pos_emb + (state.depth - 1) * state.step
        out, state = self._step(state, hidden_states, embedded, tensors, packed_seq_params)
        return out, state, position_ids, padding_mask
