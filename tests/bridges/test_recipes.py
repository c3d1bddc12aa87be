"""Recipes for Megatron Bridge as far as they go without it. Catches a file that does not parse, a setting of ours that
does not exist, and an import error where a sentence should be.
"""

from __future__ import annotations

import pytest

from bebop_megatron.bridges import recipes
from bebop_megatron.bridges.megatron_bridge import adapt
from bebop_megatron.config import ObjectiveConfig
from bebop_megatron.mcore.presets import PRESETS

FILES = sorted(recipes.FOLDER.glob("*.yaml"))
FUNCTIONS = {"qwen3": recipes.qwen3, "qwen3_next": recipes.qwen3_next, "qwen3_5": recipes.qwen3_5}


def test_every_family_has_a_file_and_a_function():
    assert [path.stem for path in FILES] == sorted(FUNCTIONS)
    assert {recipes.read(path)["family"] for path in FILES} == set(PRESETS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_recipe_trains_the_head_alone_as_engines_serve_it(path):
    settings = recipes.read(path)
    assert (settings["objective"]["loss"], settings["freezing"]["schedule"]) == ("tv", "backbone")
    assert settings["attention"] == "chain"
    assert settings["model"]["seq_length"] == settings["dataset"]["seq_length"]


def test_changes_are_laid_over_a_section():
    settings = recipes.read(recipes.FOLDER / "qwen3.yaml", {"train": {"train_iters": 7}, "hf": "here"})
    assert settings["train"] == {"train_iters": 7, "global_batch_size": 256, "micro_batch_size": 1}
    assert settings["hf"] == "here"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modle": {}}, "unknown section 'modle': choose one of attention, checkpoint"),
        ({"objective": {"loss": "tvv"}}, "choose one of ce, kl"),
        ({"objective": {"los": "tv"}}, "section 'objective': .*'los'"),
        ({"freezing": {"schedule": "head"}}, "unknown part 'head'"),
    ],
)
def test_mistakes_are_refused_before_bridge_is_imported(changes, message):
    with pytest.raises(ValueError, match=message):
        recipes.read(recipes.FOLDER / "qwen3.yaml", changes)


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)
def test_without_the_package_a_recipe_says_what_to_install(function, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match=r"pip install 'bebop-megatron\[bridge\]'"):
        function()


def test_without_the_package_adapt_says_what_to_install(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RuntimeError, match="Megatron Bridge is not installed"):
        adapt(None, ObjectiveConfig(loss="tv"))
