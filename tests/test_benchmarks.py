"""The benchmark of the loss measures what it says.

Catches: a contender that computes something else, numbers printed although results are wrong, a floor with fewer or
more products than the objective needs, a peak that is not seen, and a table in docs/loss.md that its data contradict.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks.loss import measure, run
from benchmarks.loss.cases import Case, Suite, cpu_suite, gpu_suite, make_problem, quick_suite
from benchmarks.loss.contenders import CONTENDERS, BareProducts, absent, ours
from benchmarks.loss.document import block, blocks, update_document
from benchmarks.loss.results import Judged, Ratio, judged, time_ratio

ROOT = Path(__file__).resolve().parent.parent
TINY = Case(n=24, h=16, v=600, threads=1)
ON_CPU = [name for name in CONTENDERS if name not in absent(TINY)]


@pytest.fixture
def tiny(monkeypatch):
    """The program on sizes that say nothing, in this process."""
    suite = Suite(TINY, {"depths": [replace(TINY, k=1), TINY]}, [TINY, replace(TINY, k=7)], rounds=2, sweep_rounds=1)
    monkeypatch.setattr(run, "cpu_suite", lambda threads: suite)
    monkeypatch.setattr(run, "in_fresh_processes", lambda work, case, *rest: work(case, None, *rest))


def start(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["benchmarks.loss", "--device", "cpu", *map(str, arguments)])
    run.main()


def synthetic(ours=1.1, kept_peak=400):
    """What `measure` returns, with numbers that are easy to check."""
    gradient = TINY.n * TINY.h * 4

    def weighed(k):
        peaks = {"ours": 100 + k * gradient, "autograd": 10_000_000, "kept": kept_peak}
        return {"case": vars(replace(TINY, k=k)), "peak_bytes": peaks}

    seconds = {"products": [1.0, 2.0, 1.0], "ours": [ours, 2 * ours, 9.0], "autograd": [2.0, 4.0, 2.0], "kept": []}
    environment = {"cpu": "a processor", "cores": 2, "threads": 1, "torch": "2", "date": "2026-01-01", "load_before": 0}
    return {
        "environment": environment,
        "not_run": {"liger": "needs a GPU"},
        "timed": [{"sweep": "default", "case": vars(TINY), "seconds": seconds, "floor_rows": 128}],
        "weighed": [weighed(1), weighed(3), weighed(7)],
    }


def test_contenders_agree_with_the_reference():
    assert ON_CPU == ["ours", "autograd", "kept"]
    assert measure.errors(TINY, None, ON_CPU) == {}
    assert measure.errors(replace(TINY, k=1, dtype="bfloat16"), None, ON_CPU) == {}


@pytest.mark.dist
def test_vocabulary_parallel_contenders_agree_with_the_reference():
    case = replace(TINY, tp=2, threads=2)
    assert measure.in_fresh_processes(measure.errors, case, ["ours", "kept"]) == {}


def test_nothing_is_printed_when_a_result_is_wrong(tiny, monkeypatch, capsys, tmp_path):
    def almost(problem):
        loss, grad = ours(problem)
        return loss, grad * 1.001

    monkeypatch.setitem(CONTENDERS, "kept", almost)
    with pytest.raises(SystemExit, match=r"results are wrong:\n  kept, tp=1: loss off by"):
        start(monkeypatch, "--output", tmp_path)
    assert capsys.readouterr().out == ""
    assert not list(tmp_path.iterdir())


def test_a_run_leaves_data_and_figure_and_prints_the_judged_ratios_last(tiny, monkeypatch, capsys, tmp_path):
    start(monkeypatch, "--output", tmp_path)
    printed = capsys.readouterr().out
    (file,), (figure,) = (tmp_path / "data").iterdir(), (tmp_path / "figures").iterdir()
    assert figure.stat().st_size > 5000
    data = json.loads(file.read_text())
    assert len(data["timed"]) == 3
    for one in data["timed"]:
        rounds = 2 if one["sweep"] == "default" else 1
        assert {name: len(times) for name, times in one["seconds"].items()} == dict.fromkeys(
            ["products", *ON_CPU], rounds
        )
    assert data["environment"]["threads"] == 1
    assert data["environment"]["torch"] == torch.__version__.partition("+")[0]
    last = printed.partition("Judged ratios")[2].strip().splitlines()
    assert [line.split("  ")[0].strip() for line in last[2:]] == [one.name for one in judged(data)], printed
    assert "not run: liger (needs a GPU)" in printed
    # the same from the data file, without measuring
    monkeypatch.setattr(run, "measure", lambda *_: pytest.fail("measured again"))
    start(monkeypatch, "--data", file)
    assert capsys.readouterr().out == printed


def test_ours_has_the_products_of_the_floor():
    problem = make_problem(TINY)
    expected = 2 * TINY.h * TINY.v * ((TINY.n + TINY.k - 1) + 2 * TINY.k * TINY.n)
    for compute in (BareProducts(problem, 16), lambda: ours(problem)):
        with FlopCounterMode(display=False) as counter:
            compute()
        assert counter.get_total_flops() == expected


_GREEDY = """
import torch
from benchmarks.loss import measure
from benchmarks.loss.contenders import CONTENDERS, ours
from tests.test_benchmarks import TINY

def greedy(problem):
    if len(problem.target) > 20:
        torch.ones(64 * 2**20, dtype=torch.uint8)
        return ours(problem)

CONTENDERS["ours"] = greedy
print(measure.peak_memory(TINY, None, "ours"))
"""


def test_peak_memory_sees_what_lives_only_in_between():
    # in a process of its own, as the benchmark does it: resident memory remembers what ran before
    done = subprocess.run([sys.executable, "-c", _GREEDY], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
    assert 63 <= int(done.stdout) / 2**20 < 80


def test_ratios_are_taken_within_a_round_and_judged():
    data = synthetic()
    assert time_ratio(data["timed"][0]["seconds"], "ours") == Ratio(1.1, 1.1, pytest.approx(5.84))
    assert time_ratio(data["timed"][0]["seconds"], "kept") is None
    of_floor, of_autograd, memory, growth = judged(data)
    assert [one.verdict for one in judged(data)] == ["met"] * 4
    assert of_autograd.value.middle == pytest.approx(0.55)
    assert memory.value == pytest.approx((100 + 3 * 24 * 16 * 4) / 1e7)
    assert growth.value == 1
    assert of_floor.limit == 1.2
    assert judged(synthetic(ours=1.3))[0].verdict == "MISSED"
    assert Judged("", 1.0, 1, strict=True).verdict == "MISSED"
    assert Judged("", None, 1).verdict == "not measured"


def test_suites_measure_what_is_judged():
    suite = cpu_suite(2)
    assert suite.default == Case(k=3, n=2048, h=768, v=32_000, dtype="float32", threads=2)
    for each in (suite, quick_suite(suite), gpu_suite(), quick_suite(gpu_suite())):
        assert each.default in each.weighed
        assert (each.weighed[0].k, each.weighed[-1].k) == (1, 7)
    assert [case.k for case in suite.timed["depths"]] == [1, 2, 3, 5, 7]
    assert {case.tp for case in suite.cases} == {1, 2, 4}


def test_document_is_updated_in_place_and_says_what_the_data_say(tmp_path):
    document, file = tmp_path / "loss.md", tmp_path / "loss-a.json"
    shutil.copy(ROOT / "docs/loss.md", document)
    file.write_text(json.dumps(synthetic()))
    update_document(document, file)
    once = document.read_text()
    update_document(document, file)
    assert document.read_text() == once
    assert blocks(once)["cpu"] == ("loss-a", block(synthetic(), "loss-a"))
    assert blocks(once)["cuda"] == blocks((ROOT / "docs/loss.md").read_text())["cuda"]
    document.write_text("nothing")
    with pytest.raises(ValueError, match="must have one block"):
        update_document(document, file)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_measured_block_of_the_document_is_that_of_its_data_file(device):
    name, text = blocks((ROOT / "docs/loss.md").read_text())[device]
    if not name:
        assert "ot measured" in text
        return
    data = json.loads((ROOT / "benchmarks/data" / f"{name}.json").read_text())
    assert text == block(data, name)
    assert (ROOT / "benchmarks/figures" / f"{name}.png").exists()
    assert data["timed"][0]["case"]["device"] == device
