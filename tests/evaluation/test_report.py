"""Results reach table, JSON, figure and text unchanged, and the text claims no more than they carry.

Caught here: conditional rates reported as prefix rates; rows of different settings compared; "best" within
the noise; a speed-up against another machine's baseline; a condition left unsaid; numbers cut off by a narrow
terminal.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from bebop_megatron.evaluation.environment import environment
from bebop_megatron.evaluation.figure import plot_acceptance
from bebop_megatron.evaluation.report import main, print_table, readings, table, write_markdown
from bebop_megatron.evaluation.results import EvaluationRow, load_rows, summary_payload
from bebop_megatron.outputs import write_json


def make_row(loss: str = "tv", rule: str = "rejection", rate: float = 0.5, **changes) -> EvaluationRow:
    values = {
        "gamma": 3,
        "temperature": 1.0,
        "accept_rate_per_step": [1.4 * rate, rate, 0.6 * rate],
        "accept_rate_per_step_conditional": [1.4 * rate, 1 / 1.4, 0.6],
        "accept_rate_stderr": 0.006,
        "tokens_per_second": 60.0,
        "baseline_tokens_per_second": 40.0,
        "num_tokens": 20_000,
        "num_verifications": 8000,
        "tokens_per_verification": 1 + 3 * rate,
        "data": "held-out code, 200 prompts",
        "environment": {"cpu": "some CPU", "torch": "2.13.0"},
    }
    values |= {"loss": loss, "rule": rule, "accept_rate": rate, "accept_length": 1 + 3 * rate}
    return EvaluationRow(**(values | changes))


ROWS = [
    make_row("ce", rate=0.447),
    make_row("kl", rate=0.487),
    make_row("tv", rate=0.496),
    make_row("ce", "target-only", 0.124),
    make_row("kl", "target-only", 0.132),
    make_row("tv", "target-only", 0.130),
]


def test_payload_has_the_promised_fields():
    payload = summary_payload(ROWS, 40.0)
    assert set(payload) == {"results", "baseline_tokens_per_second", "environment"}
    assert payload["baseline_tokens_per_second"] == 40.0
    promised = {
        "loss",
        "rule",
        "gamma",
        "temperature",
        "accept_rate",
        "accept_length",
        "accept_rate_per_step",
    }
    promised |= {"tokens_per_second", "num_tokens"}
    for result, row in zip(payload["results"], ROWS, strict=True):
        assert promised <= result.keys()
        assert EvaluationRow(**result) == row


def test_rows_survive_the_file(tmp_path):
    write_json(tmp_path / "deep" / "a.json", summary_payload(ROWS, 40.0))
    assert load_rows(tmp_path / "deep" / "a.json") == ROWS


def test_rows_take_from_their_file_what_they_lack(tmp_path):
    bare = replace(ROWS[0], environment=None, baseline_tokens_per_second=None)
    payload = summary_payload([bare], 30.0) | {"environment": {"cpu": "other"}}
    payload["results"][0]["a field of a later version"] = 1
    write_json(tmp_path / "a.json", payload)
    (row,) = load_rows(tmp_path / "a.json")
    assert row.speedup == 2.0
    assert row.environment == {"cpu": "other"}


@pytest.mark.parametrize(
    ("payload", "message"),
    [([], "no object"), ({}, "no evaluation"), ({"results": [{"loss": "tv"}]}, "lacks accept_length, accept_rate,")],
)
def test_a_file_that_is_no_evaluation_is_named(tmp_path, payload, message):
    (tmp_path / "a.json").write_text(json.dumps(payload))
    with pytest.raises(ValueError, match=message):
        load_rows(tmp_path / "a.json")


def test_environments_that_differ_are_all_kept():
    rows = [ROWS[0], replace(ROWS[1], environment={"cpu": "other", "torch": "2.13.0"})]
    assert summary_payload(rows, None)["environment"] == {"cpu": ["some CPU", "other"], "torch": "2.13.0"}


def test_environment_names_hardware_versions_and_date():
    found = environment()
    assert {"cpu", "cores", "threads", "python", "torch", "date"} <= found.keys()
    assert all(found.values())
    json.dumps(found)


def test_optional_numbers_of_a_row_that_are_not_finite_become_none():
    assert make_row(accept_rate_stderr=math.nan).accept_rate_stderr is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accept_length": 2.6}, "must equal both"),
        ({"accept_rate": 0.6}, "must equal both"),
        # conditional rates where prefix rates belong
        ({"accept_rate_per_step": [0.7, 1 / 1.4, 0.6]}, "prefix rates"),
        ({"accept_rate_per_step": [0.7, 0.8]}, "2 rates per step"),
        ({"gamma": 0, "accept_rate_per_step": []}, "without drafts is no row"),
    ],
)
def test_rates_that_contradict_each_other_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        make_row(**change)


@pytest.mark.parametrize("columns", [30, 80, 200])
def test_no_terminal_is_too_narrow_for_a_number(columns, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(columns))
    print_table([*ROWS, make_row("reverse-kl", temperature=0.6)])
    shown = capsys.readouterr().out
    for row in table(ROWS)[1]:
        (line,) = (line for line in shown.splitlines() if line.split()[:2] == row[:2])
        assert line.split() == " ".join([*row[:2], "1", *row[2:]]).split()
    # the usual table has room in the usual terminal
    print_table(ROWS)
    assert max(map(len, capsys.readouterr().out.splitlines())) <= max(columns, 80)


def test_table_shows_what_differs_and_says_the_rest_once(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    header, cells = table(ROWS)
    assert header == ["loss", "rule", "accept rate %", "accept length", "per step %", "tokens/s", "speed-up"]
    assert cells[2] == ["tv", "rejection", "49.6 ± 0.6", "2.49", "69.4 49.6 29.8", "60.0", "1.50x"]
    print_table(ROWS)
    shown = capsys.readouterr().out
    assert "49.6 ± 0.6" in shown
    assert "gamma 3, temperature 1, top-p 1" not in shown
    assert "gamma 3, temperature 1, attention chain, data held-out code, 200 prompts" in shown

    header, cells = table([ROWS[0], replace(ROWS[1], temperature=0.6, baseline_tokens_per_second=None)])
    assert header[2] == "temperature"
    assert [row[2] for row in cells] == ["1", "0.6"]
    assert cells[1][-1] == "-"


def test_no_rows_print_nothing_wrong(capsys):
    print_table([])
    assert "no results" in capsys.readouterr().out


def test_reading_names_the_best_and_whether_it_can_be_told():
    open_question = "within two standard errors, so this data does not tell them apart."
    assert readings(ROWS) == [
        f"rejection: tv is accepted most, 49.6 ± 0.6 %, 0.9 ± 0.8 points before kl: {open_question}",
        "rejection: tv - ce = 4.9 ± 0.8 points: more than two standard errors.",
        f"target-only: kl is accepted most, 13.2 ± 0.6 %, 0.2 ± 0.8 points before tv: {open_question}",
        f"target-only: tv - ce = 0.6 ± 0.8 points: {open_question}",
    ]


@pytest.mark.parametrize(("gap", "verdict"), [(0.0180, "more than two"), (0.0165, "within two"), (0.0, "within two")])
def test_two_standard_errors_of_the_difference_decide(gap, verdict):
    """Each row's error is 0.6 points, so the difference's is 0.85: two of the row's own would not do."""
    (best, *_) = readings([make_row("kl", rate=0.4), make_row("tv", rate=0.4 + gap)])
    assert verdict in best


def test_reading_does_not_judge_without_errors_or_company():
    rows = [
        make_row("ce", rate=0.3, accept_rate_stderr=None),
        make_row("tv", rate=0.9),
        make_row("kl", "target-only"),
    ]
    first, second = readings(rows)
    assert "60.0 points before ce: without a standard error this cannot be judged." in first
    assert second == "target-only: only kl was measured; nothing to compare."


def test_reading_never_compares_across_settings():
    rows = [make_row("ce", rate=0.3), make_row("tv", rate=0.9, temperature=0.6)]
    first, second = readings(rows)
    assert "only ce" in first
    assert "temperature 1," in first
    assert "only tv" in second
    assert "temperature 0.6," in second


def test_two_measurements_of_one_thing_are_refused(tmp_path):
    rows = [make_row("tv", rate=0.3), make_row("tv", rate=0.9)]
    for use in (readings, lambda rows: plot_acceptance(rows, tmp_path / "a.png")):
        with pytest.raises(ValueError, match="two rows for 'tv' under rejection"):
            use(rows)


@pytest.mark.parametrize(
    "rows",
    [
        ROWS,
        [make_row("a loss of one's own", rate=0.0, accept_rate_stderr=None, accept_rate_per_step=[0.0] * 3)],
        [replace(row, temperature=temperature) for row in ROWS for temperature in (0.6, 1.0)],
        [make_row("ce"), make_row("tv", gamma=1, accept_rate_per_step=[0.5], accept_length=1.5)],
    ],
    ids=["usual", "nothing accepted", "two settings", "two gammas"],
)
def test_figure_is_drawn_without_a_display_or_warnings(rows, tmp_path, recwarn):
    plot_acceptance(rows, tmp_path / "acceptance.png")
    assert (tmp_path / "acceptance.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [path.name for path in tmp_path.iterdir()] == ["acceptance.png"]
    assert not [str(warning.message) for warning in recwarn if "matplotlib" in warning.filename]


def test_text_holds_table_reading_conditions_and_environment(tmp_path):
    write_markdown(ROWS, tmp_path / "report.md", environment={"cpu": "some CPU"}, figure="acceptance.png")
    text = (tmp_path / "report.md").read_text()
    assert "| tv | rejection | 49.6 ± 0.6 | 2.49 | 69.4 49.6 29.8 | 60.0 | 1.50x |" in text
    assert "gamma 3, temperature 1, attention chain, data held-out code, 200 prompts" in text
    assert "- cpu: some CPU" in text
    assert "(acceptance.png)" in text
    for sentence in readings(ROWS):
        assert f"- {sentence}" in text


def test_nothing_to_report_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no rows"):
        write_markdown([], tmp_path / "report.md")
    with pytest.raises(ValueError, match="no rows"):
        plot_acceptance([], tmp_path / "acceptance.png")


def test_several_files_become_one_report(tmp_path, capsys):
    write_json(tmp_path / "a.json", summary_payload(ROWS[:3], 40.0))
    write_json(tmp_path / "b.json", summary_payload(ROWS[3:], 40.0))
    inputs = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    main(["--input", *inputs, "--output", str(tmp_path / "out")])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "acceptance.png",
        "report.md",
        "summary.json",
    ]
    assert json.loads((tmp_path / "out" / "summary.json").read_text()) == summary_payload(ROWS, 40.0)
    assert "target-only" in capsys.readouterr().out
    # its own output is an input
    main(["--input", str(tmp_path / "out" / "summary.json"), "--output", str(tmp_path / "again")])
    assert load_rows(tmp_path / "again" / "summary.json") == ROWS


@pytest.mark.parametrize(("temperature", "expected"), [(1.0, 30.0), (0.5, None)])
def test_a_merge_takes_the_median_baseline_of_one_setting_and_claims_none_for_several(tmp_path, temperature, expected):
    for name, baseline, at in (("a", 40.0, 1.0), ("b", 20.0, temperature)):
        row = make_row(name, baseline_tokens_per_second=baseline, temperature=at)
        write_json(tmp_path / f"{name}.json", summary_payload([row], baseline))
    main(["--input", str(tmp_path / "a.json"), str(tmp_path / "b.json"), "--output", str(tmp_path)])
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["baseline_tokens_per_second"] == expected
    # each row keeps its own, measured beside it
    assert [row.speedup for row in load_rows(tmp_path / "summary.json")] == [1.5, 3.0]


@pytest.mark.parametrize("content", ["{", '{"results": []}'])
def test_a_bad_input_ends_with_a_message(tmp_path, content, capsys):
    (tmp_path / "a.json").write_text(content)
    with pytest.raises(SystemExit):
        main(["--input", str(tmp_path / "a.json"), "--output", str(tmp_path / "out")])
    assert "error:" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
