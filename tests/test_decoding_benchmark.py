"""What the decoding benchmark says about given measurements.

Catches: ratios across rounds, a break-even that adaptive gamma decides, a figure or table that a slow head breaks.
"""

from __future__ import annotations

import json

import pytest

from benchmarks import decoding


def _data(speeds: dict[str, list[float]]) -> dict:
    entries = []
    for batch in (1, 8):
        for name, values in speeds.items():
            length = 1.0 if name == "0" else 2.0
            entries.append(
                {
                    "batch": batch,
                    "gamma": name,
                    "tokens": [100] * len(values),
                    "seconds": [100 / value for value in values],
                    "accept_length": length,
                    "accept_length_error": 0.05,
                    "accept_rate": 0.5,
                    "mean_gamma": 2.0,
                    "verifications": 50,
                }
            )
    environment = {"cpu": "a CPU", "cores": 2, "threads": 1, "torch": "2.13.0", "date": "2026-11-30"}
    setting = {"batches": [1, 8], "layers": 2, "hidden": 64, "vocab": 512, "temperature": 1.0, "rule": "rejection"}
    return {"environment": environment, "setting": setting | {"data": "held-out text"}, "entries": entries}


# the machine became three times slower in the second round, which no ratio may show
FAST = {"0": [90.0, 30.0], "1": [108.0, 36.0], "2": [135.0, 45.0], "3": [117.0, 39.0], "4": [81.0, 27.0]}
FAST |= {"5": [72.0, 24.0], "adaptive": [126.0, 42.0]}
SLOW = {name: [values[0] / (1 if name == "0" else 4)] for name, values in FAST.items()}


def test_ratios_are_taken_within_a_round():
    ratio = decoding.ratios(_data(FAST)["entries"], 8)
    middle = {name: pytest.approx(value.middle) for name, value in ratio.items()}
    assert middle == {"1": 1.2, "2": 1.5, "3": 1.3, "4": 0.9, "5": 0.8, "adaptive": 1.4}
    assert ratio["2"].low == pytest.approx(ratio["2"].high)
    assert decoding.break_even(ratio) == 3
    entry = next(e for e in _data(FAST)["entries"] if e["gamma"] == "4")
    # 0.9 times as fast with 2 tokens a step: 2 / 0.9 would have been needed
    assert decoding.needed_length(entry, ratio["4"]) == pytest.approx(2 / 0.9)
    assert decoding.break_even(decoding.ratios(_data(SLOW)["entries"], 1)) == 0


@pytest.mark.parametrize(("speeds", "verdict"), [(FAST, "break-even gamma 3"), (SLOW, "never pays")])
def test_table_and_figure_come_from_the_data_file(tmp_path, capsys, speeds, verdict):
    path = tmp_path / "data" / "decoding-x.json"
    path.parent.mkdir()
    path.write_text(json.dumps(_data(speeds)))
    decoding.main(["--data", str(path)])
    assert (tmp_path / "figures/decoding-x.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert printed.count(verdict) == 2
    for named in ("rule rejection", "T=1", "attention chain", "held-out text", "a CPU", "2026-11-30"):
        assert named in printed
