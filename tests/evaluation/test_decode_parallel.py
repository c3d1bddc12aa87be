"""Two tensor-parallel ranks generate what one process generates, and agree with each other.

Catches: logits of one rank's vocabulary shard taken for all of them, padding columns in the middle of the gathered
vocabulary, ranks that draw different tokens, a sequence-parallel model that scatters single tokens.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder
from tests.evaluation import tiny

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

MODELS = {"plain": {}, "tied": {"tied": True}, "fused-norms": {"fused_norms": True}}
CONFIGS = {
    "greedy": DecodeConfig(temperature=0, max_new_tokens=16, batch_size=2),
    "greedy-baseline": DecodeConfig(gamma=0, temperature=0, max_new_tokens=16, batch_size=2),
    "sampled": DecodeConfig(temperature=0.9, top_p=0.9, max_new_tokens=16, batch_size=2, seed=3),
}
TRUE_SIZE = tiny.VOCAB - 3


def _texts(**overrides):
    texts = {}
    for kind, settings in MODELS.items():
        model = tiny.build(**settings, **overrides)
        for name, config in CONFIGS.items():
            decoder = SpeculativeDecoder(model, config, vocab_size=TRUE_SIZE)
            result = decoder.generate(tiny.prompts(6, 1, 9, vocab_size=TRUE_SIZE))
            texts[kind, name] = [sequence.tokens for sequence in result.sequences]
        assert model.config.sequence_parallel is bool(overrides)
    return texts


def _rank(rank: int, world: int, folder: str) -> None:
    with tiny.megatron_world(rank, world, folder):
        out = {"plain": _texts()}
        if world > 1:
            out["sequence-parallel"] = _texts(sequence_parallel=True)
    torch.save(out, f"{folder}/{rank}.pt")


def _run(world: int, folder: Path):
    folder.mkdir()
    mp.spawn(_rank, (world, str(folder)), nprocs=world)
    return [torch.load(folder / f"{rank}.pt") for rank in range(world)]


def test_text_is_that_of_one_process(tmp_path):
    (alone,) = _run(1, tmp_path / "one")
    for rank in _run(2, tmp_path / "two"):
        assert rank["plain"] == alone["plain"]
        assert rank["sequence-parallel"] == alone["plain"]
