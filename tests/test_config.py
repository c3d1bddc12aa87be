"""Settings of the objective: what the flags become, and what is refused before anything is built."""

from __future__ import annotations

import pytest

from bebop_megatron.config import MetricsConfig, ObjectiveConfig, given


def test_a_warm_up_hands_over_linearly_and_then_leaves_nothing_behind():
    config = ObjectiveConfig(loss="tv", warmup="kl:8")
    assert [config.keywords(i)["mix"] for i in (0, 2, 7)] == [("kl", 1.0), ("kl", 0.75), ("kl", 0.125)]
    for iteration in (8, 9, 10**6):
        assert config.keywords(iteration) == ObjectiveConfig(loss="tv").keywords(0)


def test_each_side_has_the_shared_temperature_unless_it_has_its_own():
    assert ObjectiveConfig(loss="kl", temperature=0.7).keywords(0)["draft_temperature"] == 0.7
    keywords = ObjectiveConfig(loss="kl", temperature=0.7, target_temperature=1.5).keywords(0)
    assert (keywords["draft_temperature"], keywords["target_temperature"]) == (0.7, 1.5)


def test_flags_that_were_given_are_known_by_their_names():
    assert given(MetricsConfig()) == []
    assert given(MetricsConfig(level="full", entropy_baseline=3)) == ["--mtp-metrics", "--mtp-entropy-baseline"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"warmup": "kl:5", "joint": True}, "--mtp-loss-warmup, --mtp-joint: no effect on Megatron's own MTP loss"),
        ({"target_top_k": 5}, "--mtp-target-top-k: no effect on Megatron's own MTP loss, give --mtp-loss as well"),
        ({"loss": "tv", "warmup": "kl"}, "expected loss:iterations, for example kl:500"),
        ({"loss": "tv", "warmup": "kl:0"}, "expected loss:iterations, for example kl:500"),
        ({"loss": "tv", "warmup": "soft:5"}, "with a loss out of ce, kl"),
        ({"loss": "tv", "horizon": "per-depth"}, "has no per-depth horizon"),
        ({"loss": "kl", "warmup": "tv:5", "horizon": "per-depth"}, "has no per-depth horizon"),
        ({"loss": "kl", "draft_temperature": 0.0}, "draft_temperature must be positive"),
        ({"loss": "kl", "target_top_p": 1.5}, "target_top_p must lie in"),
        ({"loss": "reverse-kl", "target_top_k": 5}, "'reverse-kl' is infinite"),
        ({"loss": "ce", "truncate_top_k": 5}, "a label of 'ce' may not be one"),
        ({"loss": "kl", "backend": "cuda"}, "unknown backend 'cuda'"),
    ],
)
def test_what_makes_no_sense_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**settings)
