"""The memory estimate against what is really allocated.

Catches parameters that are counted twice or not sharded, optimizer states of frozen parts, and a formula of the
objective's peak that has parted from the code.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bebop_megatron.estimate import activations
from bebop_megatron.estimate.objective import Problem, peak
from bebop_megatron.estimate.weights import Block, shards, weigh
from bebop_megatron.losses import budget, rows
from bebop_megatron.losses.chunked import fused_linear_objective
from bebop_megatron.losses.options import Options

ROOT = Path(__file__).resolve().parent.parent.parent


def run(*words):
    command = [sys.executable, "-m", *words]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False)


@pytest.fixture(scope="module")
def real_models():
    if torch.cuda.is_available():
        pytest.skip("allocates the models on the CPU platform")
    done = run("tests.estimate.real_models")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout)


def test_parameters_gradients_and_optimizer_of_real_models(real_models):
    for name, found in real_models["cases"].items():
        for stage, (real, estimated) in enumerate(zip(found["real"], found["estimated"], strict=True)):
            assert real[0] == estimated[0] > 0, (name, stage)
            if "distributed" not in name:
                assert real[1:] == estimated[1:], (name, stage)
                continue
            # a distributed optimizer pads its buffers, which is much only in models as small as these
            for what, actual, expected in zip(("gradients", "optimizer"), real[1:], estimated[1:], strict=True):
                assert expected * 0.99 <= actual <= expected * 1.15, (name, stage, what, actual, expected)


def test_against_megatrons_own_count_where_it_counts_right(real_models):
    ours, theirs = real_models["by both"]
    assert ours == pytest.approx(theirs, rel=1e-12)


def measured_peak(k, n, h, v, kind, joint):
    """Most bytes that the allocator held at once above what was there before."""
    generator = torch.Generator().manual_seed(0)
    draft = torch.randn(k, n, h, generator=generator, requires_grad=True)
    target = torch.randn(n, h, generator=generator)
    weight = torch.randn(v, h, generator=generator, requires_grad=joint)
    following = (torch.arange(n)[None] + torch.arange(1, k + 1)[:, None]).clamp(max=n - 1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out = fused_linear_objective(
            draft, target, weight, target_rows=following, kind=kind, backend="torch", weight_requires_grad=joint
        )
        out.loss.backward()
    held = most = 0
    for event in profile.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return most


@pytest.mark.parametrize(
    ("k", "n", "h", "v", "kind", "joint"),
    [
        (1, 256, 64, 4096, "tv", False),
        (3, 512, 64, 4096, "tv", False),
        (7, 512, 64, 4096, "tv", False),
        (3, 512, 64, 4096, "reverse-kl", False),
        (3, 256, 256, 4096, "tv", True),
        # the gradients, not a chunk, are what is large
        (5, 1024, 512, 512, "kl", False),
    ],
)
def test_peak_of_the_objective_within_a_quarter(k, n, h, v, kind, joint, monkeypatch):
    # a budget that these small problems fill
    monkeypatch.setitem(budget.CHUNK_BYTES, "cpu", 24 * 2**20)
    monkeypatch.setattr(rows, "_BLOCK", 2**14)
    problem = Problem(k, n, h, v, torch.float32, "cpu", joint=joint)
    # the stacked inputs are there before
    expected = peak(problem, Options(kind)) - k * n * h * 4
    actual = measured_peak(k, n, h, v, kind, joint)
    assert expected * 0.75 <= actual <= expected * 1.25, f"measured {actual:,}, estimated {expected:,}"


def arguments(**changes):
    base = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1}
    base |= {"context_parallel_size": 1, "expert_model_parallel_size": 1, "expert_tensor_parallel_size": 1}
    base |= {"world_size": 16, "use_distributed_optimizer": True, "num_distributed_optimizer_instances": 1}
    base |= {"use_precision_aware_optimizer": False, "accumulate_allreduce_grads_in_fp32": True, "optimizer": "adam"}
    base |= {"bf16": True, "fp16": False, "seq_length": 4096, "micro_batch_size": 1, "sequence_parallel": False}
    base |= {"virtual_pipeline_model_parallel_size": None, "recompute_granularity": None}
    return SimpleNamespace(**(base | changes))


def test_distributed_optimizer_shards_experts_over_their_own_ranks():
    args = arguments(tensor_model_parallel_size=2, expert_model_parallel_size=8)
    assert shards(args) == (8, 2)
    blocks = [Block("backbone", False, 2, 800), Block("mtp", True, 2, 800)]
    both = weigh(args, blocks, frozenset({"backbone", "mtp"}))
    assert (both.parameters, both.gradients, both.optimizer) == (3200, 6400, 800 * 12 / 8 + 800 * 12 / 2)
    head = weigh(args, blocks, frozenset({"mtp"}))
    assert (head.parameters, head.gradients, head.optimizer) == (3200, 3200, 800 * 12 / 2)


def test_pipeline_stages_hold_what_one_forward_one_backward_leaves():
    args = arguments(pipeline_model_parallel_size=4)
    assert [activations.in_flight(args, stage, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert activations.in_flight(args, 0, 2) == 2


def test_preset_on_the_command_line():
    done = run(
        *("bebop_megatron.estimate", "--world-size", "8", "--preset", "qwen3-8b", "--tp", "4", "--pp", "2"),
        *("--seq-length", "4096", "--all", "--", "--recompute-granularity", "full", "--recompute-method", "uniform"),
        *("--recompute-num-layers", "1"),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    # 8.19 billion as published, and an MTP layer
    assert "8.4" in done.stdout.split(" billion")[0]
    for situation in ("backbone frozen", "mtp frozen", "both, detached", "joint"):
        assert f"{situation}: GiB of a rank" in done.stdout
