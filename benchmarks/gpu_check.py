"""Does the Triton path hold on a GPU, and what does each objective and each kernel cost there?

    python -m benchmarks.gpu_check

First correctness: every case of `tests/losses/kernel_cases.py` on the device, and vocabularies of real size against the
float64 definition. Only if all of that holds is anything measured: of every objective the time against the bare matrix
products (goal: at most 1.2 times) and the peak memory against all depths' logits (goal: at most a tenth), and each
kernel's bandwidth. The result goes to benchmarks/data/ with the device, the versions and the date. What other ways to
compute `tv` cost is measured by `python -m benchmarks.loss`.

This script has not been run on a GPU yet: the kernels have been run in Triton's interpreter and compiled for sm_90
only, so both goals are open and no GPU number is claimed.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import Tensor

from bebop_megatron.evaluation.environment import environment
from bebop_megatron.losses import OBJECTIVES, fused_linear_objective, vocab_parallel_objective
from bebop_megatron.losses.reference import reference_objective
from bebop_megatron.outputs import write_json
from benchmarks.loss.cases import Case, Problem, gpu_suite, make_problem
from benchmarks.loss.contenders import FLOOR, BareProducts
from benchmarks.loss.measure import fastest_rows, peak_of, seconds
from benchmarks.loss.results import Ratio
from tests.losses.problem import dense, distance

TIME_GOAL = 1.2
MEMORY_GOAL = 0.1


def labels_of(problem: Problem, v: int) -> Tensor:
    """Random labels for `ce`: [k, n]."""
    return torch.randint(v, problem.target_rows.shape, device=problem.draft.device)


def wrong_at_full_vocabulary(device: str, vocabularies: tuple[int, ...] = (151_936, 50_257)) -> list[str]:
    """What differs from the float64 definition by more than twice what the same type costs a dense computation."""
    wrong = []
    for v in vocabularies:
        problem = make_problem(Case(k=2, n=8, h=64, v=v, dtype="bfloat16", device=device))
        labels = labels_of(problem, v)
        draft = problem.draft @ problem.weight.t()
        target = (problem.target @ problem.weight.t())[problem.target_rows]
        for kind in OBJECTIVES:
            exact = draft.cpu().double().requires_grad_()
            valid = torch.ones(labels.shape, dtype=torch.bool)
            loss = reference_objective(exact, target.cpu().double(), kind, valid=valid, labels=labels.cpu())
            (expected,) = torch.autograd.grad(loss, exact)
            leaf = draft.detach().requires_grad_()
            out = vocab_parallel_objective(leaf, target, kind, labels=labels, backend="triton")
            (grad,) = torch.autograd.grad(out.loss, leaf)
            (plain,) = torch.autograd.grad(dense(leaf, target, kind, labels), leaf)
            error, allowed = distance(grad.cpu(), expected), 2 * distance(plain.cpu(), expected)
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


def in_turns(work: dict[str, Callable[[], Any]], device: torch.device, repeats: int) -> dict[str, list[float]]:
    """Seconds of each, one after the other in every round; the first two rounds compile and warm up."""
    times: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(repeats + 2):
        for name, do in work.items():
            times[name].append(seconds(do, device))
    return {name: found[2:] for name, found in times.items()}


def objective_costs(case: Case, repeats: int) -> dict[str, dict[str, Any]]:
    """Time and memory of every objective, forward and backward."""
    problem = make_problem(case)
    labels, device = labels_of(problem, case.v), problem.draft.device
    floor = BareProducts(problem, fastest_rows(problem))

    def objective(kind: str) -> Tensor:
        draft = problem.draft.detach().requires_grad_()
        out = fused_linear_objective(
            draft,
            problem.target,
            problem.weight,
            target_rows=problem.target_rows,
            kind=kind,
            labels=labels,
            backend="triton",
        )
        return torch.autograd.grad(out.loss, draft)[0]

    all_logits = case.k * case.n * case.v * problem.weight.itemsize
    found = {}
    for kind in OBJECTIVES:
        times = in_turns({FLOOR: floor, "objective": lambda kind=kind: objective(kind)}, device, repeats)
        ratio = Ratio.of([own / other for own, other in zip(times["objective"], times[FLOOR], strict=True)])
        peak = peak_of(lambda kind=kind: objective(kind), device)
        share = None if peak is None else peak / all_logits
        found[kind] = {
            "seconds": times,
            "time_ratio": asdict(ratio),
            "time_goal_met": ratio.middle <= TIME_GOAL,
            "peak_bytes": peak,
            "memory_ratio": share,
            "memory_goal_met": share is not None and share <= MEMORY_GOAL,
        }
    return found


def kernel_bandwidth(case: Case, repeats: int) -> dict[str, dict[str, Any]]:
    """GB/s of each kernel over one chunk, counting every logit read or written once (the target's rows: per chunk)."""
    from bebop_megatron.losses import kernels

    targets, device, dtype = min(256, case.n), torch.device(case.device), getattr(torch, case.dtype)
    draft = torch.randn(targets * case.k, case.v, device=device, dtype=dtype)
    target = torch.randn(targets, case.v, device=device, dtype=dtype)
    rows = torch.arange(targets, device=device).repeat_interleave(case.k)
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
    times = in_turns(work, device, repeats)
    return {name: {"gb_per_s": moved[name] / median(taken) / 1e9, "seconds": taken} for name, taken in times.items()}


def main(arguments: list[str] | None = None) -> int:
    default = gpu_suite().default
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("n", "h", "v", "k"):
        parser.add_argument(f"--{name}", type=int, default=getattr(default, name))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--out", type=Path, help="data file (default: benchmarks/data/gpu-DEVICE-DATE.json)")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("gpu_check needs a CUDA device, and there is none here: nothing was checked and nothing measured.")
        return 2
    wrong = failed_cases("cuda") + wrong_at_full_vocabulary("cuda")
    if wrong:
        print("The Triton path is wrong on this device; nothing was measured:", *wrong, sep="\n  ")
        return 1
    case = replace(default, n=asked.n, h=asked.h, v=asked.v, k=asked.k)
    about = environment() | {"triton": metadata.version("triton")}
    record = {"environment": about, "case": asdict(case), "objectives": objective_costs(case, asked.repeats)}
    record["kernels"] = kernel_bandwidth(case, asked.repeats)
    name = f"gpu-{about['gpu'].lower().replace(' ', '-')}-{about['date']}.json"
    out = asked.out or Path(__file__).parent / "data" / name
    write_json(out, record)
    for kind, result in record["objectives"].items():
        print(
            f"{kind}: {result['time_ratio']['middle']:.2f} x the products (goal {TIME_GOAL}), "
            f"{result['memory_ratio']:.3f} of all logits (goal {MEMORY_GOAL})"
        )
    print(f"{out}: {about['gpu']}, torch {about['torch']}, triton {about['triton']}, {about['date']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
