"""Training data for Megatron: a tokenizer, `.bin/.idx` files with a loss mask, the dataset that reads them.

`python -m bebop_megatron.data --help` lists the commands.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bebop_megatron.data.dataset import MaskedGPTDataset

__all__ = ["MaskedGPTDataset"]


def __getattr__(name: str) -> Any:
    # on demand: Megatron takes seconds to import, and a tokenizer is trained without it
    if name == "MaskedGPTDataset":
        from bebop_megatron.data.dataset import MaskedGPTDataset

        return MaskedGPTDataset
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
