"""The table of `names.py` spelled out for one model: a list of small conversions, each a few tensors on either side."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from bebop_megatron.bridges import names
from bebop_megatron.bridges.families import Sizes
from bebop_megatron.bridges.layouts import LAYOUTS
from bebop_megatron.bridges.names import Rule


@dataclass(frozen=True)
class Place:
    """A tensor, or one slab of it. `counts` are the sizes of the dimensions that `index` points into."""

    name: str
    index: tuple[int, ...] = ()
    counts: tuple[int, ...] = ()


@dataclass(frozen=True)
class Row:
    """Some Hugging Face tensors that are some Megatron tensors. `shapes` are those of the Hugging Face places."""

    hf: tuple[Place, ...]
    megatron: tuple[Place, ...]
    shapes: tuple[torch.Size, ...]
    layout: str
    sizes: Sizes

    @property
    def is_vocabulary(self) -> bool:
        """Megatron may have padded its rows."""
        return self.megatron[0].name in (names.EMBEDDING.megatron[0], names.LM_HEAD.megatron[0])

    def pack(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Hugging Face -> Megatron."""
        return LAYOUTS[self.layout].pack(tensors, self.sizes)

    def unpack(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Megatron -> Hugging Face, checked against the shapes of the table."""
        out = LAYOUTS[self.layout].unpack(tensors, self.sizes)
        assert tuple(tensor.shape for tensor in out) == self.shapes, (self, [t.shape for t in out])
        return out

    def megatron_shapes(self) -> tuple[torch.Size, ...]:
        """Shapes of the Megatron places, found by laying out tensors without memory."""
        return tuple(t.shape for t in self.pack(tuple(torch.empty(s, device="meta") for s in self.shapes)))


@dataclass(frozen=True)
class Style:
    """What Hugging Face checkpoints of one family do in more than one way.

    `own_outer` are the MTP layers after the first that do not share `mtp.fc` and its norms with it.
    """

    fused_experts: bool = False
    fused_mtp_experts: bool = False
    own_outer: frozenset[int] = frozenset()
    tied_head_too: bool = False

    @staticmethod
    def of(known: Iterable[str], sizes: Sizes, mtp_layers: int) -> Style:
        """The style of a checkpoint with these tensor names; the family's own where the names do not say."""
        fused, fused_mtp, own, head = sizes.family.fused_experts, False, set(), False
        for name in known:
            if ".mlp.experts." in name:
                is_fused = name.endswith(("gate_up_proj", "down_proj"))
                if name.startswith("mtp."):
                    fused_mtp = is_fused
                else:
                    fused = is_fused
            own |= {int(match[1]) for match in [re.match(r"mtp\.layers\.(\d+)\.fc\.", name)] if match}
            head |= name == names.LM_HEAD.hf[0]
        return Style(fused, fused_mtp, frozenset(own & set(range(1, mtp_layers))), head and sizes.tied)


def _expand(rule: Rule, hf_prefix: str, megatron_prefix: str, sizes: Sizes) -> Iterator[Row]:
    symbols = sizes.symbols()
    shapes = tuple(torch.Size([symbols[symbol] for symbol in shape.split()]) for shape in rule.shapes)
    every = rule.megatron[0].endswith("[e]")

    def place(prefix: str, name: str, expert: int) -> Place:
        name = prefix + name.replace("{e}", str(expert))
        if name.endswith("[e]"):
            return Place(name[:-3], (expert,), (sizes.experts,))
        return Place(name)

    for expert in range(sizes.experts if every else 1):
        hf = tuple(place(hf_prefix, name, expert) for name in rule.hf)
        megatron = tuple(place(megatron_prefix, name, expert) for name in rule.megatron)
        yield Row(hf, megatron, shapes, rule.layout, sizes)


def _layer_rules(sizes: Sizes, linear: bool, experts: bool, fused: bool) -> tuple[Rule, ...]:
    mixer = names.ATTENTION
    if linear:
        mixer = names.DELTA_NET_NEXT if sizes.family.linear == "next" else names.DELTA_NET_35
    if not experts:
        return (*mixer, *names.DENSE_MLP)
    each = names.FUSED_EXPERTS if fused else names.SEPARATE_EXPERTS
    return (*mixer, *names.MOE, *each, *(names.SHARED_EXPERT if sizes.shared_ffn else ()))


def backbone_rows(sizes: Sizes, style: Style) -> Iterator[Row]:
    """Everything but the MTP layers."""
    yield from _expand(names.EMBEDDING, sizes.prefix, "", sizes)
    for i, linear in enumerate(sizes.linear):
        for rule in _layer_rules(sizes, linear, sizes.experts_in[i], style.fused_experts):
            yield from _expand(rule, f"{sizes.prefix}layers.{i}.", f"decoder.layers.{i}.", sizes)
    yield from _expand(names.FINAL_NORM, sizes.prefix, "", sizes)
    if not sizes.tied:
        yield from _expand(names.LM_HEAD, "", "", sizes)


def mtp_rows(sizes: Sizes, layers: int, style: Style) -> Iterator[Row]:
    """The physical MTP layers.

    A layer after the first that shares `mtp.fc` has rows that read the same Hugging Face tensors as the first one's.
    """
    experts = sizes.experts_in[sizes.attention_layer]
    for k in range(layers):
        own = k in style.own_outer
        for rule in names.MTP_OUTER:
            yield from _expand(rule, f"mtp.layers.{k}." if own else "mtp.", f"mtp.layers.{k}.", sizes)
        for rule in _layer_rules(sizes, False, experts, style.fused_mtp_experts):
            yield from _expand(rule, f"mtp.layers.{k}.", f"mtp.layers.{k}.transformer_layer.", sizes)


def _states(sizes: Sizes, linear: bool, experts: bool) -> tuple[str, ...]:
    mixer = names.STATES_DELTA_NET if linear else names.STATES_ATTENTION
    if not experts:
        return (*mixer, *names.STATES_DENSE_MLP)
    return (*mixer, *names.STATES_MOE, *(names.STATES_SHARED_EXPERT if sizes.shared_ffn else ()))


def extra_states(sizes: Sizes, mtp_layers: int) -> Iterator[Place]:
    """Extra states that a checkpoint may be asked for, by their name in the model."""
    layers = [
        (f"decoder.layers.{i}.", _states(sizes, linear, sizes.experts_in[i])) for i, linear in enumerate(sizes.linear)
    ]
    inner = _states(sizes, False, sizes.experts_in[sizes.attention_layer])
    for k in range(mtp_layers):
        layers += [(f"mtp.layers.{k}.transformer_layer.", inner), (f"mtp.layers.{k}.", names.STATES_MTP)]
    for prefix, modules in (*layers, ("", ("decoder.final_layernorm", "output_layer"))):
        for module in modules:
            name = f"{prefix}{module.removesuffix('[e]')}._extra_state"
            if module.endswith("[e]"):
                yield from (Place(name, (expert,), (sizes.experts,)) for expert in range(sizes.experts))
            else:
                yield Place(name)
