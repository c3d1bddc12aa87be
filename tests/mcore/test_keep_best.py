"""The folder of the best checkpoint is whole whenever someone looks; refusals that need no run.

Catches: a half-written best, one lost between two renames, leftovers of a killed run that are taken for the best.
"""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from bebop_megatron.mcore.keep_best import RECORD, check_keep_best, publish, read_record, recover


def checkpoint(folder, name, value=None):
    folder.mkdir()
    (folder / name).write_text(name)
    if value is not None:
        (folder / RECORD).write_text(json.dumps({"value": value}))


def test_the_new_best_takes_the_place_of_the_old_with_its_record(tmp_path):
    best, partial = tmp_path / "best", tmp_path / "best.partial"
    checkpoint(best, "weights-1", 1.0)
    checkpoint(partial, "weights-2")
    publish(partial, best, {"value": 2.0})
    assert sorted(path.name for path in best.iterdir()) == [RECORD, "weights-2"]
    assert [path.name for path in tmp_path.iterdir()] == ["best"]
    assert read_record(tmp_path) == {"value": 2.0}


@pytest.mark.parametrize(
    ("left", "weights"),
    [
        # killed while writing, between the two renames, before the old one was removed
        ({"best": 1.0, "best.partial": None}, "best"),
        ({"best.partial": 2.0, "best.old": 1.0}, "best.partial"),
        ({"best": 2.0, "best.old": 1.0}, "best"),
        # killed while writing the first one
        ({"best.partial": None}, None),
        ({}, None),
    ],
)
def test_a_killed_run_leaves_the_newest_that_was_whole(tmp_path, left, weights):
    for name, value in left.items():
        checkpoint(tmp_path / name, name, value)
    before = read_record(tmp_path)
    recover(tmp_path / "best")
    assert read_record(tmp_path) == before
    assert [path.name for path in tmp_path.iterdir()] == ([] if weights is None else ["best"])
    assert weights is None or (tmp_path / "best" / weights).is_file()


def arguments(**changes):
    usual = {"save": "runs", "full_validation": False, "eval_iters": 10, "eval_interval": 100, "split": None}
    return SimpleNamespace(**usual | {"train_data_path": None, "valid_data_path": None} | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eval_iters": 0}, "--eval-iters is 0"),
        ({"eval_interval": None}, "--eval-interval is 0"),
        ({"split": "99,0,1"}, "--split 99,0,1 leaves none"),
        ({"split": "1"}, "--split 1 leaves none"),
        ({"train_data_path": ["a"]}, "without --valid-data-path"),
        ({"save": None}, "needs --save"),
    ],
)
def test_without_validation_data_it_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        check_keep_best(arguments(**changes), True, {})


def test_with_validation_data_it_is_not_and_other_conditions_are_named(tmp_path):
    check_keep_best(arguments(save=tmp_path, split="969, 30, 1"), True, {})
    check_keep_best(arguments(save=tmp_path, eval_iters=0, full_validation=True), True, {})
    checkpoint(tmp_path / "best", "weights", 1.0)
    record = {"value": 2.5, "conditions": {"depths": 3, "draft_temperature": 1.0}}
    (tmp_path / "best" / RECORD).write_text(json.dumps(record))
    check_keep_best(arguments(save=tmp_path), True, record["conditions"])
    with pytest.raises(ValueError, match=r"another draft_temperature, and its accept length 2.500"):
        check_keep_best(arguments(save=tmp_path), True, {"depths": 3, "draft_temperature": 0.7})
