"""Training in mode `chain` or `first-depth` computes what an engine computes when it drafts.

The judges are the evaluation decoder, one anchor after another with a key-value cache, and a dense recomputation under
an explicit mask. Catch: a rotary position off by one, keys of the wrong depth, a chain that sees another anchor's chain
or another document, gradients that do not reach the first step's keys, state lost under recompute.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.evaluation import tiny
from tests.mcore import drafting

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")


@pytest.fixture(scope="module", autouse=True)
def megatron():
    with tiny.megatron_world():
        yield


MODELS = {
    "grouped-queries": {},
    "local-backend": {"engine": False},
    "output-gate": {"attention_output_gate": True},
    "learned-positions": {"position": "learned_absolute"},
    "latent": {"latent": True},
}


def same_as_decoder(model, ids, hidden, bounds, mode):
    """Compare hidden [1 + k, s, b, h] with the decoder's, document by document."""
    compared = 0
    for row, tokens in enumerate(ids.tolist()):
        for start, stop in itertools.pairwise(bounds):
            expected = drafting.decoded(model, tokens[start:stop], mode)
            known = ~expected.isnan()
            actual = hidden[1:, start:stop, row]
            torch.testing.assert_close(actual[known], expected[known], rtol=1e-5, atol=1e-5)
            compared += int(known.any(-1).sum())
    return compared


@pytest.mark.parametrize("mode", ["chain", "first-depth"])
@pytest.mark.parametrize("kind", MODELS)
def test_every_step_at_every_anchor_equals_the_decoder(mode, kind):
    model = drafting.build(mode, **MODELS[kind])
    ids = torch.randint(0, drafting.VOCAB, (2, 14), generator=torch.Generator().manual_seed(1))
    hidden = drafting.hidden_by_depth(model, ids, torch.arange(14).expand(2, -1)).detach()
    k, n = drafting.DEPTHS, 14
    assert same_as_decoder(model, ids, hidden, [0, 14], mode) == 2 * (k * (n - 1) - k * (k - 1) // 2)
