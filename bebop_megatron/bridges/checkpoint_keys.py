"""Where a GPTModel parameter lies in a `torch_dist` checkpoint: of GPTModel or HybridModel, layers stacked or named."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from bebop_megatron.bridges.families import Sizes
from bebop_megatron.bridges.names import UNFUSED_NORMS
from bebop_megatron.bridges.plan import Place

_DECODER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
_MTP_INNER = re.compile(r"mtp\.layers\.(\d+)\.transformer_layer\.(.*)")
_EMBEDDING = "embedding.word_embeddings.weight"
_MODEL = ("decoder.", "embedding.", "output_layer.", "mtp.")


def _is_mlp(name: str) -> bool:
    return name.startswith(("mlp.", "pre_mlp_layernorm."))


@dataclass(frozen=True)
class CheckpointKeys:
    """`stacked`: all decoder layers in one tensor (Megatron's form for equal layers); else one tensor for each layer.

    `pattern` is HybridModel's, which numbers attention and MLP as layers of their own; empty for GPTModel.
    """

    stacked: bool
    layers: int
    pattern: str = ""
    prefix: str = ""

    @staticmethod
    def to_write(sizes: Sizes, pattern: str) -> CheckpointKeys:
        """As Megatron itself would write this model."""
        mixed = any(sizes.linear) or len(set(sizes.experts_in)) > 1
        return CheckpointKeys(not pattern and not mixed, sizes.layers, pattern)

    @staticmethod
    def of(keys: Iterable[str], layers: int, pattern: str) -> CheckpointKeys:
        """The form of an existing checkpoint.

        Raises:
            ValueError: it holds no embedding.
        """
        known = [key for key in keys if not key.startswith("optimizer.")]
        found = [key for key in known if key.endswith(_EMBEDDING)]
        if not found:
            raise ValueError(f"the checkpoint has no tensor named {_EMBEDDING}: it is no GPTModel or HybridModel")
        prefix = min(found, key=len).removesuffix(_EMBEDDING)
        named = any(re.match(re.escape(prefix) + r"decoder\.layers\.\d+\.", key) for key in known)
        return CheckpointKeys(not named, layers, pattern, prefix)

    def _positions(self, symbols: str) -> list[int]:
        main = self.pattern.split("/")[0].replace("|", "")
        return [i for i, symbol in enumerate(main) if symbol in symbols]

    def locate(self, place: Place) -> Place:
        """The key, with the layer in front of the index where layers are stacked."""
        name, index, counts = place.name, place.index, place.counts
        if match := _DECODER.fullmatch(name):
            layer, rest = int(match[1]), match[2]
            if self.stacked:
                return Place(f"{self.prefix}decoder.layers.{rest}", (layer, *index), (self.layers, *counts))
            if self.pattern:
                layer = self._positions("-E" if _is_mlp(rest) else "G*")[layer]
            name = f"decoder.layers.{layer}.{rest}"
        elif self.pattern and (match := _MTP_INNER.fullmatch(name)):
            inner = f"layers.{int(_is_mlp(match[2]))}.{match[2]}"
            name = f"mtp.layers.{match[1]}.mtp_model_layer.{inner}"
        elif self.pattern:
            name = name.replace("decoder.final_layernorm.", "decoder.final_norm.")
        return Place(self.prefix + name, index, counts)

    def alternatives(self, place: Place) -> list[Place]:
        """`locate`, and where a model with unfused norms keeps the same tensor."""
        out = [self.locate(place)]
        for fused, plain in UNFUSED_NORMS.items():
            if place.name.endswith(fused):
                out.append(self.locate(Place(place.name.removesuffix(fused) + plain, place.index, place.counts)))
        return out

    def model_keys(self, keys: Iterable[str]) -> set[str]:
        """Those of a checkpoint's tensors that are the model's, not the optimizer's."""
        return {key for key in keys if key.removeprefix(self.prefix).startswith(_MODEL)}

    def mtp_layers(self, keys: Iterable[str]) -> int:
        """Physical MTP layers, whatever the number of draft steps."""
        pattern = re.compile(re.escape(self.prefix) + r"mtp\.layers\.(\d+)\.")
        return 1 + max((int(match[1]) for match in map(pattern.match, keys) if match), default=-1)
