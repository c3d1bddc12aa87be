"""A learner cut over tensor-parallel ranks trains the same policy, and its shards make whole models of the workers.

Catches: halves of a gated MLP put together in the wrong order, a rank's copy of what all ranks hold sent twice, a
partition function over one rank's part of the vocabulary, a gradient that only one rank has, padding that counts.
"""

from __future__ import annotations

import pytest
import torch

from bebop_megatron.rl.grpo import log_prob_and_entropy
from bebop_megatron.rl.weights import export_shards, load_shards
from tests.evaluation import tiny
from tests.mcore.groups import join_groups
from tests.worlds import run_worlds

pytestmark = [
    pytest.mark.dist,
    pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform"),
]

# two ranks of 16 columns, the second with padding
VOCAB = 29


def _loss(logits, group=None):
    """A weighted sum of both outputs, and the gradient of this rank's logits."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, VOCAB, (2, 5), generator=generator)
    weights = torch.randn(2, 2, 5, generator=generator)
    logits = logits.detach().requires_grad_()
    found = log_prob_and_entropy(logits, labels, vocab_size=VOCAB, temperature=0.7, group=group)
    loss = sum((w * f).sum() for w, f in zip(weights, found, strict=True))
    loss.backward()
    return loss.detach(), logits.grad


def _on_a_rank(_case, _folder):
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    join_groups(2)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    rank, half = torch.distributed.get_rank(), tiny.VOCAB // 2
    cut = tiny.build(seed=1)
    logits = torch.randn(2, 5, tiny.VOCAB, generator=torch.Generator().manual_seed(1))
    part = _loss(logits[..., rank * half : (rank + 1) * half], cut.pg_collection.tp)
    shards: list = [None, None]
    torch.distributed.all_gather_object(shards, export_shards([cut], frozenset({"backbone", "mtp"})))
    backbone = export_shards([cut], frozenset({"backbone"}))
    join_groups(1)
    whole, wanted = tiny.build(seed=2), tiny.build(seed=1)
    load_shards(whole, shards)
    different = [
        name
        for (name, value), other in zip(whole.named_parameters(), wanted.parameters(), strict=True)
        if not torch.equal(value, other)
    ]
    dense = _loss(logits)
    keys = [shard.key for each in shards for shard in each]
    incomplete = None
    try:
        load_shards(whole, [backbone])
    except RuntimeError as error:
        incomplete = str(error)
    return {
        "different": different,
        "part": part,
        "dense": (dense[0], dense[1][..., rank * half : (rank + 1) * half]),
        "backbone": [shard.key for shard in backbone],
        "norms": keys.count("decoder.final_layernorm.weight"),
        "incomplete": incomplete,
    }


@pytest.fixture(scope="module")
def ranks():
    return run_worlds(_on_a_rank, {2: {"both": None}})[2]["both"]


def test_shards_of_all_ranks_make_the_whole_model(ranks):
    for rank in ranks:
        assert rank["different"] == []
        assert rank["norms"] == 1
        assert rank["backbone"]
        assert not any(key.startswith("mtp.") for key in rank["backbone"])


def test_a_rank_that_is_missing_is_noticed(ranks):
    for rank in ranks:
        assert "the learner's ranks sent" in rank["incomplete"]


def test_the_loss_is_that_of_one_process(ranks):
    for rank in ranks:
        for found, wanted in zip(rank["part"], rank["dense"], strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)
