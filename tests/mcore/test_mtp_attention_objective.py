"""A head trained in mode `chain` has the single process's loss and finalized gradients under every layout.

The whole way: batches, drafts, objective, backward pass and Megatron's finalized gradients. Catches what each part
alone does right: a factor of context parallelism in the gathered keys' gradient, a stage that loses the state.
"""

from __future__ import annotations

import pytest

from bebop_megatron.config import ObjectiveConfig
from tests.mcore.world import Layout, run

pytestmark = pytest.mark.dist

TV = ObjectiveConfig(loss="tv")
SP = {"sequence_parallel": True}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
# what a layout's batch is compared with: one process, documents one by one
REFERENCES = {
    "plain": Layout(attention="chain"),
    "learned": Layout(attention="chain", positions="learned_absolute"),
    "packed": Layout(attention="chain", data="documents"),
    "padded": Layout(attention="chain", data="ragged-documents"),
}
ONE = {
    "plain-batch4": Layout(attention="chain", micro_batch=4),
    "packed-thd": Layout(attention="chain", data="packed"),
    "padded-thd": Layout(attention="chain", data="padded"),
}
TWO = {
    "plain-tp2-sp-recompute": Layout(attention="chain", tp=2, overrides=SP | FULL),
    "plain-cp2": Layout(attention="chain", cp=2),
    "plain-pp2": Layout(attention="chain", pp=2),
    "plain-dp2-per-token": Layout(attention="chain", dp=2, overrides={"calculate_per_token_loss": True}),
    "learned-cp2-contiguous": Layout(attention="chain", cp=2, positions="learned_absolute", cp_layout="contiguous"),
    "packed-cp2": Layout(attention="chain", cp=2, data="packed"),
    "padded-cp2-recompute": Layout(attention="chain", cp=2, data="padded", overrides=FULL),
}
FOUR = {
    "plain-tp2-sp-cp2": Layout(attention="chain", tp=2, cp=2, overrides=SP),
    "packed-pp2-cp2": Layout(attention="chain", pp=2, cp=2, data="packed"),
    "padded-tp2-sp-cp2": Layout(attention="chain", tp=2, cp=2, data="padded", overrides=SP),
}


@pytest.fixture(scope="module")
def found():
    return run([(name, layout, TV) for name, layout in (REFERENCES | ONE | TWO | FOUR).items()])


@pytest.mark.parametrize("layouts", [ONE, TWO, FOUR], ids=["one", "two", "four"])
def test_loss_and_gradients_equal_the_single_process(found, layouts):
    for name in layouts:
        result, single = found[name], found[name.split("-")[0]]
        assert result["loss"] == pytest.approx(single["loss"], rel=1e-5), name
        assert result["grads"].keys() == single["grads"].keys(), name
        for key, grad in result["grads"].items():
            scale = single["grads"][key].abs().max()
            assert scale > 0, (name, key)
            assert (grad - single["grads"][key]).abs().max() <= 1e-5 * scale + 1e-9, (name, key)
