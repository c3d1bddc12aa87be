"""Ranks that share a model generate what one process generates; ranks that share the prompts put the parts together.

Catches: logits of one rank's vocabulary shard taken for all of them, padding columns in the middle of the gathered
vocabulary, ranks that draw different tokens, a sequence-parallel model that scatters single tokens, delta net heads of
the wrong rank; results in another order than the prompts, statistics of one rank only, copies of the model that draw
the same random numbers, a rank without a prompt that everybody waits for.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder
from bebop_megatron.evaluation.share import Share
from bebop_megatron.evaluation.surgery import data_parallel_group
from tests.evaluation import tiny
from tests.mcore.groups import join_groups
from tests.worlds import run_worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

MODELS = {
    "plain": {},
    "tied": {"tied": True},
    "fused-norms": {"fused_norms": True},
    "hybrid": tiny.DELTA_NETS["hybrid"],
}
CONFIGS = {
    "greedy": DecodeConfig(temperature=0, max_new_tokens=12, batch_size=2),
    "greedy-baseline": DecodeConfig(gamma=0, temperature=0, max_new_tokens=12, batch_size=2),
    "sampled": DecodeConfig(temperature=0.9, top_p=0.9, max_new_tokens=12, batch_size=2, seed=3),
    "adaptive": DecodeConfig(adaptive_gamma=True, temperature=0.9, max_new_tokens=12, batch_size=2, seed=3),
}
TRUE_SIZE = tiny.VOCAB - 3
PROMPTS = (6, 1, 9, 4, 7)
NEW = 8


def _texts(**overrides):
    texts = {}
    for kind, settings in MODELS.items():
        model = tiny.build(**settings, **overrides)
        for name, config in CONFIGS.items():
            # what a model adds is in its layers: every way to decode is tried on the first one
            if kind != "plain" and name != "sampled":
                continue
            decoder = SpeculativeDecoder(model, config, vocab_size=TRUE_SIZE)
            result = decoder.generate(tiny.prompts(6, 1, 9, vocab_size=TRUE_SIZE))
            texts[kind, name] = [sequence.tokens for sequence in result.sequences]
        assert model.config.sequence_parallel is bool(overrides)
    return texts


def _shared(kinds):
    """Prompts split over the data-parallel ranks (all of them one process's, where there is one copy)."""
    out, prompts = {}, tiny.prompts(*PROMPTS, vocab_size=TRUE_SIZE)
    for kind in kinds:
        model = tiny.build(**MODELS[kind])
        group = data_parallel_group(model)

        def decode(texts, *, into=(model, group), num_tokens=None, **settings):
            config = DecodeConfig(max_new_tokens=NEW, batch_size=2, record=True, **settings)
            decoder = SpeculativeDecoder(into[0], config, vocab_size=TRUE_SIZE, data_parallel_group=into[1])
            result = decoder.generate(texts, num_tokens=num_tokens)
            return {
                "tokens": [sequence.tokens for sequence in result.sequences],
                "prompts": [sequence.prompt for sequence in result.sequences],
                "counts": result.counts,
                "drafts": sorted(zip(*(values.tolist() for values in vars(result.records).values()), strict=True)),
            }

        out[kind] = {
            "greedy": decode(prompts, temperature=0.0),
            "one prompt": decode(prompts[:1], temperature=0.0),
            # every rank continues the same prompt: samples must differ all the same
            "sampled": decode([prompts[0]] * 4, temperature=1.5),
            "in turn": decode(prompts[:3], temperature=1.5, num_tokens=7 * NEW),
        }
    return out


def _on_a_rank(tensor_parallel: int, unused: Path):
    world = torch.distributed.get_world_size()
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    join_groups(tensor_parallel)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    out = {}
    if world == 1 or tensor_parallel < world:
        # four processes on two cores wait for each other most of the time
        out["shared"] = _shared({1: ["plain", "hybrid"], 2: ["plain"], 4: ["hybrid"]}[world])
    if tensor_parallel == world:
        out["plain"] = _texts()
    if tensor_parallel == world == 2:
        out["sequence-parallel"] = _texts(sequence_parallel=True)
    return out


@pytest.fixture(scope="module")
def found():
    worlds = {1: {"alone": 1}, 2: {"tp2": 2, "dp2": 1}, 4: {"tp2 dp2": 2}}
    return {name: ranks for cases in run_worlds(_on_a_rank, worlds).values() for name, ranks in cases.items()}


@pytest.fixture(scope="module")
def alone(found):
    return found["alone"][0]


def test_text_is_that_of_one_process(alone, found):
    for rank in found["tp2"]:
        assert rank["plain"] == alone["plain"]
        assert rank["sequence-parallel"] == alone["plain"]


@pytest.mark.parametrize("layout", ["dp2", "tp2 dp2"])
def test_copies_of_the_model_share_the_prompts(alone, found, layout):
    ranks = found[layout]
    for kind in ranks[0]["shared"]:
        for name, one in alone["shared"][kind].items():
            parts = [rank["shared"][kind][name] for rank in ranks]
            for part in parts[1:]:
                # every rank has the whole result
                assert torch.equal(part.pop("counts"), parts[0]["counts"])
                assert part == {key: parts[0][key] for key in part}
            # every copy finishes what it began: there may be one sequence more
            assert parts[0]["prompts"][: len(one["prompts"])] == one["prompts"]
            if name in ("greedy", "one prompt"):
                # by sequence: which ones are decoded together changes nothing
                assert parts[0]["tokens"] == one["tokens"]
                assert torch.equal(parts[0]["counts"], one["counts"])
                assert parts[0]["drafts"] == one["drafts"]
            elif name == "sampled":
                assert len({tuple(tokens) for tokens in parts[0]["tokens"]}) == 4
            else:
                assert len(parts[0]["prompts"]) == 8


def test_every_sequence_has_one_rank():
    for size in (1, 2, 3, 5):
        shares = [Share(rank, size) for rank in range(size)]
        for total in (0, 1, 4, 7):
            taken = [share.sequence(i) for share in shares for i in range(share.count(total))]
            assert sorted(taken) == list(range(total))
