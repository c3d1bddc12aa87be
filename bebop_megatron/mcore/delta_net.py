"""Megatron's gated delta net layer taken apart, so that it can run on a chunk of tokens with states given.

Megatron's own forward starts every sequence with empty states. These are its parts, in its order: projection,
convolution, inputs of the rule, the rule, gated norm and output projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from bebop_megatron.mcore.compat import DELTA_NET_SEAMS, require


def is_delta_net(module: Any) -> bool:
    """Whether `module` is Megatron's gated delta net mixer."""
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet

    return isinstance(module, GatedDeltaNet)


@dataclass(frozen=True)
class Projection:
    """What the input projection gives.

    Shape: mixed [b, t, c/tp], queries, keys and values before the convolution, c = 2 qk_dim + v_dim; gate
    [b, t, heads/tp, d_v]; beta and alpha [b, t, heads/tp].
    """

    mixed: Tensor
    gate: Tensor
    beta: Tensor
    alpha: Tensor


@dataclass(frozen=True)
class RuleInputs:
    """What the gated delta rule takes. A token with g = 0 and beta = 0 leaves the state as it is.

    Shape: query and key [b, t, heads/tp, d_k], value [b, t, heads/tp, d_v], g and beta [b, t, heads/tp].
    """

    query: Tensor
    key: Tensor
    value: Tensor
    g: Tensor
    beta: Tensor


class DeltaNetParts:
    """The parts of one layer, which stays as it is.

    Raises:
        RuntimeError: this Megatron's layer has other parts.
    """

    def __init__(self, layer: Any) -> None:
        require(DELTA_NET_SEAMS)
        self.layer = layer
        # inputs before a token that its convolution still sees
        self.reach: int = layer.conv_kernel_dim - 1

    def project(self, hidden: Tensor) -> Projection:
        """Shape: hidden [t, b, h] -> parts in [b, t, ...]."""
        layer = self.layer
        projected, _ = layer.in_proj(hidden)
        mixed, gate, beta, alpha = projected.transpose(0, 1).split(layer.feat_dim_split, -1)
        return Projection(mixed, gate.unflatten(-1, (-1, layer.value_head_dim)), beta, alpha)

    def convolve(self, mixed: Tensor) -> Tensor:
        """Causal convolution and activation; the first `reach` inputs are those before the chunk.

        Shape: mixed [b, reach + t, c/tp] -> [b, t, c/tp].
        """
        conv = self.layer.conv1d
        out = F.conv1d(mixed.transpose(1, 2), conv.weight, conv.bias, groups=conv.groups)
        return self.layer.act_fn(out).transpose(1, 2)

    def rule_inputs(self, convolved: Tensor, projection: Projection) -> RuleInputs:
        """Shape: convolved [b, t, c/tp] -> normalised queries and keys, values, decay and step size."""
        layer = self.layer
        query, key, value, _, beta, alpha = layer._prepare_input_for_gated_delta_rule(
            convolved, projection.gate, *convolved.shape[:2], projection.beta, projection.alpha
        )
        g, beta = layer._compute_g_and_beta(layer.A_log, layer.dt_bias, alpha, beta)
        return RuleInputs(query, key, value, g, beta)

    def rule(self, inputs: RuleInputs, state: Tensor, *, keep_state: bool) -> tuple[Tensor, Tensor | None]:
        """The layer's own kernel, from a given state.

        Shape: state [b, heads/tp, d_k, d_v] float32 -> [b, t, heads/tp, d_v] and the state after the chunk,
        or None.
        """
        kernel = self.layer.gated_delta_rule
        if self.layer.config.deterministic_mode:
            # the same computation, without padding a few tokens to 64
            from bebop_megatron.platform.gated_delta import chunk_gated_delta_rule as kernel
        return kernel(
            inputs.query,
            inputs.key,
            inputs.value,
            g=inputs.g,
            beta=inputs.beta,
            initial_state=state,
            output_final_state=keep_state,
            use_qk_l2norm_in_kernel=False,
            cu_seqlens=None,
        )

    def output(self, out: Tensor, gate: Tensor) -> tuple[Tensor, Tensor | None]:
        """Gated norm and output projection, as the layer returns them.

        Shape: out and gate [b, t, heads/tp, d_v] -> [t, b, h] and the bias.
        Collectives: one all-reduce over the tensor-parallel group.
        """
        b, t = out.shape[:2]
        normed = self.layer._apply_gated_norm(out, gate.contiguous()).reshape(b, t, -1)
        return self.layer.out_proj(normed.transpose(0, 1).contiguous())

    def empty_state(self, rows: int, like: Tensor) -> Tensor:
        """Shape: [rows, heads/tp, d_k, d_v] float32."""
        layer = self.layer
        shape = (rows, layer.num_v_heads_local_tp, layer.key_head_dim, layer.value_head_dim)
        return like.new_zeros(shape, dtype=torch.float32)
