"""Does the Triton path hold on a GPU, and what does it cost there? One command for a machine with CUDA:

    python -m benchmarks.gpu_check

First correctness: every case of `tests/losses/kernel_cases.py` on the device, and vocabularies of real size against the
float64 definition. Only if all of that holds is anything measured: time against the bare matrix products (goal: at most
1.2 times), peak memory against keeping every depth's logits (goal: at most a tenth), and each kernel's bandwidth. The
result goes to benchmarks/data/ with the device, the versions and the date.

This script has not been run on a GPU yet: the kernels have been run in Triton's interpreter and compiled for sm_90
only, so both goals are open and no GPU number is claimed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.losses import OBJECTIVES, chunked, fused_linear_objective, vocab_parallel_objective
from bebop_megatron.losses.options import Options
from bebop_megatron.losses.plan import make_plan
from bebop_megatron.losses.reference import reference_objective

TIME_GOAL = 1.2
MEMORY_GOAL = 0.1
KINDS = tuple(OBJECTIVES)


@dataclass(frozen=True)
class Size:
    """n tokens, hidden size h, v columns, k depths."""

    n: int
    h: int
    v: int
    k: int


@dataclass(frozen=True)
class Data:
    """Shape: draft [k, n, h], target [n + k, h], weight [v, h], rows, labels [k, n]."""

    draft: Tensor
    target: Tensor
    weight: Tensor
    rows: Tensor
    labels: Tensor

    @classmethod
    def random(cls, size: Size, device: str, dtype: torch.dtype = torch.bfloat16) -> Data:
        """Depth i of token t meets row t + i; drafts are their targets and half as much noise."""
        g = torch.Generator(device).manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=g, device=device, dtype=dtype)

        rows = torch.arange(size.n, device=device) + torch.arange(size.k, device=device)[:, None]
        target = normal(size.n + size.k, size.h)
        draft = (target[rows] + 0.5 * normal(size.k, size.n, size.h)).detach()
        # logits of standard deviation 2
        weight = normal(size.v, size.h) * (2 * size.h**-0.5)
        labels = torch.randint(0, size.v, (size.k, size.n), generator=g, device=device)
        return cls(draft, target, weight, rows, labels)


def _distance(result: Tensor, expected: Tensor) -> float:
    return float((result.double() - expected.double()).norm() / expected.double().norm())


def _dense(draft: Tensor, target: Tensor, kind: str, labels: Tensor) -> Tensor:
    """The objective as PyTorch computes it in the type of the logits."""
    log_q, log_p = draft.log_softmax(-1), target.log_softmax(-1)
    q, p = log_q.exp(), log_p.exp()
    alpha = torch.minimum(p, q).sum(-1)
    kl = (p * (log_p - log_q)).sum(-1)
    share = torch.exp(-3 * alpha.detach())
    return {
        "ce": lambda: -log_q.gather(-1, labels[..., None]).mean(),
        "kl": lambda: kl.mean(),
        "reverse-kl": lambda: (q * (log_q - log_p)).sum(-1).mean(),
        "tv-step": lambda: (1 - alpha).mean(),
        "tv": lambda: (1 - alpha.cumprod(0)).mean(),
        "lk": lambda: -alpha.log().mean(),
        "lk-hybrid": lambda: (share * kl + (1 - share) * (1 - alpha)).mean(),
    }[kind]()


def wrong_at_full_vocabulary(device: str, vocabularies: tuple[int, ...] = (151_936, 50_257)) -> list[str]:
    """What differs from the float64 definition by more than twice what the same type costs a dense computation."""
    wrong = []
    for v in vocabularies:
        data = Data.random(Size(8, 64, v, 2), device)
        valid = torch.ones(2, 8, dtype=torch.bool, device=device)
        draft = data.draft @ data.weight.t()
        target = (data.target @ data.weight.t())[data.rows]
        for kind in KINDS:
            exact = draft.double().requires_grad_()
            loss = reference_objective(
                exact.cpu(), target.double().cpu(), kind, valid=valid.cpu(), labels=data.labels.cpu()
            )
            (expected,) = torch.autograd.grad(loss, exact)
            leaf = draft.detach().requires_grad_()
            out = vocab_parallel_objective(leaf, target, kind, labels=data.labels, backend="triton")
            (grad,) = torch.autograd.grad(out.loss, leaf)
            (plain,) = torch.autograd.grad(_dense(leaf, target, kind, data.labels), leaf)
            error, allowed = _distance(grad, expected), 2 * _distance(plain, expected)
            if not abs(float(out.loss.detach()) - float(loss)) <= 1e-5 * max(1.0, abs(float(loss))):
                wrong.append(f"{kind}, v={v:,}: the loss is {float(out.loss.detach())}, by definition {float(loss)}")
            if not error <= allowed:
                wrong.append(f"{kind}, v={v:,}: the gradient is off by {error:.3g} of its size, allowed {allowed:.3g}")
    return wrong


def failed_cases(device: str) -> list[str]:
    """Cases of the test table that do not hold on the device."""
    from bebop_megatron.losses import kernels
    from tests.losses import kernel_cases

    failed, block = [], kernels._BLOCK
    kernel_cases.prepare(device)
    for name, case in kernel_cases.CASES.items():
        try:
            case(device)
        except (AssertionError, RuntimeError, ValueError) as error:
            failed.append(f"{name}: {error}")
    kernels._BLOCK = block
    return failed


def run_objective(data: Data, kind: str) -> None:
    """Forward and backward pass of the fused objective."""
    draft = data.draft.detach().requires_grad_()
    out = fused_linear_objective(
        draft, data.target, data.weight, target_rows=data.rows, kind=kind, labels=data.labels, backend="triton"
    )
    out.loss.backward()


def run_products(data: Data, kind: str) -> None:
    """The products that no implementation can leave out, in the same chunks: logits of both sides, hidden gradient."""
    draft, weight = data.draft.flatten(0, 1), data.weight
    grad = torch.empty_like(draft)
    valid = torch.ones_like(data.rows, dtype=torch.bool)
    plan = make_plan(data.rows, valid, chunked._row_limit(weight, Options(kind, backend="triton")))
    for chunk in plan.chunks:
        _ = data.target[plan.needed[chunk.targets]] @ weight.t()
        for part in chunk.drafts:
            entries = plan.order[part]
            grad[entries] = draft[entries] @ weight.t() @ weight


def keep_all_logits(data: Data) -> list[Tensor]:
    """What an implementation holds that computes every depth's logits before it looks at them."""
    return [hidden @ data.weight.t() for hidden in data.draft]


def milliseconds(work: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Times of each, in turns, by the device's clock."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for turn in range(repeats + 2):
        for name, do in work.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            do()
            end.record()
            end.synchronize()
            # the first two turns compile and warm up
            if turn >= 2:
                times[name].append(begin.elapsed_time(end))
    return times


def spread(times: list[float]) -> dict[str, float]:
    ordered = sorted(times)
    last = len(ordered) - 1
    return {
        "median": round(statistics.median(ordered), 4),
        "p20": round(ordered[round(0.2 * last)], 4),
        "p80": round(ordered[round(0.8 * last)], 4),
    }


def peak_bytes(do: Callable[[], Any]) -> int:
    """Most memory held above what was held before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    do()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def kernel_bandwidth(size: Size, device: str, repeats: int) -> dict[str, dict[str, float]]:
    """GB/s of each kernel over one chunk, counting every logit read or written once (the target's rows: per chunk)."""
    from bebop_megatron.losses import kernels

    targets = 256
    draft = torch.randn(targets * size.k, size.v, device=device, dtype=torch.bfloat16)
    target = torch.randn(targets, size.v, device=device, dtype=torch.bfloat16)
    rows = torch.arange(targets, device=device).repeat_interleave(size.k)
    p = kernels.local_rows(target)
    q = kernels.local_rows(draft, target=p, rows=rows)
    sums = kernels.overlap(q, p, rows, None, None)
    one = {"tv": torch.ones_like(q.top)}
    work = {
        "normalise target": lambda: kernels.local_rows(target),
        "normalise draft": lambda: kernels.local_rows(draft, target=p, rows=rows),
        "overlap": lambda: kernels.overlap(q, p, rows, None, None),
        "direction": lambda: kernels.direction(q, p, rows, None, None, one, sums.covered, sums.rejected, None, None),
    }
    own, other = draft.nbytes, target.nbytes
    moved = dict(zip(work, (other, own + other, own + other, 2 * own + other), strict=True))
    return {
        name: {"gb_per_s": round(moved[name] / statistics.median(times) / 1e6, 1), **spread(times)}
        for name, times in milliseconds(work, repeats).items()
    }


def measure(size: Size, device: str, repeats: int) -> dict[str, Any]:
    """Time and memory of every objective."""
    data = Data.random(size, device)
    kept = peak_bytes(lambda: keep_all_logits(data))
    kinds = {}
    for kind in KINDS:
        work = {
            "products": lambda kind=kind: run_products(data, kind),
            "objective": lambda kind=kind: run_objective(data, kind),
        }
        times = milliseconds(work, repeats)
        ratio = statistics.median(times["objective"]) / statistics.median(times["products"])
        peak = peak_bytes(lambda kind=kind: run_objective(data, kind))
        kinds[kind] = {
            "products_ms": spread(times["products"]),
            "objective_ms": spread(times["objective"]),
            "time_ratio": round(ratio, 4),
            "time_goal_met": ratio <= TIME_GOAL,
            "peak_bytes": peak,
            "memory_ratio": round(peak / kept, 4),
            "memory_goal_met": peak <= MEMORY_GOAL * kept,
        }
    return {
        "all_logits_bytes": kept,
        "objectives": kinds,
        "kernels": kernel_bandwidth(size, device, repeats),
    }


def about(device: str) -> dict[str, Any]:
    import triton

    properties = torch.cuda.get_device_properties(device)
    return {
        "device": properties.name,
        "compute_capability": f"{properties.major}.{properties.minor}",
        "device_memory_bytes": properties.total_memory,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in (("n", 8192), ("h", 4096), ("v", 151_936), ("k", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="data file (default: benchmarks/data/gpu-DEVICE-DATE.json)")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and there is none here: nothing was checked and nothing measured.")
        return 2
    device = "cuda"
    wrong = failed_cases(device) + wrong_at_full_vocabulary(device)
    if wrong:
        print("The Triton path is wrong on this device; nothing was measured:", *wrong, sep="\n  ")
        return 1
    size = Size(asked.n, asked.h, asked.v, asked.k)
    record = {**about(device), "dtype": "bfloat16", **vars(size), "repeats": asked.repeats}
    record |= measure(size, device, asked.repeats)
    name = f"gpu-{record['device'].lower().replace(' ', '-')}-{record['date']}.json"
    out = asked.out or Path(__file__).parent / "data" / name
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(record, indent=2) + "\n")
    for kind, result in record["objectives"].items():
        print(
            f"{kind}: {result['time_ratio']:.2f} x the products (goal {TIME_GOAL}), "
            f"{result['memory_ratio']:.3f} of all logits (goal {MEMORY_GOAL})"
        )
    print(f"{out}: {record['device']}, torch {record['torch']}, triton {record['triton']}, {record['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
