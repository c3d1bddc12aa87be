"""A report measures what it says, continues where it stopped, and says plainly when speculation does not pay.

Catches: a cell taken for another one's; rounds compared with the wrong run without drafts; "pays" within the noise; a
split that does not add up; a figure that cannot be drawn from what a file holds; a second checkpoint in one process.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
import torch

from bebop_megatron.entropy import EntropyCurve
from bebop_megatron.evaluation import DecodeConfig
from bebop_megatron.evaluation.__main__ import main, parser
from bebop_megatron.evaluation.entropy_points import Point, from_log, from_results, over_time
from bebop_megatron.evaluation.options import config_of, labels_of
from bebop_megatron.evaluation.results import load_rows
from bebop_megatron.evaluation.speed import break_even_gamma, speeds, verdicts
from bebop_megatron.evaluation.sweep import Cell, Outcome, Plan, Store
from bebop_megatron.evaluation.sweep_report import plan_of, write_report
from tests.forks import run_module

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="checks the CPU platform")
PLAN = Plan(["rejection", "target-only"], [0.5, 1.0], [1, 2], 2, 600, 300, 200)
SIZES = ["--prompt-tokens", "6", "--max-new-tokens", "16", "--num-tokens", "320", "--sweep-tokens", "160"]
SIZES += ["--speed-tokens", "96", "--sweep-gammas", "2", "--sweep-temperatures", "0.5", "--rounds", "2", "--quiet"]


def cells(label: str = "tv") -> list[Cell]:
    config = DecodeConfig(seed=5)
    return PLAN.cells(
        label, "here at iteration 7", "ids", lambda rule, **changes: replace(config, rule=rule, **changes)
    )


def curve(seed: int) -> list[float]:
    entropy = torch.linspace(0, 4, 400) + seed / 10
    made = EntropyCurve()
    made.update(entropy, (1 - 0.2 * entropy + 0.05 * (7 * entropy).sin()).clamp(0, 1))
    return made.state().tolist()


def outcome(cell: Cell, speed: float = 100.0, sequences: int = 12) -> Outcome:
    gamma = cell.config.gamma
    counts = torch.zeros(sequences, gamma, 5, dtype=torch.float64)
    for step in range(gamma):
        counts[:, step, 0] = 10 * 0.6**step
        counts[:, step, 1] = 10 * 0.6 ** (step + 1) + torch.arange(sequences) % 2 * 0.1
    estimate = {"value": 1.9, "stderr": 0.02, "clusters": sequences, "low": 1.86, "high": 1.94}
    slope = {"value": -0.2, "stderr": 0.01, "clusters": sequences, "low": -0.22, "high": -0.18}
    entropy = {
        "state": curve(cell.label == "ce"),
        "slope": slope,
        "r": -0.9,
        "intercept": 1.0,
        "mean_entropy": estimate,
        "mean_acceptance": estimate | {"value": 0.6},
    }
    expected = {
        "rate_per_step": [estimate | {"value": 0.6 ** (step + 1)} for step in range(gamma)],
        "accept_length": estimate,
        "accept_rate": estimate | {"value": 0.3},
        "difference": estimate | {"value": 0.01},
        "steps": [{"z": 0.5, "worst": 0.7}],
        "attention": {
            mode: {"accept_length": estimate, "difference": estimate | {"low": -0.01, "high": 0.03}}
            for mode in ("chain", "first-depth")
        },
        "entropy": {"rejection": entropy, "target-only": entropy},
    }
    return Outcome(
        cell=cell.key,
        counts=counts,
        num_tokens=1000,
        num_sequences=sequences,
        seconds=1000 / speed,
        environment={"cpu": "some CPU", "bebop-megatron": "0.1.0", "commit": "0123456789ab", "date": "2026-11-30"},
        expected=expected if cell.config.record else None,
    )


def test_a_plan_alternates_between_numbers_of_drafts_and_records_no_timed_run():
    planned = cells()
    assert [cell.kind for cell in planned[:4]] == ["main", "main", "temperature", "temperature"]
    assert {cell.config.temperature for cell in planned if cell.kind == "temperature"} == {0.5}
    timed = planned[4:]
    assert [(cell.config.gamma, cell.config.seed) for cell in timed[:6]] == [
        (0, 5),
        (1, 5),
        (1, 5),
        (2, 5),
        (2, 5),
        (0, 6),
    ]
    assert not any(cell.config.record for cell in timed)
    assert all(cell.config.record for cell in planned[:4])
    # several sequences in every cell, or there is no standard error
    assert all(cell.num_tokens >= 16 * cell.config.max_new_tokens for cell in planned)
    assert len({cell.file for cell in planned}) == len(planned)


def test_a_cell_comes_back_from_its_file_and_only_for_the_same_settings(tmp_path):
    store, cell = Store(tmp_path), cells()[0]
    assert store.load(cell) is None
    kept = outcome(cell)
    store.save(cell, kept)
    found = store.load(cell)
    assert found is not None
    torch.testing.assert_close(found.counts, kept.counts, atol=1e-5, rtol=0)
    assert replace(found, counts=kept.counts) == kept
    for other in (
        replace(cell, num_tokens=601),
        replace(cell, checkpoint="here at iteration 8"),
        replace(cell, config=replace(cell.config, top_k=5)),
    ):
        assert store.load(other) is None
    alone = next(each for each in cells() if each.config.gamma == 0)
    store.save(alone, outcome(alone))
    again = store.load(alone)
    assert again is not None
    assert again.counts.shape == (12, 0, 5)
    # another program's file is measured anew, half a file is named
    (tmp_path / cell.file).write_text("{}")
    assert store.load(cell) is None
    (tmp_path / cell.file).write_text("{")
    with pytest.raises(ValueError, match=r"main-tv-.*\.json is no JSON: .*Remove the file"):
        store.load(cell)


def timed(ratio_of, label="tv"):
    """Rounds whose base speed drifts, with speed-ups by gamma."""
    return [
        outcome(cell, speed=(100 + 50 * (cell.config.seed - 5)) * ratio_of(cell.config.gamma, cell.config.seed - 5))
        for cell in cells(label)
        if cell.kind == "gamma"
    ]


def test_speed_is_compared_round_by_round():
    found = speeds(timed(lambda gamma, index: 1 + 0.5 * gamma))
    assert {(each.rule, each.gamma): each.speedup for each in found} == {
        ("rejection", 1): pytest.approx(1.5),
        ("target-only", 1): pytest.approx(1.5),
        ("rejection", 2): pytest.approx(2.0),
        ("target-only", 2): pytest.approx(2.0),
    }
    best = found[-1]
    assert best.break_even_length == pytest.approx(best.accept_length.value / 2)
    assert break_even_gamma(found) == 2
    (sentence, _) = verdicts(found)
    assert sentence.startswith("tv, rejection, batch size 8: speculation pays. The fastest, gamma 2, gives")
    assert sentence.endswith("The break-even gamma is above 2, the largest measured.")


def test_the_verdict_is_plain_where_speculation_does_not_pay_and_silent_where_runs_disagree():
    slow = speeds(timed(lambda gamma, index: 1 if gamma == 0 else 0.9 - 0.1 * gamma))
    assert break_even_gamma(slow) == 0
    for sentence in verdicts(slow):
        assert (
            "speculation does not pay. At this batch size decoding without drafts is faster than with any" in sentence
        )
        assert "the least bad, gamma 1, gives" in sentence
    unclear = speeds(timed(lambda gamma, index: 1 if gamma == 0 else (0.8, 1.3)[index]))
    assert all("these runs do not tell whether speculation pays" in sentence for sentence in verdicts(unclear))
    small = speeds(timed(lambda gamma, index: (1, 1.2, 0.9)[gamma]))
    assert verdicts(small)[0].endswith("The break-even gamma is 1.")


def test_a_report_of_two_heads_has_every_figure_and_number(tmp_path):
    options = parser().parse_args(["--load", "a", "--load", "b", "--prompts", "x", "--report", str(tmp_path)])
    outcomes = [outcome(cell, speed=100 + 30 * cell.config.gamma) for name in ("ce", "tv") for cell in cells(name)]
    rows = write_report(options, outcomes)
    assert [(row.loss, row.rule) for row in rows] == [
        (name, rule) for name in ("ce", "tv") for rule in ("rejection", "target-only")
    ]
    for name in ("steps", "entropy", "temperature", "gamma"):
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        drawn = (tmp_path / f"{name}.svg").read_text()
        assert drawn.startswith("<?xml")
    saved = load_rows(tmp_path / "results.json")
    assert {row.arm for row in saved} == {"main", "temperature", "gamma"}
    main_row = saved[0]
    assert main_row.checkpoint == "here at iteration 7"
    assert main_row.expected_accept_length == 1.9
    # the time of a recorded run is no speed
    assert main_row.baseline_tokens_per_second is None
    page = (tmp_path / "report.md").read_text()
    for expected in (
        "speculation pays",
        "temperature.png",
        "| 2 | 2 |",
        "commit: 0123456789ab",
        "here at iteration 7",
        "first-depth",
    ):
        assert expected in page
    assert "nan" not in page
    points = from_results([str(tmp_path / "results.json")], ["rejection"])
    assert [(point.name, point.rule) for point in points] == [("ce", "rejection"), ("tv", "rejection")]


def test_labels_name_checkpoints_once():
    def labels(*flags: str) -> list[str]:
        return labels_of(parser().parse_args([*flags, "--prompts", "x"]))

    assert labels("--load", "runs/tv") == ["head"]
    assert labels("--load", "runs/ce", "--load", "runs/tv") == ["ce", "tv"]
    with pytest.raises(ValueError, match="2 --load, but 1 --label"):
        labels("--load", "a", "--load", "b", "--label", "tv")
    with pytest.raises(ValueError, match="named alike"):
        labels("--load", "one/tv", "--load", "two/tv")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--sweep-gammas", "0"], "--sweep-gammas must be at least 1, got 0"),
        (["--sweep-temperatures", "-1"], "temperature must be 0"),
        (["--speed-tokens", "0"], "--speed-tokens must be at least 1"),
    ],
)
def test_bad_sweeps_are_refused(flags, message):
    options = parser().parse_args(["--load", "x", "--prompts", "y", "--report", "z", *flags])
    with pytest.raises(ValueError, match=message):
        plan_of(options)
    assert config_of(options, "rejection").gamma == 3


def test_several_checkpoints_without_a_report_are_refused():
    with pytest.raises(SystemExit) as stop:
        main(["--load", "a", "--load", "b", "--prompts", "x"])
    assert "add --report" in str(stop.value)


def test_a_change_is_split_into_entropy_and_mismatch(tmp_path):
    points = [Point(str(at), "rejection", 1 + 0.1 * at, 0.8 - 0.02 * at - 0.01 * max(0, at - 3)) for at in range(8)]
    split = over_time(points, 4)
    assert split["slope"] == pytest.approx(-0.2)
    last = split["points"][-1]
    assert last["entropy_part"] == pytest.approx(-0.14)
    assert last["mismatch_part"] == pytest.approx(-0.04)
    assert last["entropy_part"] + last["mismatch_part"] == pytest.approx(last["change"])
    with pytest.raises(ValueError, match="no line through the first 2"):
        over_time([replace(point, entropy=1.0) for point in points], 2)
    # checkpoints bring the slope of their own tokens
    found = {"slope": {"value": -0.3}}
    own = over_time([replace(points[0], found=found), replace(points[4], found=found)], None)
    assert own["points"][-1]["entropy_part"] == pytest.approx(-0.12)
    assert own["slope_from"] == "tokens of 0"


def test_a_training_log_is_read_and_split(tmp_path, capsys):
    line = (
        " [2026-11-30 10:00:00] iteration {at:8d}/     100 | consumed samples: 16 | lm loss: 4.0E+00 | "
        "mtp accept-length/rejection: {length:.6E} | mtp target entropy: {entropy:.6E} | skipped: 0 |"
    )
    log = tmp_path / "train.log"
    lines = [line.format(at=10 * n, length=2.5 - 0.02 * n, entropy=2 + 0.1 * n) for n in range(1, 13)]
    log.write_text("noise\n" + "\n".join(lines))
    assert len(from_log(str(log), ["rejection", "target-only"])) == 12
    main(["entropy", "--log", str(log), "--report", str(tmp_path / "out")])
    shown = capsys.readouterr().out
    assert "from 10 to 120 acceptance changed by -0.220" in " ".join(shown.split())
    payload = json.loads((tmp_path / "out" / "entropy.json").read_text())
    assert payload["over_time"][0]["slope"] == pytest.approx(-0.2, rel=1e-3)
    assert (tmp_path / "out" / "entropy_over_time.png").stat().st_size > 5000
    log.write_text("nothing")
    (tmp_path / "half.json").write_text("{")
    for wrong, message in (
        (["--log", str(log)], "no line with"),
        (["--load", "x"], "either --prompts"),
        (["--results", str(tmp_path / "half.json")], r"half\.json is no JSON"),
        (["--log", str(log), "--report", "/proc/x"], "--report /proc/x cannot be written"),
    ):
        with pytest.raises(SystemExit, match=f"error: .*{message}"):
            main(["entropy", *wrong])


@on_cpu
@pytest.mark.dist
def test_the_command_reports_resumes_and_compares(checkpoint, prompts, tmp_path):
    done = run_module("tests.evaluation.report_process", checkpoint, prompts, str(tmp_path), *SIZES)
    assert done.succeeded().strip().endswith("done")
    rows = load_rows(tmp_path / "results.json")
    assert len(rows) == 2 * (2 + 2 + 2)
    payload = json.loads((tmp_path / "results.json").read_text())
    for found in payload["full_forward"]:
        # the decoder and the full forward pass agree at every step
        assert all(step["worst"] < 4.5 for step in found["steps"])
        difference = found["difference"]
        assert abs(difference["value"]) <= 4 * difference["stderr"]
    assert len(payload["speed"]) == 4
    assert {row.checkpoint.rpartition(" at ")[2] for row in rows} == {"iteration 12"}
    split = json.loads((tmp_path / "entropy" / "entropy.json").read_text())
    assert [change["rule"] for change in split["over_time"]] == ["rejection", "target-only"]
    # one checkpoint under two names, one text: nothing has changed
    assert split["over_time"][0]["points"][1]["change"] == pytest.approx(0, abs=1e-6)
    assert (tmp_path / "given" / "entropy.svg").exists()
    assert math.isfinite(split["points"][0]["found"]["slope"]["low"])
