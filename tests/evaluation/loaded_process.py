"""Loads the CHECKPOINT that the tests train, and looks whether the model is the one that was trained."""

from __future__ import annotations

import sys

import torch

from bebop_megatron.evaluation.loading import load_model
from bebop_megatron.mcore.checkpoints import latest_iteration_dir
from tests.saved import saved_tensors


def look(path: str) -> None:
    """Raises AssertionError where it is not."""
    loaded, saved = load_model(path), saved_tensors(latest_iteration_dir(path))
    model, config = loaded.model, loaded.model.config
    assert (config.layernorm_epsilon, config.qk_layernorm, model.rotary_base) == (1e-3, True, 5000)
    assert (loaded.args.vocab_size, loaded.padded_vocab_size, loaded.vocab_padding) == (95, 128, 128)
    own = dict(model.named_parameters())
    for name in ("mtp.layers.0.eh_proj.weight", "output_layer.weight"):
        assert torch.equal(own[name], saved[name]), name
    assert not model.training
    print("ok")


if __name__ == "__main__":
    look(sys.argv[1])
