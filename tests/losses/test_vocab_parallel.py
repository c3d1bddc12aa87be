"""Three processes that share the vocabulary compute what one process computes.

Catches: a vocabulary that three ranks do not divide, a rank that holds padding only, ties for the largest logit across
ranks, ranks that cut different chunks and wait for each other, a hidden gradient of one's own columns only, world
ranks taken for group ranks, a collective too many, and a gather of the vocabulary.
"""

from __future__ import annotations

import json
import traceback
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from bebop_megatron.losses import budget, chunked, fused_linear_objective, vocab_parallel_objective
from bebop_megatron.losses.options import Options
from bebop_megatron.losses.plan import make_plan
from tests.losses.collectives import counting
from tests.losses.communication import check_bytes
from tests.losses.problem import KINDS, Hidden, Logits, hidden, logits, run_hidden, run_logits

pytestmark = pytest.mark.dist

WORLD = 3
PASSED = "passed"
OPTIONS: list[dict[str, Any]] = [
    {},
    {"horizon": "partial", "reduction": "sum"},
    {"draft_temperature": 0.7, "target_temperature": 1.3, "logit_scale": 0.5},
    {"mix": ("lk-hybrid", 0.4)},
    {"mix": ("ce", 0.4)},
]
FILTERS: list[dict[str, Any]] = [
    {"target_top_k": 2},
    {"target_top_k": 8},
    {"target_top_p": 0.7},
    {"target_top_k": 9, "target_top_p": 0.5, "target_temperature": 0.7},
]
# true columns over three ranks: 6 + 6 + 5, 6 + 5 + 0, 6 + 0 + 0
VOCABULARIES = (17, 11, 6)


def cut(table: Tensor, group: Any, dim: int, columns: int = 6) -> Tensor:
    """This rank's columns of a vocabulary that is padded with NaN to equal shares."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    missing = list(table.shape)
    missing[dim] = columns * world - table.shape[dim]
    padded = torch.cat([table, table.new_full(missing, torch.nan)], dim)
    return padded.narrow(dim, rank * columns, columns).clone()


def own(table: Tensor, group: Any, dim: int, columns: int = 6) -> Tensor:
    """What an unsharded gradient is on this rank: 0 in the padding."""
    return cut(table, group, dim, columns).nan_to_num(0)


def near(result: Tensor, expected: Tensor, what: str, tolerance: float = 1e-12) -> None:
    torch.testing.assert_close(
        result, expected, rtol=tolerance, atol=tolerance, msg=lambda m: f"{what}: {m}", check_device=False
    )


def same_stats(stats: Any, expected: Any, what: str) -> None:
    for name, value in vars(stats).items():
        near(value, getattr(expected, name), f"{what}: {name}")


def check_logits(problem: Logits, kind: str, group: Any, columns: int = 6, **options: Any) -> None:
    v = problem.draft.shape[-1]
    expected, gradient = run_logits(problem, kind, **options)
    shard = replace(
        problem,
        draft=cut(problem.draft, group, -1, columns),
        target=cut(problem.target, group, -1, columns),
    )
    out, grad = run_logits(shard, kind, group=group, vocab_size=v, **options)
    what = f"{kind}, v={v}, {options}"
    near(out.loss, expected.loss, what)
    near(grad, own(gradient, group, -1, columns), f"{what}: gradient")
    same_stats(out.stats, expected.stats, what)
    assert torch.equal(out.num_valid, expected.num_valid)


def check_hidden(problem: Hidden, kind: str, group: Any, columns: int = 6, **options: Any) -> None:
    v = problem.weight.shape[0]
    options = {"chunk_tokens": 4} | options
    results = []
    for share, weight in ((None, problem.weight.clone()), (group, cut(problem.weight, group, 0, columns))):
        draft = problem.draft.clone().requires_grad_()
        out = fused_linear_objective(
            draft,
            problem.target,
            weight.requires_grad_(),
            target_rows=problem.rows,
            kind=kind,
            weight_requires_grad=True,
            valid=problem.valid,
            labels=problem.labels,
            group=share,
            vocab_size=v,
            **options,
        )
        results.append((out, *torch.autograd.grad(out.loss, (draft, weight))))
    (expected, to_draft, to_weight), (out, draft_grad, weight_grad) = results
    what = f"{kind}, v={v}, {options}"
    near(out.loss, expected.loss, what)
    near(draft_grad, to_draft, f"{what}: gradient of the hidden states")
    near(weight_grad, own(to_weight, group, 0, columns), f"{what}: gradient of the weight")
    same_stats(out.stats, expected.stats, what)


def check_sequence_parallel(group: Any) -> None:
    """Each rank gives its own rows and gets their gradient, and no other rank's."""
    for kind in KINDS:
        problem = hidden(3, 2 * WORLD, 17)
        _, expected = run_hidden(problem, kind)
        rank = dist.get_rank(group)
        mine = slice(2 * rank, 2 * rank + 2)
        shard = replace(problem, draft=problem.draft[:, mine], weight=cut(problem.weight, group, 0))
        with counting(group) as calls:
            _, grad = run_hidden(shard, kind, group=group, vocab_size=17, sequence_parallel=True)
        near(grad, expected[:, mine], f"{kind}: gradient of the rank's rows")
        names = [name for name, _ in calls if name != "all_reduce"]
        assert names == ["all_gather_into_tensor", "reduce_scatter_tensor"], calls


def check_row_labels(group: Any) -> None:
    """The language-model loss of target rows, padding columns included, whichever rank holds the label."""
    padded = hidden(2, 7, 6 * WORLD)
    labels = torch.tensor([0, 16, -1, 5, 6, 11, 12])
    options = {"row_labels": labels, "vocab_size": 17, "logit_scale": 0.5, "chunk_tokens": 2}
    expected = run_hidden(padded, "tv", **options)[0].row_nll
    logits = 0.5 * padded.target[:7] @ padded.weight.t()
    near(expected, torch.where(labels < 0, 0, -logits.log_softmax(-1)[range(7), labels]).float(), "one rank", 1e-6)
    shard = replace(padded, weight=cut(padded.weight, group, 0))
    near(run_hidden(shard, "tv", group=group, **options)[0].row_nll, expected, "sharded", 1e-6)


def check_kind(kind: str, group: Any) -> None:
    for v in VOCABULARIES:
        for options in OPTIONS if v == 17 else OPTIONS[:2]:
            check_logits(logits(3, 6, v), kind, group, **options)
            check_hidden(hidden(3, 7, v), kind, group, **options)


def check_filters(kind: str, group: Any) -> None:
    for v in VOCABULARIES:
        for options in FILTERS if v == 17 else FILTERS[1::2]:
            check_logits(logits(2, 6, v), kind, group, **options)
            # top-p takes forty collectives a chunk
            check_hidden(hidden(2, 7, v), kind, group, chunk_tokens=7, **options)


def check_nothing(group: Any) -> None:
    """No valid row, no row at all, and values that must not matter, on every rank."""
    for kind in ("ce", "reverse-kl", "tv", "lk-hybrid"):
        for v in VOCABULARIES:
            for n in (0, 5):
                nothing = torch.zeros(2, n, dtype=torch.bool)
                problem = replace(logits(2, n, v), valid=nothing)
                poisoned = replace(problem, draft=problem.draft * torch.nan, target=problem.target * torch.nan)
                check_logits(poisoned, kind, group)
                problem = replace(hidden(2, n, v), valid=nothing)
                poisoned = replace(problem, draft=problem.draft * torch.nan, target=problem.target * torch.nan)
                check_hidden(poisoned, kind, group)


def check_ties(group: Any) -> None:
    """The argmax is the smallest id among the largest, as torch.argmax has it, whatever rank holds it."""
    g = torch.Generator().manual_seed(0)
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        for v in VOCABULARIES:
            sides = torch.randint(0, 3, (2, 2, 60, v), generator=g).to(dtype)
            labels = torch.randint(0, v, (2, 60), generator=g)
            out = vocab_parallel_objective(
                cut(sides[0], group, -1), cut(sides[1], group, -1), labels=labels, group=group, vocab_size=v
            )
            drafted = sides[0].argmax(-1)
            assert ((sides[0] == sides[0].amax(-1, keepdim=True)).sum(-1) > 1).any(), "no tie"
            assert torch.equal(out.stats.greedy_target, drafted == sides[1].argmax(-1)), dtype
            assert torch.equal(out.stats.greedy_label, drafted == labels), dtype
            p = sides[1].double().softmax(-1).gather(-1, drafted[..., None])[..., 0]
            near(out.stats.p_argmax_q.double(), p, f"{dtype}: p(argmax q)", 1e-6)


def check_automatic_chunks(group: Any) -> None:
    """Ranks hold different numbers of true columns and still cut the same chunks."""
    before = budget.CHUNK_BYTES["cpu"]
    budget.CHUNK_BYTES["cpu"] = 1500
    try:
        for v in VOCABULARIES:
            problem = hidden(2, 40, v)
            options = Options("tv")
            assert chunked._row_limit(problem.weight[:6], options) not in (
                chunked._row_limit(problem.weight[:5], options),
                40,
            )
            check_hidden(problem, "tv", group, chunk_tokens=None)
    finally:
        budget.CHUNK_BYTES["cpu"] = before


def check_half_precision(group: Any) -> None:
    """The hidden gradient is a sum of three rounded parts: still as near as half precision is, equal on all ranks."""
    for kind in KINDS:
        problem = hidden(2, 12, 17, holes=False)
        _, expected = run_hidden(problem, kind)
        for dtype, allowed in ((torch.bfloat16, 0.05), (torch.float16, 0.006), (torch.float32, 1e-5)):
            shard = replace(problem.to(dtype), weight=cut(problem.to(dtype).weight, group, 0))
            out, grad = run_hidden(shard, kind, group=group, vocab_size=17)
            assert out.loss.dtype == torch.float32
            error = (grad.double() - expected).norm() / expected.norm()
            assert error < allowed, f"{kind}, {dtype}: {error}"
            parts = [torch.empty_like(grad) for _ in range(WORLD)]
            dist.all_gather(parts, grad, group=group)
            assert all(torch.equal(part, grad) for part in parts), f"{kind}, {dtype}: ranks differ"


def check_collectives_of_logits(group: Any) -> None:
    for kind in KINDS:
        for labelled in (True, False):
            problem = logits(2, 5, 17)
            draft = cut(problem.draft, group, -1).requires_grad_()
            target = None if kind == "ce" and labelled else cut(problem.target, group, -1)
            labels = problem.labels if kind == "ce" or labelled else None
            with counting(group) as calls:
                out = vocab_parallel_objective(draft, target, kind, labels=labels, group=group, vocab_size=17)
                assert [name for name, _ in calls] == ["all_reduce"] * 3, f"{kind}, forward: {calls}"
                out.loss.backward()
            assert [name for name, _ in calls] == ["all_reduce"] * 5, f"{kind}, backward: {calls}"
            # three sums for both sides, nine statistics
            assert max(size for _, size in calls) <= 9 * 10, calls


def check_collectives_of_hidden(group: Any) -> None:
    for kind in KINDS:
        problem = hidden(2, 7, 17)
        weight = cut(problem.weight, group, 0)
        for with_gradient in (True, False):
            draft = problem.draft.clone().requires_grad_(with_gradient)
            with counting(group) as calls:
                out = fused_linear_objective(
                    draft,
                    problem.target,
                    weight,
                    target_rows=problem.rows,
                    kind=kind,
                    chunk_tokens=3,
                    labels=problem.labels,
                    group=group,
                    vocab_size=17,
                )
                if with_gradient:
                    out.loss.backward()
            sizes = [size for _, size in calls]
            assert {name for name, _ in calls} == {"all_reduce"}, f"{kind}: {calls}"
            plan = make_plan(problem.rows, torch.ones(2, 7, dtype=torch.bool), 6)
            assert sum(len(chunk.drafts) for chunk in plan.chunks) > 1
            # three a chunk, and once the gradient
            statistics = 3 * sum(len(chunk.drafts) for chunk in plan.chunks)
            assert len(calls) == statistics + with_gradient, f"{kind}: {calls}"
            assert max(sizes[:statistics]) <= 9 * 9, calls
            assert not with_gradient or sizes[-1] == draft.numel()


def check_filters_gather_only_what_they_keep(group: Any) -> None:
    problem = logits(2, 5, 17)
    sides = cut(problem.draft, group, -1), cut(problem.target, group, -1)
    with counting(group) as calls:
        vocab_parallel_objective(*sides, "kl", group=group, vocab_size=17, target_top_k=2)
    assert [call for call in calls if call[0] != "all_reduce"] == [("all_gather", 2 * 5 * 2)]
    assert len(calls) == 4


def check_subgroup(group: Any) -> None:
    """A tensor-parallel group starts anywhere in the world."""
    pair = dist.new_group([1, 2])
    if dist.get_rank() == 0:
        return
    for kind in KINDS:
        for v in (17, 9):
            check_logits(logits(2, 5, v), kind, pair, columns=9)
            check_hidden(hidden(2, 5, v), kind, pair, columns=9)


def check_too_few_columns(group: Any) -> None:
    problem = logits(2, 3, 6)
    with pytest.raises(ValueError, match=r"6 columns on rank \d of 3, 18 in all, but vocab_size is 19"):
        vocab_parallel_objective(problem.draft, problem.target, group=group, vocab_size=19)
    whole = vocab_parallel_objective(problem.draft, problem.target, group=group)
    assert whole.loss.isfinite()


CASES: dict[str, Callable[[Any], None]] = {
    **{kind: lambda group, kind=kind: check_kind(kind, group) for kind in KINDS},
    **{f"filters-{k}": lambda group, k=k: check_filters(k, group) for k in ("kl", "tv")},
    "sequence-parallel": check_sequence_parallel,
    "row-labels": check_row_labels,
    "bytes-of-the-formula": check_bytes,
    "nothing-valid": check_nothing,
    "ties": check_ties,
    "automatic-chunks": check_automatic_chunks,
    "half-precision": check_half_precision,
    "collectives-logits": check_collectives_of_logits,
    "collectives-hidden": check_collectives_of_hidden,
    "collectives-filters": check_filters_gather_only_what_they_keep,
    "subgroup": check_subgroup,
    "too-few-columns": check_too_few_columns,
}


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=WORLD)
    outcomes = {}
    for name, case in CASES.items():
        # a new group for each case: what a failed one left behind must not meet the next
        group = dist.new_group(list(range(WORLD)), timeout=timedelta(seconds=20))
        try:
            case(group)
            outcomes[name] = PASSED
        except (AssertionError, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
        except Exception:
            # the ranks are no longer in step, so this rank ends, and with it the others
            outcomes[name] = traceback.format_exc()
            raise
        finally:
            Path(folder, f"{rank}.json").write_text(json.dumps(outcomes))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, str]]:
    """For each rank, what became of each case there."""
    folder = tmp_path_factory.mktemp("world")
    end = ""
    try:
        mp.spawn(_rank, (str(folder),), nprocs=WORLD)
    except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
        end = f"not run, the world had ended: {error}"
    files = [folder / f"{rank}.json" for rank in range(WORLD)]
    done = [json.loads(file.read_text()) if file.exists() else {} for file in files]
    return [dict.fromkeys(CASES, end) | outcome for outcome in done]


@pytest.mark.parametrize("name", CASES)
def test_sharded_equals_unsharded(name, outcomes):
    reports = [f"rank {rank}:\n{outcome[name]}" for rank, outcome in enumerate(outcomes) if outcome[name] != PASSED]
    assert not reports, "\n".join(reports)
