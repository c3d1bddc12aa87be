"""Lets a stage save its MTP layers beside the LM head of a model that ties it to the embedding.

Such a stage multiplies by its copy of the embedding, and Megatron still gives it an LM head of its own, which nobody
uses, and which its checkpoint code takes for a mistake: a run under pipeline parallelism fails at its first save.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any


def with_idle_head(tie_state_dict: Callable[..., None]) -> Callable[..., None]:
    """Wrap the language model's `tie_embeddings_and_output_weights_state_dict`.

    The idle LM head is named in the checkpoint as one more copy of the embedding: it is not written, and loads the
    embedding's values, so that a strict load finds it.
    """

    @functools.wraps(tie_state_dict)
    def wrapper(self: Any, state_dict: dict[str, Any], head: str, embedding: str, *args: Any, **kwargs: Any) -> None:
        beside_mtp = self.post_process and not self.pre_process and getattr(self, "mtp_process", False)
        idle = state_dict.pop(head, None) if beside_mtp else None
        tie_state_dict(self, state_dict, head, embedding, *args, **kwargs)
        if idle is not None:
            state_dict[head] = dataclasses.replace(state_dict[embedding], data=idle.data)

    return wrapper
