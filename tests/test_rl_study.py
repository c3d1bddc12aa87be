"""The study in reinforcement learning keeps its books right, and says what its numbers say.

Catches: an arm that runs with another head, rule or strategy than its name says, a command that the loop does not
understand, a run that is repeated although it is there or counted although it is not, a slope or speed-up of the wrong
arms, a cut-off last line that hides a whole file, a figure that needs all arms, and a document without its block.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from bebop_megatron.rl.config import RLConfig
from benchmarks.rl_study import plan
from benchmarks.rl_study.command import main
from benchmarks.rl_study.figures import draw
from benchmarks.rl_study.jobs import STEPS, TRACE, RLStudy, adopt, read_lines
from benchmarks.rl_study.plan import ARMS, BASELINE, FULL, QUICK, STRESS, Cell
from benchmarks.rl_study.publish import block, publish, traces
from benchmarks.rl_study.results import (
    FIELDS,
    last_third,
    over_seeds,
    overlap,
    reward_difference,
    rows_of,
    slope,
    smooth,
    speed,
    trace_of,
    write_results,
)
from benchmarks.rl_study.tables import readings, tables
from benchmarks.study.jobs import DONE
from benchmarks.study.publish import measured_block

ROOT = Path(__file__).resolve().parent.parent
FIXTURE = ROOT / "tests/fixtures/rl_study"
SCHEMA = (
    """arm seed step reward entropy accept_length accept_rate rollout_seconds learner_seconds step_seconds""".split()
)
# accept length at entropy 1, and its slope; times of a step
ACCEPTANCE = {"to-ce": (2.6, -1.0), "rs-ce": (2.8, -0.5), "rs-tv-frozen": (3.2, 0.0)}
STEP_SECONDS = {BASELINE: 4.0, "to-ce": 3.2, "rs-ce": 2.9, "rs-tv-frozen": 2.5}


def step_of(arm: str, seed: int, step: int) -> dict[str, float | int | None]:
    """A step as the loop writes it, of numbers that are known."""
    entropy = 0.5 + 0.05 * step
    length, by_entropy = ACCEPTANCE.get(arm, (None, None))
    accepted = None if length is None else length + by_entropy * (entropy - 1)
    seconds = STEP_SECONDS[arm] + (5.0 if step == 0 else 0.0)
    return {
        "step": step,
        "reward": 0.3 + 0.02 * step + 0.01 * (seed - 1),
        "entropy": entropy,
        "accept_length": accepted,
        "accept_rate": None if accepted is None else (accepted - 1) / 3,
        "rollout_seconds": seconds - 0.1,
        "learner_seconds": 1.5,
        "step_seconds": seconds,
        "tokens_per_second": 100.0,
        "staleness": 1.0,
        "tokens": 400,
        "entropy_part": None,
        "mismatch_part": None,
    }


def fill(output: Path, size: plan.Size = FULL) -> RLStudy:
    """A finished study of four arms or fewer, two seeds and twelve steps."""
    size = replace(size, steps=12, arms=tuple(arm for arm in STEP_SECONDS if arm in size.arms))
    study = RLStudy(output, size, running=True)
    for cell in study.cells:
        folder = study.cell(cell)
        folder.mkdir(parents=True)
        steps = [step_of(cell.arm.name, cell.seed, step) for step in range(size.steps)]
        (folder / STEPS).write_text("".join(json.dumps(step) + "\n" for step in steps))
        shutil.copy(FIXTURE / TRACE, folder / TRACE)
        (folder / DONE).write_text("{}")
    return study


def test_arms_are_what_their_names_say():
    by_name = {arm.name: (arm.head, arm.rule, arm.strategy) for arm in ARMS}
    assert by_name == {
        "no-mtp": ("tv", "off", "frozen"),
        "to-ce": ("ce", "target-only", "frozen"),
        "rs-ce": ("ce", "rejection", "frozen"),
        "rs-tv-frozen": ("tv", "rejection", "frozen"),
        "rs-tv-online-tv": ("tv", "rejection", "online-tv"),
        "rs-tv-online-ce": ("tv", "rejection", "online-ce"),
    }
    names = [cell.name for cell in plan.cells(FULL)]
    assert len(set(names)) == len(names) == 12
    # seed by seed: cut short, it still compares
    assert [cell.seed for cell in plan.cells(FULL)] == [1] * 6 + [2] * 6
    assert FULL.seconds <= 600


@pytest.mark.parametrize("size", [FULL, QUICK, STRESS], ids=["full", "quick", "stress"])
def test_the_loop_understands_every_cell(size, tmp_path):
    study = RLStudy(tmp_path, size, running=True)
    for cell in study.cells:
        command = study.command(cell)
        assert command[1:3] == ["-m", "bebop_megatron.rl"]
        config = RLConfig.from_arguments(command[3:])
        assert (config.rule, config.strategy) == (cell.arm.rule, cell.arm.strategy)
        assert config.load == str(tmp_path / "trained" / cell.arm.head)
        assert config.seed == cell.seed
        assert config.steps == size.steps
        assert config.output == str(study.cell(cell))
        # the cell has two cores: a worker and a learner
        assert (config.workers, config.learner_processes, config.threads) == (1, 1, 1)


def test_jobs_follow_what_they_need_and_finished_ones_stay(tmp_path):
    study = RLStudy(tmp_path, QUICK)
    before: set[str] = set()
    for job in study.jobs():
        assert set(job.needs) <= before
        assert not study.done(job)
        before.add(job.name)
    assert [job.name for job in study.jobs()] == ["data", "backbone", "warm head", "head ce", "head tv"]
    (tmp_path / "trained/tv").mkdir(parents=True)
    (tmp_path / "trained/tv" / DONE).write_text("{}")
    assert [job.name for job in study.jobs() if study.done(job)] == ["head tv"]
    running = replace(study, running=True)
    assert [job.name for job in running.jobs()] == [f"{arm}-seed1" for arm in QUICK.arms]
    with pytest.raises(ValueError, match=r"another size \(steps differ\)"):
        RLStudy(tmp_path, replace(QUICK, steps=99))


def test_the_stress_takes_over_what_the_full_study_trained(tmp_path):
    full, stress = tmp_path / "full", tmp_path / "stress"
    RLStudy(full, FULL)
    folders = [full / "data", *(full / "trained" / name for name in ("backbone", "warm", "ce", "tv"))]
    for folder in folders:
        folder.mkdir(parents=True)
    study = RLStudy(stress, STRESS)
    adopt(study, full)
    assert not (stress / "trained").exists()
    for folder in folders:
        (folder / DONE).write_text("{}")
    adopt(RLStudy(tmp_path / "other", replace(STRESS, slips=0.5)), full)
    assert not (tmp_path / "other/trained").exists()
    adopt(study, full)
    assert all(study.done(job) for job in study.jobs())
    assert STRESS.entropy_bonus > FULL.entropy_bonus


def test_a_cell_counts_only_when_all_its_steps_are_there(tmp_path, monkeypatch):
    study = RLStudy(tmp_path, replace(QUICK, steps=2), running=True)
    cell = study.cells[0]
    job = study.jobs()[0]
    script = "import sys, pathlib; pathlib.Path(sys.argv[1]).write_text({!r}); sys.exit({})"

    def pretend(text: str, code: int) -> None:
        command = [shutil.which("python3") or "python3", "-c", script.format(text, code), str(study.cell(cell) / STEPS)]
        monkeypatch.setattr(RLStudy, "command", lambda self, cell: command)

    for text, code, reason in (
        ('{"step": 0}\n{"step": 1}\n', 3, "ended with 3"),
        ('{"step": 0}\n', 0, "has 1 steps of 2"),
        ('{"step": 0}\n{"step": 1', 0, "has 1 steps of 2"),
    ):
        pretend(text, code)
        with pytest.raises(SystemExit, match=reason):
            study.work(job)
        assert not study.done(job)
    monkeypatch.setattr(RLStudy, "command", lambda self, cell: ["sleep", "60"])
    with pytest.raises(SystemExit, match="took more than 1 seconds"):
        replace(study, size=replace(study.size, seconds=1), output=tmp_path / "slow").work(job)
    pretend('{"step": 0}\n{"step": 1}\n', 0)
    study.work(job)
    assert study.done(job)


def test_results_are_a_list_of_objects_with_their_schema(tmp_path):
    study = fill(tmp_path)
    write_results(study)
    rows = json.loads((tmp_path / "results.json").read_text())
    assert len(rows) == 4 * 2 * 12
    assert all(list(row)[: len(SCHEMA)] == SCHEMA and set(FIELDS) <= row.keys() for row in rows)
    assert {row["accept_length"] for row in rows if row["arm"] == BASELINE} == {None}
    assert read_lines(tmp_path / "nothing.jsonl") == []


def test_slopes_rewards_and_speed_are_those_of_the_arm(tmp_path):
    rows = rows_of(fill(tmp_path))
    for arm, (_, expected) in ACCEPTANCE.items():
        assert slope(rows, arm).slope.value == pytest.approx(expected, abs=1e-9)
    assert slope(rows, BASELINE) is None
    for arm in ACCEPTANCE:
        found = speed(rows, arm)
        # the first steps, in which the pipeline fills, do not count
        assert found.step_seconds == pytest.approx(STEP_SECONDS[arm])
        assert found.end_to_end.value == pytest.approx(4.0 / STEP_SECONDS[arm])
        assert found.learner_bound.value == pytest.approx(4.0 / 1.5)
        base, own = (12 * (STEP_SECONDS[name] - 0.1) + 5 for name in (BASELINE, arm))
        assert found.rollout.value == pytest.approx(base / own)
        assert reward_difference(rows, arm).value == pytest.approx(0, abs=1e-12)
    late = over_seeds(rows, "rs-ce", "reward", last_third(rows))
    # steps 8 to 11
    assert late.value == pytest.approx(0.3 + 0.02 * 9.5 + 0.005)
    assert smooth([1.0, 2.0, 6.0], 3) == [1.5, 3.0, 4.0]


def test_a_reward_that_differs_is_told_from_one_that_does_not(tmp_path):
    rows = rows_of(fill(tmp_path))
    lower = [row | {"reward": row["reward"] - 0.1} if row["arm"] == "rs-ce" else row for row in rows]
    low, high = reward_difference(lower, "rs-ce").interval
    assert high < 0
    assert (low + high) / 2 == pytest.approx(-0.1)


def test_overlap_counts_the_time_in_which_both_work():
    events = [
        {"actor": "learner-0", "event": "train", "begin": 0.0, "end": 4.0},
        {"actor": "learner-0", "event": "train", "begin": 6.0, "end": 8.0},
        # two workers at once count once
        {"actor": "worker-0", "event": "decode", "begin": 1.0, "end": 3.0},
        {"actor": "worker-1", "event": "decode", "begin": 2.0, "end": 3.0},
        {"actor": "worker-0", "event": "decode", "begin": 7.0, "end": 9.0},
    ]
    assert overlap(events, "learner", "worker") == pytest.approx(3 / 6)
    assert overlap(events, "nobody", "worker") is None
    start, found = trace_of(events, 3.0)
    assert (start, [event["begin"] for event in found]) == (3.0, [0.0])
    assert trace_of([], 3.0) == (0.0, [])


def test_tables_and_figures_of_what_is_there(tmp_path):
    study = fill(tmp_path)
    rows, events = rows_of(study), traces(study)
    acceptance, reward, time = tables(rows)
    assert [row[0] for row in acceptance.rows] == list(ACCEPTANCE)
    cells = dict(zip(acceptance.header, acceptance.rows[0], strict=True))
    assert cells["slope, per nat"].startswith("-1.00")
    assert cells["paper's slope"] == "-1.68"
    assert [row[0] for row in reward.rows] == list(STEP_SECONDS)
    assert time.rows[0][4].startswith("1.00")
    said = readings(rows, events)
    assert any(sentence.startswith("rs-tv-frozen misses the goal of 1.8: 1.60") for sentence in said)
    assert any("rollouts run beside it" in sentence for sentence in said)
    files = draw(rows, events, tmp_path / "figures")
    assert {file.name for file in files} == {
        f"{name}.{kind}" for name in ("acceptance", "reward", "time", "trace") for kind in ("png", "svg")
    }
    assert all(file.stat().st_size > 5_000 for file in files)
    # -0.5 against 0 per nat, over entropies of 0.6 (steps 0 to 4) to 0.975 (8 to 11)
    assert said[0].startswith("Entropy went from 0.60 to 0.97 nats (rs-ce) and 0.60 to 0.97 nats (rs-tv-frozen).")
    assert "-0.50 ± 0.00 per nat with the CE head, " in said[0]
    assert said[0].endswith("which are told apart.")
    # one arm alone is a study, too
    alone = [row for row in rows if row["arm"] == BASELINE]
    assert tables(alone)
    assert readings(alone, {}) == []
    assert {file.stem for file in draw(alone, {}, tmp_path / "alone")} == {"reward", "time"}


def test_publishing_fills_the_block_of_the_document(tmp_path):
    study = fill(tmp_path / "study")
    where = {"cpu": "A CPU", "cores": 2, "torch": "2", "megatron-core": "0.19.2", "date": "2026-01-02"}
    (study.output / "environment.json").write_text(json.dumps(where))
    root = tmp_path / "root"
    (root / "docs").mkdir(parents=True)
    shutil.copy(ROOT / "docs/rl.md", root / "docs/rl.md")
    files = publish(study, root)
    data = json.loads(files[0].read_text())
    assert files[0].name == "rl-study-a-cpu-2-cores-2026-01-02.json"
    assert len(data["results"]) == 96
    text = (root / "docs/rl.md").read_text()
    assert measured_block(text) == (files[0].stem, block(data, files[0].stem))
    for name in data["figures"]:
        assert (root / "benchmarks/figures" / f"{files[0].stem}-{name}.png").is_file()
        assert f"{files[0].stem}-{name}.png" in text
    # the stress has a block of its own, and leaves the other alone
    stress = fill(tmp_path / "stress", STRESS)
    (stress.output / "environment.json").write_text(json.dumps(where))
    files = publish(stress, root, "stress")
    assert files[0].name == "rl-study-stress-a-cpu-2-cores-2026-01-02.json"
    both = (root / "docs/rl.md").read_text()
    data = json.loads(files[0].read_text())
    assert measured_block(both, "stress") == (files[0].stem, block(data, files[0].stem))
    assert measured_block(both) == measured_block(text)
    assert data["figures"] == ["acceptance", "reward"]


@pytest.mark.parametrize(("marker", "size"), [("study", FULL), ("stress", STRESS)])
def test_the_document_says_what_its_data_say(marker, size):
    name, text = measured_block((ROOT / "docs/rl.md").read_text(), marker)
    if not name:
        assert text == "Not measured yet."
        return
    data = json.loads((ROOT / "benchmarks/data" / f"{name}.json").read_text())
    assert text == block(data, name)
    arms = {(row["arm"], row["seed"]) for row in data["results"]}
    assert arms == {(cell.arm.name, cell.seed) for cell in plan.cells(size)}
    assert all(set(SCHEMA) <= row.keys() and math.isfinite(row["reward"]) for row in data["results"])


def test_the_command_line_refuses_what_makes_no_sense(tmp_path, capsys):
    with pytest.raises(SystemExit):
        main(["--quick", "--publish"])
    assert "--publish is for the full study" in capsys.readouterr().err
    RLStudy(tmp_path, FULL)
    with pytest.raises(SystemExit, match="holds a study of another size"):
        main(["--quick", "--output", str(tmp_path)])
    main(["--report-only", "--output", str(tmp_path)])
    assert "nothing is measured yet" in capsys.readouterr().err
    assert Cell(ARMS[0], 3).name == "no-mtp-seed3"
