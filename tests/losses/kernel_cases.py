"""What Triton's kernels must do: a table of cases for a process of its own, in Triton's interpreter or on a GPU.

The interpreter has to be chosen before Triton is imported, and then it holds for the whole process. So `test_kernels`
runs this file once for all cases: `python -m tests.losses.kernel_cases cpu outcomes.json`.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bebop_megatron.losses import backend, fused_linear_objective, rows
from tests.losses.problem import (
    KINDS,
    Hidden,
    Logits,
    assert_near,
    check_second_backward,
    dense,
    distance,
    hidden,
    logits,
    run_head,
    run_logits,
    specify_hidden,
    specify_logits,
)
from tests.losses.test_vocab_parallel import check_hidden, check_logits

PASSED = "passed"
WORLD = 2
# several blocks of columns even of a small vocabulary
BLOCK = {"cpu": 16, "cuda": 32}
# a kind for each row direction: interpreted programs take milliseconds each
SOME = ("ce", "reverse-kl", "tv", "lk-hybrid")


def on(problem: Any, device: str) -> Any:
    return replace(problem, **{f.name: getattr(problem, f.name).to(device) for f in fields(problem)})


@contextmanager
def launches() -> Iterator[list[str]]:
    """Names of the kernels that run; the PyTorch twins must not."""
    from bebop_megatron.losses import kernels

    names: list[str] = []
    launch, twins = kernels._launch, {name: getattr(rows, name) for name in ("local_rows", "overlap", "direction")}

    def counted(kernel: Any, *arguments: Any, **constants: Any) -> None:
        names.append(kernel.__name__)
        launch(kernel, *arguments, **constants)

    def refused(*_: Any, **__: Any) -> Any:
        raise AssertionError("the PyTorch twin ran")

    kernels._launch = counted
    for name in twins:
        setattr(rows, name, refused)
    try:
        yield names
    finally:
        kernels._launch = launch
        for name, twin in twins.items():
            setattr(rows, name, twin)


def near_logits(problem: Logits, kind: str, device: str, tolerance: float = 1e-10, **options: Any) -> Any:
    loss, expected = specify_logits(problem, kind, **options)
    out, grad = run_logits(on(problem, device), kind, backend="triton", **options)
    assert_near(out.loss.detach().cpu(), loss, tolerance, f"{kind} {options}: the loss")
    assert_near(grad.cpu(), expected, tolerance, f"{kind} {options}: the gradient")
    return out, grad.cpu()


def run_fused(problem: Hidden, kind: str, device: str, **options: Any) -> tuple[Any, Tensor, Tensor]:
    out, *grads = run_head(on(problem, device), kind, backend="triton", **{"chunk_tokens": 2, **options})
    to_draft, to_weight = (grad.cpu() for grad in grads)
    return out, to_draft, to_weight


def near_hidden(problem: Hidden, kind: str, device: str, tolerance: float = 1e-10, **options: Any) -> Any:
    loss, to_draft, to_weight = specify_hidden(problem, kind, **options)
    out, *grads = run_fused(problem, kind, device, **options)
    assert_near(out.loss.detach().cpu(), loss, tolerance, f"{kind} {options}: the loss")
    assert_near(grads[0], to_draft, tolerance, f"{kind} {options}: the gradient of the hidden states")
    assert_near(grads[1], to_weight, tolerance, f"{kind} {options}: the gradient of the weight")
    return out


def twin(dtype: torch.dtype, device: str) -> None:
    """Every function gives what its PyTorch twin gives, on views, ties, -inf, repeated and shuffled rows."""
    from bebop_megatron.losses import kernels

    g = torch.Generator().manual_seed(0)
    columns, meets = 37, torch.tensor([2, 0, 0, 3, 1, 4])
    target, draft = (
        (3 * torch.randn(size, 50, generator=g, dtype=torch.float64)).to(dtype)[:, :columns] for size in (5, 6)
    )
    # many largest logits; closed columns, of which the first are all of a block; a rank's share without a finite logit
    draft[0] = draft[0].round().clamp(max=1)
    draft[1, 5:9] = target[1, 5:9] = -torch.inf
    draft[2, :20] = -torch.inf
    draft[3] = target[4] = -torch.inf
    label = torch.tensor([3, 6, -1, 36, 0, 20])
    shares = [torch.rand(size, generator=g, dtype=torch.float64) for size in (6, 5)]
    weights = {name: torch.rand(6, generator=g, dtype=torch.float64) for name in ("ce", "kl", "reverse-kl", "tv")}
    ratio = torch.randn(6, generator=g, dtype=torch.float64)
    wide = torch.promote_types(dtype, torch.float32)
    # of a rank with a share of 0 the logarithm of the ratio is not finite
    shares[0][3], shares[1][4], ratio[3] = 0, 0, -torch.inf

    def everything(module: Any, place: str) -> dict[str, Tensor]:
        def to(t: Tensor) -> Tensor:
            return t.to(place)

        found: dict[str, Tensor] = {}
        p = module.local_rows(to(target), 0.7, reverse=True)
        q = module.local_rows(to(draft), 1.3, target=p, rows=to(meets), label=to(label), reverse=True)
        plain = module.local_rows(to(draft))
        for side, name in ((p, "target"), (q, "draft"), (plain, "alone")):
            for field in ("top", "column", "log_sum", "mean", "cross", "reverse_cross", "label_logit"):
                found[f"{name} {field}"] = getattr(side, field)
        found["probability"] = module.probability_at(p, to(meets), q.column)
        for share in (None, [to(s.to(wide)) for s in shares]):
            q_share, p_share = share or (None, None)
            sums = module.overlap(q, p, to(meets), q_share, p_share)
            found |= {f"{name}, {share is None}": value for name, value in vars(sums).items()}
            for names in (("ce",), ("kl",), ("tv",), ("kl", "tv"), ("reverse-kl",), tuple(weights)):
                blend = {name: to(weights[name].to(wide)) for name in names}
                given = sums.covered, sums.rejected, to(ratio.to(wide)), to(label)
                value = module.direction(q, p, to(meets), q_share, p_share, blend, *given)
                found[f"direction {names}, {share is None}"] = value
        blend = {name: to(weights[name].to(wide)) for name in ("kl", "tv")}
        into = module.direction(q, p, to(meets), None, None, blend, *given, overwrite=True)
        found["direction in place"] = into
        return {name: value.cpu() for name, value in found.items()}

    expected = everything(rows, "cpu")
    # without a finite logit there is no distribution: nothing of a share of 0 but its top counts
    nothing = {"target": torch.arange(5) == 4, "draft": torch.arange(6) == 3, "alone": torch.arange(6) == 3}
    meets_nothing = nothing["target"][meets] | nothing["draft"]
    rough = {torch.float64: 1e-12, torch.float32: 3e-6}.get(wide, 0.0)
    for name, value in everything(kernels, device).items():
        wanted, tolerance = expected[name], rough
        first = name.split()[0]
        if name.startswith("direction"):
            assert value.dtype == dtype, name
            # the last step rounds to the type of the logits
            tolerance = max(tolerance, 1.01 * torch.finfo(dtype).eps)
            wanted = wanted.to(dtype)
        kept = torch.ones(len(value), dtype=torch.bool)
        if "label" in name:
            kept &= label >= 0 if len(value) == 6 else kept
        if first in nothing and "top" not in name:
            kept &= ~nothing[first]
        if name.endswith(("cross", "True")) or name in ("probability", "direction in place"):
            kept &= ~meets_nothing if len(value) == 6 else kept
        where = f"{name}, {dtype}"
        assert value[kept].isnan().sum() == 0, where
        value, wanted = value[kept].double(), wanted[kept].double()
        # -inf in the target: the direction of KL(q||p) is as large as its type can say
        huge = wanted.abs() > 1e9 if dtype != torch.float16 else wanted.isinf() | (wanted.abs() > 6e4)
        assert torch.equal(value.sign()[huge], wanted.sign()[huge]), where
        assert (value.abs()[huge] > 1e4).all(), where
        torch.testing.assert_close(
            value[~huge], wanted[~huge], rtol=tolerance, atol=tolerance, msg=lambda m, where=where: f"{where}: {m}"
        )


def empty(device: str) -> None:
    """A rank that holds padding only, and no row at all."""
    from bebop_megatron.losses import kernels

    for n, columns in ((4, 0), (0, 9), (0, 0)):
        each = torch.arange(n, device=device)
        results = []
        for module in (rows, kernels):
            zeros = torch.zeros(n, columns, device=device)
            p = module.local_rows(zeros, reverse=True)
            q = module.local_rows(zeros, target=p, rows=each, label=each * 0 - 1, reverse=True)
            sums = module.overlap(q, p, each, None, None)
            to = module.direction(q, p, each, None, None, {"kl": q.top}, sums.covered, sums.rejected, None, None)
            names = ("top", "column", "log_sum", "mean", "cross", "reverse_cross", "label_logit")
            results.append([*(getattr(q, name) for name in names), *vars(sums).values(), to])
        for value, wanted in zip(*results, strict=True):
            assert torch.equal(value, wanted)
            assert value.dtype == wanted.dtype


def every_kind(device: str) -> None:
    """Kernels know no depths and horizons: the kinds take turns with them."""
    for number, kind in enumerate(KINDS):
        horizon = ("full", "partial")[number % 2]
        near_logits(logits(1 + number, 2, 19, seed=number), kind, device, horizon=horizon)
        near_hidden(hidden(7 - number, 2, 19, seed=number), kind, device, horizon=horizon)


def every_type(kind: str, device: str) -> None:
    """Nothing is rounded before the last step."""
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        problem = logits(2, 4, 40, holes=False).to(dtype)
        loss, expected = specify_logits(problem, kind)
        out, grad = run_logits(on(problem, device), kind, backend="triton")
        assert out.loss.dtype == out.alpha.dtype == torch.float32
        assert grad.dtype == dtype
        assert_near(out.loss.detach().cpu(), loss, 2e-6, f"{kind}, {dtype}: the loss")
        draft = problem.draft.clone().requires_grad_()
        (plain,) = torch.autograd.grad(dense(draft, problem.target, kind, problem.labels), draft)
        error, allowed = distance(grad.cpu(), expected), distance(plain, expected)
        assert error <= max(2 * allowed, 1e-6), f"{kind}, {dtype}: error {error}, of a dense computation {allowed}"
        assert error <= max(2 * torch.finfo(dtype).eps, 2e-6), f"{kind}, {dtype}: {error}"


def half_precision_of_hidden_states(device: str) -> None:
    for kind in KINDS:
        for dtype in (torch.bfloat16, torch.float16) if kind in SOME else (torch.bfloat16,):
            problem = hidden(2, 3, 40, 8, holes=False).to(dtype)
            _, to_draft, to_weight = specify_hidden(problem, kind)
            _, draft_grad, weight_grad = run_fused(problem, kind, device)
            draft, weight = problem.draft.clone().requires_grad_(), problem.weight.clone().requires_grad_()
            target = (problem.target @ problem.weight.t())[problem.rows]
            plain = torch.autograd.grad(dense(draft @ weight.t(), target, kind, problem.labels), (draft, weight))
            for own, other, expected in zip((draft_grad, weight_grad), plain, (to_draft, to_weight), strict=True):
                error, allowed = distance(own, expected), distance(other, expected)
                assert error <= 2 * allowed, f"{kind}, {dtype}: error {error}, of a dense computation {allowed}"


def small_weights_of_rows(device: str) -> None:
    """A mean over many rows must not underflow in a direction of half precision."""
    problem = hidden(2, 3, 19, holes=False).to(torch.float16)
    _, to_draft, to_weight = specify_hidden(problem, "kl")
    small = {"row_scale": torch.full((2,), 2.0**-22, device=device), "reduction": "sum"}
    options = on(problem, device)
    draft = options.draft.float().requires_grad_(), options.weight.clone().requires_grad_()
    out = fused_linear_objective(
        draft[0],
        options.target,
        draft[1],
        target_rows=options.rows,
        kind="kl",
        weight_requires_grad=True,
        backend="triton",
        **small,
    )
    grads = torch.autograd.grad(out.loss * 2.0**22 / 3, draft)
    assert distance(grads[0].cpu(), to_draft) < 2e-3
    assert distance(grads[1].cpu(), to_weight) < 2e-3


def wild_values(device: str) -> None:
    """Ties, 10,000 nats apart, closed columns, no overlap at all."""
    g = torch.Generator().manual_seed(0)
    for kind in SOME:
        near = logits(2, 2, 19, holes=False)
        near_logits(replace(near, draft=near.draft.round(), target=near.target.round()), kind, device)
        far = torch.randint(-1, 2, (2, 2, 3, 19), generator=g) * 1e4
        for dtype, tolerance in ((torch.float64, 1e-10), (torch.float16, 1e-3)):
            problem = replace(logits(2, 3, 19, holes=False), draft=far[0], target=far[1]).to(dtype)
            near_logits(problem, kind, device, tolerance)
        closed = torch.arange(19) % 3 == 1
        sides = {side: getattr(near, side).masked_fill(closed, -torch.inf) for side in ("draft", "target")}
        both = replace(near, **sides, labels=near.labels // 3 * 3)
        near_logits(both, kind, device)
        near_logits(both.to(torch.float32), kind, device, 3e-6)
        if kind not in ("kl", "lk-hybrid"):
            near_logits(replace(both, target=near.target), kind, device)
        if kind != "reverse-kl":
            near_logits(replace(both, draft=near.draft), kind, device)
        apart = torch.where(torch.arange(19) < 9, -1e3, 0)
        out, _ = near_logits(replace(near, draft=near.draft + apart, target=near.target - 1e3 - apart), kind, device)
        assert (out.alpha == 0).all()


def equal_distributions(device: str) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for kind in SOME[1:]:
            problem = logits(2, 2, 19, holes=False).to(dtype)
            out, grad = run_logits(on(replace(problem, draft=problem.target.clone()), device), kind, backend="triton")
            assert (out.alpha - 1).abs().max() < 1e-6, kind
            assert grad.abs().max() < 1e-6, kind


def options_and_filters(device: str) -> None:
    for kind in SOME:
        problem, states = logits(2, 2, 19, holes=False), hidden(2, 2, 19, holes=False)
        variants: tuple[dict[str, Any], ...] = (
            {"draft_temperature": 1.3, "target_temperature": 0.8, "logit_scale": 0.3, "reduction": "sum"},
            {"mix": ("lk-hybrid", 0.4)},
            {"mix": ("ce", 0.4)},
            {"target_top_k": 4, "target_top_p": 0.8},
        )
        for options in variants:
            if kind == "reverse-kl" and "target_top_k" in options:
                continue
            near_logits(problem, kind, device, **options)
            if kind in ("reverse-kl", "tv"):
                near_hidden(states, kind, device, **options)
    near_logits(logits(2, 2, 19).to(torch.bfloat16), "tv", device, 2e-2, target_top_k=4)


def padding_and_what_is_not_valid(device: str) -> None:
    """Columns and rows that do not count may hold anything."""
    for kind in SOME:
        narrow = logits(2, 2, 19)
        drop = ~narrow.valid[..., None]
        expected, expected_grad = run_logits(on(narrow, device), kind, backend="triton")
        for poison in (torch.nan, torch.inf, -torch.inf):
            wide = torch.full((2, 2, 24), poison, dtype=torch.float64)
            sides = {side: wide.clone() for side in ("draft", "target")}
            for side, table in sides.items():
                table[..., :19] = getattr(narrow, side).masked_fill(drop, poison)
            problem = replace(narrow, **sides, labels=torch.where(narrow.valid, narrow.labels, -100))
            out, grad = run_logits(on(problem, device), kind, backend="triton", vocab_size=19)
            assert torch.equal(out.loss, expected.loss), f"{kind}, {poison}"
            assert torch.equal(grad[..., :19], expected_grad), f"{kind}, {poison}"
            assert (grad[..., 19:] == 0).all(), f"{kind}, {poison}"
        nothing = replace(narrow, valid=torch.zeros_like(narrow.valid), draft=narrow.draft * torch.nan)
        out, grad = run_logits(on(nothing, device), kind, backend="triton")
        assert out.loss == 0
        assert (grad == 0).all()
        states = hidden(2, 2, 19)
        nothing = replace(states, valid=torch.zeros_like(states.valid), draft=states.draft * torch.nan)
        out, *grads = run_fused(nothing, kind, device)
        assert out.loss == 0
        assert all((grad == 0).all() for grad in grads)


def a_nan_is_not_hidden(device: str) -> None:
    for kind in SOME:
        for poisoned in (slice(7, 8), slice(None)):
            problem = logits(2, 2, 19, holes=False)
            problem.draft[0, 0, poisoned] = torch.nan
            out, grad = run_logits(on(problem, device), kind, backend="triton")
            assert out.loss.isnan(), kind
            assert grad[0, 0].isnan().any(), kind


def layouts(device: str) -> None:
    for kind in SOME:
        problem = logits(2, 2, 19)
        expected, expected_grad = run_logits(on(problem, device), kind, backend="triton")
        for order in ((2, 1, 0), (1, 0, 2)):
            back = [order.index(i) for i in range(3)]
            sides = {
                side: getattr(problem, side).permute(order).contiguous().permute(back) for side in ("draft", "target")
            }
            out, grad = run_logits(on(replace(problem, **sides), device), kind, backend="triton")
            torch.testing.assert_close(out.loss, expected.loss, rtol=1e-14, atol=0)
            torch.testing.assert_close(grad, expected_grad, rtol=1e-12, atol=1e-16)
    near_logits(replace(problem, target=problem.target[:1].expand(2, -1, -1)), "tv", device)


def nothing_is_written_to(device: str) -> None:
    for kind in SOME:
        check_second_backward(on(logits(2, 2, 19), device), kind, backend="triton")


def buffers_are_written_before_they_are_read(device: str) -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.empty(3).isnan().all()
        for kind in SOME:
            near_logits(logits(2, 2, 19), kind, device)
            if device == "cpu":
                near_hidden(hidden(2, 2, 19), kind, device)
        empty(device)
    finally:
        torch.use_deterministic_algorithms(False)


def it_is_taken(device: str) -> None:
    """Asked for, every pass over the logits is a kernel; not asked for on a CPU, none is."""
    problem, states = on(logits(2, 2, 19), device), hidden(2, 2, 19)
    passes = ["_normalise_rows", "_normalise_rows", "_overlap_of_rows"]
    again = ["_normalise_rows", "_normalise_rows", "_direction_of_rows"]
    with launches() as names:
        run_logits(problem, "tv", backend="triton")
    assert names == passes + again, names
    with launches() as names:
        run_fused(states, "tv", device, chunk_tokens=100)
    assert names == [*passes, "_direction_of_rows", *again], names
    if device == "cpu":
        assert backend.resolve("auto", torch.device("cpu")) is rows
    else:
        with launches() as names:
            run_logits(problem, "tv")
        assert names == passes + again, names


def logits_are_neither_copied_nor_converted(device: str) -> None:
    from bebop_megatron.losses import kernels

    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        table = torch.randn(3, 40, device=device).to(dtype)[:, :37]
        before = table.clone()
        side = kernels.local_rows(table, overwrite=True)
        assert side.values.data_ptr() == table.data_ptr()
        assert torch.equal(side.values, before)
        assert side.top.dtype == torch.float32
        each = torch.arange(3, device=device)
        one = {"ce": torch.ones(3, device=device)}
        result = kernels.direction(side, None, each, None, None, one, side.top, side.top, None, each, overwrite=True)
        assert result.data_ptr() == table.data_ptr()
        assert not torch.equal(table, before)


CASES: dict[str, Callable[[str], None]] = {
    **{
        f"twin-{str(dtype).removeprefix('torch.')}": lambda device, dtype=dtype: twin(dtype, device)
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    },
    "every-kind": every_kind,
    **{f"types-{kind}": lambda device, kind=kind: every_type(kind, device) for kind in SOME},
    "empty": empty,
    "half-precision-of-hidden-states": half_precision_of_hidden_states,
    "small-weights-of-rows": small_weights_of_rows,
    "wild-values": wild_values,
    "equal-distributions": equal_distributions,
    "options-and-filters": options_and_filters,
    "padding-and-what-is-not-valid": padding_and_what_is_not_valid,
    "a-nan-is-not-hidden": a_nan_is_not_hidden,
    "layouts": layouts,
    "nothing-is-written-to": nothing_is_written_to,
    "buffers-are-written-before-they-are-read": buffers_are_written_before_they_are_read,
    "it-is-taken": it_is_taken,
    "logits-are-neither-copied-nor-converted": logits_are_neither_copied_nor_converted,
}


def sharded(group: Any) -> None:
    """Two ranks; the second holds one column less, or padding only. Ties across ranks."""
    for kind in SOME:
        for v in (17, 9):
            check_logits(logits(2, 2, v), kind, group, columns=9, backend="triton")
            check_hidden(hidden(2, 2, v), kind, group, columns=9, backend="triton")
    coarse = logits(2, 3, 17, holes=False)
    coarse = replace(coarse, draft=coarse.draft.sign(), target=coarse.target.sign())
    check_logits(coarse, "kl", group, columns=9, backend="triton")
    check_logits(logits(2, 2, 17), "kl", group, columns=9, backend="triton", target_top_k=3)


def rank(number: int, folder: str) -> None:
    """One of the processes that share the vocabulary."""
    prepare("cpu")
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=number, world_size=WORLD, timeout=timedelta(seconds=60)
    )
    sharded(dist.new_group(list(range(WORLD))))
    dist.destroy_process_group()


def prepare(device: str) -> None:
    from bebop_megatron.losses import kernels

    kernels._BLOCK = BLOCK[device]
    if device == "cpu":
        torch.set_num_threads(1)
        _do_not_patch_again()


def _do_not_patch_again() -> None:
    """The interpreter looks through its whole language at each call of a helper: four milliseconds, for nothing."""
    from triton.runtime.interpreter import InterpretedFunction

    patching, seen = InterpretedFunction.__call__, set()

    def call(self: Any, *arguments: Any, **keywords: Any) -> Any:
        module = id(self.fn.__globals__)
        if module in seen:
            return self.rewrite()(*arguments, **keywords)
        seen.add(module)
        return patching(self, *arguments, **keywords)

    InterpretedFunction.__call__ = call


def main(device: str, file: str, *only: str) -> None:
    prepare(device)
    outcomes = {}
    for name in only or CASES:
        begin = time.process_time()
        try:
            CASES[name](device)
            outcomes[name] = PASSED
        except AssertionError:
            outcomes[name] = traceback.format_exc()
        said = "passed" if outcomes[name] == PASSED else outcomes[name]
        print(f"{name}: {time.process_time() - begin:.1f} s of a processor: {said}", flush=True)
        Path(file).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
