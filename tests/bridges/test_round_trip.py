"""Hugging Face -> Megatron -> Hugging Face for every family, through real Megatron models under several layouts.

Catches: a fused projection laid out otherwise than Megatron reads it, a norm without its one, embedding and hidden
state exchanged, a tensor that a layout loses, doubles or pads.
"""

from __future__ import annotations

import json

import pytest
import torch

from bebop_megatron.convert import export_checkpoint
from tests.bridges import models
from tests.bridges.conftest import DEPTHS, IDS, layouts_of, quiet
from tests.bridges.reference import draft_states

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]


@pytest.mark.parametrize("name", models.MODELS)
def test_export_of_the_imported_checkpoint_is_bit_identical(converted, name):
    folder = converted.root / name
    export_checkpoint(folder / "mcore", folder / "hf", folder / "direct", note=quiet)
    models.assert_same_tensors(models.read_folder(folder / "direct"), converted.tensors[name])


@pytest.mark.parametrize(("name", "layout"), [(name, x) for name in models.MODELS for x in layouts_of(name)])
def test_what_a_run_loads_and_saves_exports_bit_identically(converted, name, layout):
    folder = converted.root / name
    export_checkpoint(folder / layout, folder / "hf", folder / f"{layout}-out", note=quiet)
    models.assert_same_tensors(models.read_folder(folder / f"{layout}-out"), converted.tensors[name])


def _assert_close(actual, expected):
    assert (actual - expected).abs().max() <= 1e-4 * expected.abs().max()


@pytest.mark.parametrize("name", models.MODELS)
def test_logits_are_those_of_transformers(converted, name):
    expected = models.make_model(name)(IDS, use_cache=False).logits.detach()
    # the runs pad the vocabulary, as a run does whose command line gives its true size
    logits, padding = converted.computed[f"{name}/tp1"]["logits"].split([96, 32], -1)
    _assert_close(logits, expected)
    assert not padding.any()


@pytest.mark.parametrize("name", models.MODELS)
def test_draft_steps_are_those_of_the_reference_block(converted, name):
    config = json.loads((converted.root / name / "hf" / "config.json").read_text())
    hidden = models.make_model(name).model(IDS, use_cache=False).last_hidden_state.detach()
    actual = converted.computed[f"{name}/tp1"]["hidden"].transpose(1, 2)
    _assert_close(actual[0], hidden)
    expected = draft_states(converted.tensors[name], config, hidden, IDS, DEPTHS)
    for depth in range(1, DEPTHS + 1):
        _assert_close(actual[depth, :, :-DEPTHS], expected[depth - 1, :, :-DEPTHS])
