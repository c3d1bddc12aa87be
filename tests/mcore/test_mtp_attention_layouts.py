"""Draft steps under tensor, sequence and context parallelism equal the single process, hidden states and gradients.

Catches: keys of step 1 that other context-parallel ranks hold and this one never sees, zigzag order taken for sequence
order, tokens or padding marks shifted inside a shard, rotary positions of the wrong shard, gradients of gathered keys
lost or doubled.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from bebop_megatron.alignment import ContextShard
from tests.evaluation import tiny
from tests.mcore import drafting
from tests.mcore.groups import join_groups
from tests.worlds import run_worlds

pytestmark = [pytest.mark.dist, pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")]

FULL = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
DOCUMENTS = [8, 4, 12]
# name -> (tp, cp, sequence parallel, what is computed)
KINDS: dict[str, dict[str, Any]] = {
    "chain": {"mode": "chain"},
    "chain-recompute": {"mode": "chain", **FULL},
    "first-depth": {"mode": "first-depth"},
    "per-depth": {"mode": "per-depth"},
    "packed": {"mode": "chain", "packed": True},
    "packed-per-depth": {"mode": "per-depth", "packed": True},
    "packed-recompute": {"mode": "chain", "packed": True, **FULL},
    "learned": {"mode": "chain", "position": "learned_absolute"},
    "latent": {"mode": "chain", "latent": True},
}
LAYOUTS = {"tp2": (2, 1, False), "tp2-sp": (2, 1, True), "cp2": (1, 2, False)}
# refused: each rank would keep only its own heads' part of the rotary key's gradient
SKIPPED = {("tp2", "latent")}
CASES = [(layout, kind) for layout in LAYOUTS for kind in KINDS if (layout, kind) not in SKIPPED]


def compute(tp: int, cp: int, sequence_parallel: bool, *, packed: bool = False, **settings: Any) -> dict[str, Any]:
    """Hidden states of the whole sequence [1 + k, s, b, h] and full gradients of the MTP parameters."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import initialize_rng_tracker, model_parallel_cuda_manual_seed

    join_groups(tp, context_parallel_size=cp)
    initialize_rng_tracker(force_reset=True)
    model_parallel_cuda_manual_seed(1)
    model = drafting.build(**settings, mtp_detach_heads=True, sequence_parallel=sequence_parallel)
    k, s, b = drafting.DEPTHS, sum(DOCUMENTS), 1 if packed else 2
    ids = torch.randint(0, drafting.VOCAB, (b, s), generator=torch.Generator().manual_seed(1))
    positions = drafting.positions_of(DOCUMENTS if packed else [s]).expand(b, -1)
    bounds = torch.tensor([0, *(DOCUMENTS if packed else [s])]).cumsum(0)
    rank = parallel_state.get_context_parallel_rank()
    mine = ContextShard(bounds, s, cp, rank).positions()
    packing = drafting.packing(DOCUMENTS) if packed else None
    # routers of MoE layers ask which tokens are padding
    padding, seen = (torch.arange(s) % 5 == 0).expand(b, -1), []
    model.mtp.layers[0].mtp_model_layer.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(kwargs["padding_mask"]), with_kwargs=True
    )
    local = drafting.hidden_by_depth(model, ids[:, mine], positions[:, mine], packing, padding[:, mine])
    if sequence_parallel:
        mine = torch.arange(s).chunk(tp)[parallel_state.get_tensor_model_parallel_rank()]

    # anchors whose chain leaves their document hold nothing that means anything
    end = bounds[torch.bucketize(torch.arange(s), bounds[1:], right=True) + 1]
    counted = torch.arange(s) + torch.arange(1, k + 1)[:, None] < end
    slope = torch.randn((k, s, *local.shape[2:]), generator=torch.Generator().manual_seed(2)) * counted[..., None, None]
    parameters = dict(model.mtp.named_parameters())
    (local[1:] * slope[:, mine]).sum().backward()
    grads = {}
    for name, parameter in parameters.items():
        if parameter.grad is None:
            continue
        grad, group = parameter.grad.clone(), parallel_state.get_tensor_model_parallel_group()
        # as Megatron does when it finalizes gradients
        per_head = tp > 1 and ("q_layernorm" in name or "k_layernorm" in name)
        if cp > 1 or per_head or (sequence_parallel and getattr(parameter, "sequence_parallel", False)):
            torch.distributed.all_reduce(grad)
        if getattr(parameter, "tensor_model_parallel", False) and tp > 1:
            shards = [torch.empty_like(grad) for _ in range(tp)]
            torch.distributed.all_gather(shards, grad, group=group)
            halves = [torch.cat([x.chunk(2)[i] for x in shards]) for i in (0, 1)]
            grad = torch.cat(halves) if "linear_fc1" in name else torch.cat(shards, parameter.partition_dim)
        grads[name] = grad
    whole, masks = torch.zeros((1 + k, s, *local.shape[2:])), torch.zeros((k, s, b))
    whole[:, mine] = local.detach()
    masks[:, mine] = torch.stack(seen[:k]).transpose(1, 2).float()
    for result in (whole, masks) if sequence_parallel or cp > 1 else ():
        torch.distributed.all_reduce(result)
    return {
        "hidden": whole[1:] * counted[..., None, None],
        "padding": masks * counted[..., None],
        "grads": grads,
    }


def _on_a_rank(case: tuple[str, str], unused: Path) -> dict[str, Any]:
    layout, kind = case
    # every exchange names its group; Megatron's own shift sends without one
    torch.distributed.isend = torch.distributed.irecv = None
    return compute(*LAYOUTS[layout], **KINDS[kind])


@pytest.fixture(scope="module")
def two():
    return run_worlds(_on_a_rank, {2: {f"{layout}/{kind}": (layout, kind) for layout, kind in CASES}})[2]


@pytest.fixture(scope="module")
def one():
    with tiny.megatron_world():
        return {kind: compute(1, 1, False, **settings) for kind, settings in KINDS.items()}


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_layout_equals_the_single_process(one, two, layout, kind):
    name, expected = f"{layout}/{kind}", one[kind]
    for result in two[name]:
        torch.testing.assert_close(result["hidden"], expected["hidden"], rtol=1e-5, atol=1e-5)
        assert torch.equal(result["padding"], expected["padding"])
        assert expected["padding"].any()
        assert result["grads"].keys() == expected["grads"].keys()
        for parameter, grad in result["grads"].items():
            scale = expected["grads"][parameter].abs().max()
            assert scale > 0, parameter
            assert (grad - expected["grads"][parameter]).abs().max() <= 1e-5 * scale, parameter
