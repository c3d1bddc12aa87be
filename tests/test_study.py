"""The study compares what it says it compares, and repeats nothing.

Catches: an interval computed over the wrong units, a pair that is none, a rule or seed mixed up in a table, a study
that starts over after an interruption or goes on with other sizes, a result without the fields its readers rely on,
and a document that its data contradict.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.study import statistics
from benchmarks.study.command import main
from benchmarks.study.jobs import Study
from benchmarks.study.plan import FULL, QUICK, RULES, Cell, all_cells, main_cells
from benchmarks.study.publish import block, markdown, measured_block, publish, update_document
from benchmarks.study.results import Difference, difference, load_results, over_seeds, rows_of, select
from benchmarks.study.statistics import PromptCounts, line, mean, paired_mean, paired_rate, rate
from benchmarks.study.tables import length_over_entropy, main_table, readings, tables
from tests.forks import run_module
from tests.study_process import TINY

ROOT = Path(__file__).resolve().parent.parent
SCHEMA = """arm domain loss seed rule gamma temperature attention train_k filters accept_rate accept_length
num_tokens stderr train_attention train_temperature train_data start warmup steps""".split()


def test_mean_and_its_interval():
    estimate = mean([1.0, 2.0, 6.0])
    assert estimate.value == 3
    assert estimate.stderr == pytest.approx(math.sqrt(7 / 3))
    assert estimate.half_width == pytest.approx(4.303 * math.sqrt(7 / 3))
    assert mean([5.0]) == statistics.Estimate(5.0, None, None)
    assert paired_mean({1: 3.0, 2: 5.0, 9: 0.0}, {2: 4.0, 1: 1.0}).value == 1.5
    # differences 2 and 1: standard deviation 1/sqrt(2), one degree of freedom
    assert paired_mean({1: 3.0, 2: 5.0}, {2: 4.0, 1: 1.0}).half_width == pytest.approx(12.706 * 0.5)
    with pytest.raises(ValueError, match="no seed in common"):
        paired_mean({1: 1.0}, {2: 1.0})


def test_rate_takes_prompts_as_units():
    counts = PromptCounts((2.0, 2.0), (2.0, 4.0))
    # E[L] = 6/4; each prompt misses it by 1 of 4 verifications
    estimate = rate(counts, 3)
    assert estimate.value == 0.5
    assert estimate.stderr == pytest.approx(math.sqrt(2 * (2 / 16)) / 3)
    assert (counts + counts).length == 1.5
    assert rate(PromptCounts((1.0, 3.0), (1.0, 3.0)), 1).stderr == 0


def test_pairing_removes_what_prompts_have_in_common():
    # prompts differ much, the two conditions by the same in each
    hard = PromptCounts((10.0, 10.0, 10.0), (2.0, 10.0, 24.0))
    easy = PromptCounts((10.0, 10.0, 10.0), (5.0, 13.0, 27.0))
    paired = paired_rate(easy, hard, 3)
    assert paired.value == pytest.approx(0.1)
    assert paired.stderr == pytest.approx(0, abs=1e-12)
    assert rate(easy, 3).stderr > 0.1
    # equal by chance on the whole, not prompt by prompt
    swapped = paired_rate(PromptCounts((1.0, 1.0), (0.0, 2.0)), PromptCounts((1.0, 1.0), (2.0, 0.0)), 1)
    assert swapped.value == 0
    assert swapped.stderr == pytest.approx(math.sqrt(2 * (1 + 1)))
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_rate(PromptCounts((1.0,), (1.0,)), hard, 3)


def test_line_and_the_error_of_its_slope():
    exact = line([0.0, 1.0, 2.0, 3.0], [5.0, 3.0, 1.0, -1.0], [0, 0, 1, 1])
    assert (exact.slope.value, exact.intercept, exact.r) == pytest.approx((-2, 5, -1))
    assert exact.slope.stderr == pytest.approx(0, abs=1e-12)
    # residuals -1, 2, -1 around slope 0; x - mean = -1, 0, 1: scores 1, 0, -1 over spread 2
    bent = line([0.0, 1.0, 2.0], [0.0, 3.0, 0.0], [0, 1, 2])
    assert bent.slope.value == pytest.approx(0)
    assert bent.slope.stderr == pytest.approx(math.sqrt(3 / 2 * 0.5))
    # one sequence twice is no more than once
    twice = line([0.0, 1.0, 2.0] * 2, [0.0, 3.0, 0.0] * 2, [0, 1, 2] * 2)
    assert twice.slope.stderr == pytest.approx(bent.slope.stderr)
    assert line([1.0, 1.0, 1.0], [0.0, 1.0, 2.0], [0, 1, 2]) is None


def test_plan_has_what_is_asked_of_the_study():
    cells = main_cells(FULL, "code")
    heads = {cell.head for cell in cells}
    seeds = {loss: sorted(head.seed for head in heads if head.loss == loss) for loss in {h.loss for h in heads}}
    expected = {loss: [1, 2, 3] for loss in ("ce", "kl", "tv-step", "tv")}
    assert seeds == expected | {loss: [1] for loss in ("reverse-kl", "lk", "lk-hybrid")}
    assert {(cell.head, cell.rule) for cell in cells} == {(head, rule) for head in heads for rule in RULES}
    whole = all_cells(FULL, ("code", "math"))
    assert [cell.arm for cell in whole[: 2 * len(cells)]] == ["main"] * 2 * len(cells)
    # one name, one measurement: what is shared by name is the same in all that is measured
    for size in (FULL, QUICK):
        by_name: dict[str, Cell] = {}
        for cell in all_cells(size, ("code", "math")):
            known = by_name.setdefault(cell.name, cell)
            assert replace(known, arm=cell.arm, entropy=cell.entropy) == cell


def test_jobs_follow_what_they_need_and_measure_each_cell_once(tmp_path):
    study = Study(tmp_path, FULL, ("code", "math"))
    jobs = study.jobs()
    before: set[str] = set()
    for job in jobs:
        assert set(job.needs) <= before
        assert job.name not in before
        before.add(job.name)
    measured = [cell.name for job in jobs for cell in job.cells]
    assert len(measured) == len(set(measured))
    assert set(measured) == {cell.name for cell in study.cells}
    watched = {cell.name for cell in study.cells if cell.entropy}
    assert all(cell.entropy == (cell.name in watched) for job in jobs for cell in job.cells)
    with pytest.raises(ValueError, match=r"another size \(head_steps differ\)"):
        Study(tmp_path, replace(FULL, head_steps=1), ("code",))


def fake_rows(tmp_path, shift=None):
    """Rows of a study whose cells were written by hand; acceptance grows by `shift[loss]` drafts for each prompt."""
    shift = shift or {"ce": 0, "kl": 1, "tv": 2}
    size = replace(QUICK, seeds=(1, 2), losses=("ce", "kl", "tv"), single=(), prompts=3)
    study = Study(tmp_path, size, ("code",))
    for cell in study.cells:
        verified = [10, 20, 30]
        extra = shift.get(cell.head.loss, 0) * (cell.rule == "rejection")
        accepted = [number + extra + cell.head.seed for number in (5, 8, 11)]
        length = sum(accepted) / sum(verified)
        entropy = {"mean_target": 1 + cell.temperature, "first": None, "reached": None, "bins": []}
        measured = {"accept_rate": length / cell.gamma, "stderr": 0.01, "accept_length": 1 + length, "num_tokens": 99}
        measured |= {"verifications": verified, "accepted": accepted, "entropy": entropy, "cpu_seconds": 1.0}
        study.cell(cell).parent.mkdir(parents=True, exist_ok=True)
        study.cell(cell).write_text(json.dumps(measured))
    return study, rows_of(study)


def test_differences_pair_equal_seeds_and_prompts(tmp_path):
    _, rows = fake_rows(tmp_path)
    mine = select(rows, arm="main", rule="rejection")
    pair = Difference(select(mine, loss="tv"), select(mine, loss="ce"))
    # two more drafts in each of 3 prompts, over 60 verifications, gamma 3; the same in both seeds
    assert pair.by_prompt.value == pytest.approx(6 / 60 / 3)
    assert pair.by_seed.value == pytest.approx(6 / 60 / 3)
    assert pair.by_seed.half_width == pytest.approx(0, abs=1e-12)
    one = Difference(select(mine, loss="tv", seed=1), select(mine, loss="ce"))
    assert one.by_seed is None
    assert one.seeds == [1]
    assert difference(select(mine, loss="tv", seed=1), select(mine, loss="ce", seed=2)) is None
    ce = over_seeds(select(mine, loss="ce"))
    assert ce.value == pytest.approx((27 + 30) / 2 / 60 / 3)


def test_tables_and_sentences_say_what_the_rows_say(tmp_path):
    _, rows = fake_rows(tmp_path)
    table = main_table(rows, "code")
    by_loss = {row[0]: dict(zip(table.header, row, strict=True)) for row in table.rows}
    assert list(by_loss) == ["ce", "kl", "tv"]
    assert by_loss["tv"]["- ce, by prompt"].startswith("+3.3 ± ")
    assert by_loss["tv"]["- ce, by seed"] == "+3.3 ± 0.0"
    assert by_loss["tv"]["- kl, by prompt"].startswith("+1.7 ± ")
    assert by_loss["kl"]["- kl, by prompt"] == "-"
    assert by_loss["tv"]["target-only - ce"] == "+0.0 ± 0.0"
    assert (by_loss["ce"]["paper, rejection"], by_loss["tv"]["paper, rejection"]) == ("71.3", "+3.3")
    said = readings(rows)
    assert any(sentence.startswith("code, rejection: tv - kl = +1.7") for sentence in said)
    assert any(sentence.startswith("code, ce: rejection - target-only = +0.0") for sentence in said)
    assert all(table.title in markdown(rows).lower() for table in tables(rows))
    swept = [{"accept_length": 3 - t, "entropy": {"mean_target": 2 * t}} for t in (0.4, 0.7, 1.0)]
    assert length_over_entropy(swept) == pytest.approx(-0.5)


def test_document_is_updated_in_place_and_says_what_the_data_say(tmp_path):
    study, rows = fake_rows(tmp_path / "study")
    where = {"date": "2026-01-01", "cpu": "A (R) processor", "cores": 2, "jobs": 2, "torch": "2", "megatron-core": "0"}
    (study.output / "environment.json").write_text(json.dumps(where))
    document = tmp_path / "docs/study.md"
    document.parent.mkdir()
    document.write_text((ROOT / "docs/study.md").read_text())
    files = publish(study, tmp_path)
    assert all(file.stat().st_size > 1000 for file in files)
    once, name = document.read_text(), "study-a-r-processor-2-cores-2026-01-01"
    data = json.loads(files[0].read_text())
    assert measured_block(once) == (name, block(data, name))
    assert data["figures"] == ["main", "temperature", "entropy", "depth", "arms"]
    assert data["cpu_seconds"] == len({cell.name for cell in study.cells})
    assert load_results(files[0]) == json.loads(json.dumps(rows))
    update_document(document, files[0])
    assert document.read_text() == once
    document.write_text("nothing")
    with pytest.raises(ValueError, match="must have one block"):
        update_document(document, files[0])


def test_measured_block_of_the_document_is_that_of_its_data_file():
    name, text = measured_block((ROOT / "docs/study.md").read_text())
    if not name:
        assert "ot measured" in text
        return
    file = ROOT / "benchmarks/data" / f"{name}.json"
    data = json.loads(file.read_text())
    assert text == block(data, name)
    for figure in data["figures"]:
        assert (ROOT / "benchmarks/figures" / f"{name}-{figure}.png").exists()


def test_mathematics_without_its_text_is_skipped_with_a_line(monkeypatch, tmp_path, capsys):
    monkeypatch.delenv("GSM8K", raising=False)
    monkeypatch.setattr("benchmarks.study.corpora._GSM8K_NAMES", ())
    with pytest.raises(SystemExit, match=r"--gsm8k, .* is no file"):
        main(["--quick", "--gsm8k", str(tmp_path / "none"), "--output", str(tmp_path)])
    main(["--quick", "--report-only", "--output", str(tmp_path)])
    assert "mathematics is skipped: no GSM8K text" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.dist
def test_an_interrupted_study_goes_on_and_repeats_nothing(tmp_path):
    problems = [
        {"question": f"Tom has {n} apples and eats {n // 2}. How many are left?", "answer": f"{n} - {n // 2}\n#### {n}"}
        for n in range(60)
    ]
    gsm8k, output = tmp_path / "train.jsonl", tmp_path / "study"
    gsm8k.write_text("\n".join(map(json.dumps, problems)))

    def run(stop_after):
        done = run_module("tests.study_process", str(output), str(gsm8k), str(stop_after))
        logs = {file.name: file.read_text()[-1500:] for file in (output / "logs").glob("*.log")}
        assert done.returncode == 0, f"{done.output}\n{logs}"
        return done.stdout

    printed = run(6)
    assert "interrupted" in printed
    early = json.loads((output / "results.json").read_text())
    assert 0 < len(early) < 8
    complete = {
        file: file.stat().st_mtime_ns
        for pattern in ("cells/**/*.json", "**/done.json")
        for file in output.glob(pattern)
    }
    printed = run(0)
    assert "{}" in printed
    assert {file: file.stat().st_mtime_ns for file in complete} == complete
    rows = json.loads((output / "results.json").read_text())
    assert [(row["arm"], row["loss"], row["train_data"], row["rule"]) for row in rows] == [
        *[("main", loss, "corpus", rule) for loss in ("kl", "tv") for rule in RULES],
        *[("own", loss, data, "rejection") for loss in ("kl", "tv") for data in ("corpus", "own")],
    ]
    for row in rows:
        assert set(SCHEMA) <= row.keys()
        assert row["accept_length"] == pytest.approx(1 + row["gamma"] * row["accept_rate"])
        assert len(row["accepted"]) == len(row["verifications"]) == TINY.prompts
        assert 0 < row["num_tokens"] <= TINY.prompts * TINY.new_tokens
        assert 0 <= row["accept_rate"] <= 1
    assert rows[0]["entropy"]["first"]["points"] > 0
    assert (output / "figures/main.png").stat().st_size > 5000
    # complete: nothing is started, not even Megatron
    assert "[" not in run(0).partition("\n")[0]
