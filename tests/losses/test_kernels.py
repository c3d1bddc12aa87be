"""Triton's kernels compute what the specification says, and run when they are asked for.

Catches: a kernel that differs from its PyTorch twin in any statistic or direction, a PyTorch fall-back that nobody
asked for, fp32 copies of half-precision logits, rounding before the last step, 0 * inf, NaN that disappears, borders of
blocks, row strides taken for row lengths, ranks that hold padding only, and code that the interpreter takes and the
compiler refuses. What each case does is in `kernel_cases.py`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing as mp

from bebop_megatron.losses import budget, chunked, fused_linear_objective, rows, vocab_parallel_objective
from bebop_megatron.losses.backend import resolve
from bebop_megatron.losses.options import Options
from tests.losses import kernel_cases
from tests.losses.problem import hidden, logits

pytest.importorskip("triton", reason="needs Triton")

ROOT = Path(__file__).parents[2]
INTERPRETED = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}


def run_cases(device: str, folder: Path, environment: dict[str, str]) -> dict[str, str]:
    """What became of each case, in a process of its own."""
    file = folder / "outcomes.json"
    command = [sys.executable, "-W", "ignore", "-m", "tests.losses.kernel_cases", device, str(file)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), **environment}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False
    )
    outcomes = json.loads(file.read_text()) if file.exists() else {}
    return dict.fromkeys(kernel_cases.CASES, f"not run:\n{done.stdout}") | outcomes


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases("cpu", tmp_path_factory.mktemp("interpreted"), INTERPRETED)


@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_in_the_interpreter(name, interpreted):
    assert interpreted[name] == kernel_cases.PASSED, interpreted[name]


@pytest.fixture(scope="module")
def on_gpu(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return run_cases("cuda", tmp_path_factory.mktemp("gpu"), {"TRITON_INTERPRET": "0"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", kernel_cases.CASES)
def test_on_a_gpu(name, on_gpu):
    assert on_gpu[name] == kernel_cases.PASSED, on_gpu[name]


@pytest.mark.dist
def test_ranks_that_share_the_vocabulary(tmp_path, monkeypatch):
    for name, value in INTERPRETED.items():
        monkeypatch.setenv(name, value)
    mp.spawn(kernel_cases.rank, (str(tmp_path),), nprocs=kernel_cases.WORLD)


def test_without_a_gpu_it_says_so(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    problem, states = logits(), hidden()
    with pytest.raises(ValueError, match="backend 'triton' was asked for, and the tensors are on cpu"):
        vocab_parallel_objective(problem.draft, problem.target, backend="triton")
    with pytest.raises(ValueError, match="backend 'triton' was asked for, and the tensors are on cpu"):
        fused_linear_objective(states.draft, states.target, states.weight, target_rows=states.rows, backend="triton")
    assert resolve("auto", torch.device("cpu")) is rows


def test_a_chunk_has_more_rows_where_logits_are_not_copied(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    weight = torch.zeros(1000, 2, dtype=torch.bfloat16)
    monkeypatch.setitem(budget.CHUNK_BYTES, "cpu", 10**6)
    limits = {
        (backend, kind): chunked._row_limit(weight, Options(kind, backend=backend))
        for backend in ("torch", "triton")
        for kind in ("tv", "reverse-kl")
    }
    assert limits == {
        ("torch", "tv"): 71,
        ("torch", "reverse-kl"): 45,
        ("triton", "tv"): 250,
        ("triton", "reverse-kl"): 250,
    }
    # two results at a time; the weight's gradient takes its one in fp32
    assert chunked._row_limit(weight, Options("tv", mix=("kl", 0.5), backend="triton")) == 166
    assert chunked._row_limit(weight.requires_grad_(), Options("tv", backend="triton")) == 125


COMPILE = """
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from bebop_megatron.losses import kernels

whole, wide = {"n", "columns"}, {"column", "target_column", "rows", "label"}
for kernel in (kernels._normalise_rows, kernels._overlap_of_rows, kernels._direction_of_rows):
    kind = {name: "i32" if name in whole or "stride" in name else "*fp32" for name in kernel.arg_names}
    kind |= {name: "*i64" for name in kernel.arg_names if name in wide}
    kind |= {name: "*bf16" for name in kernel.arg_names if name in ("logits", "draft", "target", "out")}
    constants = {name: value for name, value in (("REVERSE", True), ("BLOCK", 2048)) if name in kernel.arg_names}
    kind |= dict.fromkeys(constants, "constexpr")
    # as where a row is a multiple of 16 numbers
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(kernel.arg_names) if name not in constants}
    source = ASTSource(kernel, kind, constants, aligned)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 8})
    assert built.asm["cubin"]
    # in the interpreter every maximum lets a NaN through, on a GPU only this one does
    assert "max.NaN.f32" in built.asm["ptx"]
    loads = built.asm["ptx"].count("ld.global.v4")
    assert loads >= 2, f"{kernel.__name__}: {loads} loads of 16 bytes"
    print(kernel.__name__)
"""


def test_the_kernels_compile_for_hopper_with_wide_loads(tmp_path):
    """No GPU is needed for that; the interpreter does not see what the compiler refuses."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    # the compiler reads the source of a kernel from its file
    done = subprocess.run(
        [sys.executable, "-c", COMPILE], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["_normalise_rows", "_overlap_of_rows", "_direction_of_rows"]
