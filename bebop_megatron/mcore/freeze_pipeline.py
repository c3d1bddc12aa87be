"""Pipeline stages below the MTP layers neither wait for gradients nor are sent any while the backbone is frozen."""

from __future__ import annotations

from typing import Any

from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.transformer.multi_token_prediction import get_mtp_ranks

from bebop_megatron.mcore.freeze_state import is_frozen


class FreezeCommunicator(P2PCommunicator):
    """Megatron's communicator of the schedule without interleaving, less the transfers nobody needs.

    The gradient between two stages is needed only if a stage at or below the first of the two holds MTP layers.
    """

    def _needed(self, stage: int) -> bool:
        """Whether `stage` needs the gradient of its output."""
        if not is_frozen(self.config, "backbone"):
            return True
        holders = get_mtp_ranks(list(range(self.total_stages)), self.config)  # pyright: ignore[reportArgumentType]
        return min(holders, default=self.total_stages) <= stage

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Gradient of this stage's output; None where it is not needed."""
        return super().recv_backward(tensor_shapes, is_last_stage) if self._needed(self.current_stage) else None

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send the gradient of this stage's input, if the stage before needs it."""
        if self._needed(self.current_stage - 1):
            super().send_backward(input_tensor_grads, is_first_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send this stage's output, receive a gradient if it is needed."""
        if self._needed(self.current_stage):
            return super().send_forward_recv_backward(output_tensors, tensor_shapes, is_last_stage)
        self.send_forward(output_tensors, is_last_stage)
        return None

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive the next input, send a gradient if the stage before needs it."""
        if self._needed(self.current_stage - 1):
            return super().send_backward_recv_forward(input_tensor_grads, tensor_shapes, is_first_stage)
        return self.recv_forward(tensor_shapes, is_first_stage)
