"""What a freeze schedule refuses before training. Catches a combination that would train something else than asked."""

from __future__ import annotations

from argparse import Namespace

import pytest

from bebop_megatron.config import FreezeConfig, ObjectiveConfig
from bebop_megatron.mcore.freeze_checks import check_freezing
from bebop_megatron.mcore.freeze_optimizer import PART, STEPS, with_own_learning_rate


def check(schedule="backbone:5,none:5", objective=None, args=None, **options):
    given = {"mtp_num_layers": 2, "hybrid_layer_pattern": None, "optimizer": "adam", "clip_grad": 1.0, **(args or {})}
    freezing = FreezeConfig(schedule=schedule, **options)
    objective = ObjectiveConfig(loss="tv") if objective is None else objective
    check_freezing(freezing, objective, Namespace(**given))


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ({"args": {"mtp_num_layers": None}}, "needs MTP layers: add --mtp-num-layers"),
        ({"schedule": "mtp:3,none:1", "args": {"mtp_num_layers": 0}}, "needs MTP layers"),
        ({"objective": ObjectiveConfig()}, "needs --mtp-loss"),
        ({"schedule": "backbone", "objective": ObjectiveConfig(loss="kl", joint=True)}, "drop one"),
        ({"schedule": "backbone@tv", "objective": ObjectiveConfig(loss="ce", horizon="per-depth")}, "no per-depth"),
        ({"args": {"optimizer": "sgd"}}, "need --optimizer adam, got sgd"),
        ({"args": {"use_megatron_fsdp": True}}, "--use-megatron-fsdp cannot be combined"),
        ({"args": {"freeze_all_layers": True}}, "--freeze-all-layers cannot be combined"),
        ({"args": {"cuda_graph_impl": "local"}}, "--cuda-graph-impl local"),
        ({"clip_grad": 0.1, "args": {"clip_grad": 0.0}}, "--clip-grad above 0"),
        ({"clip_grad": 0.1, "objective": ObjectiveConfig(loss="kl", joint=True)}, "needs a detached MTP head"),
    ],
)
def test_what_cannot_go_together_is_refused(case, message):
    with pytest.raises(ValueError, match=message):
        check(**case)


def test_what_goes_together_is_accepted():
    check()
    check("backbone:5@kl,mtp:2,none:1", objective=ObjectiveConfig(loss="kl", joint=True))
    check(None, lr=1e-3, clip_grad=0.5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": " "}, "is empty"),
        ({"schedule": "backbone:-1"}, "positive whole number"),
        ({"lr": 0.0}, "--mtp-lr must be positive"),
        ({"lr_schedule": "cosine"}, "follow or constant"),
        ({"lr_warmup_iters": -1}, "must not be negative"),
        ({"clip_grad": -1.0}, "--mtp-clip-grad must be positive"),
        ({"phase_reset_moments": True}, "no effect without --mtp-freeze-schedule"),
    ],
)
def test_bad_settings_are_refused_in_the_users_words(options, message):
    with pytest.raises(ValueError, match=message):
        FreezeConfig(**options)


def rates(steps, **options):
    """The head's learning rate after so many of its own steps, in the middle of a decaying main schedule."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    group = {PART: "mtp", STEPS: 0, "max_lr": 0.5, "min_lr": 0.0}
    groups = Namespace(param_groups=[{PART: "backbone", STEPS: 0, "max_lr": 1.0, "min_lr": 0.0}, group])
    scheduler = OptimizerParamScheduler(groups, 0.0, 1.0, 0.0, 0, 100, "linear", 0.0, 0.0, 100, "constant")
    with_own_learning_rate(scheduler, FreezeConfig(lr=0.5, **options))
    scheduler.step(50)
    found = []
    for count in steps:
        group[STEPS] = count
        scheduler.step(0)
        found.append(group["lr"])
    assert groups.param_groups[0]["lr"] == pytest.approx(0.5)
    return found


def test_learning_rate_follows_or_stays_and_warms_up_by_the_heads_own_steps():
    assert rates([0, 9]) == pytest.approx([0.25, 0.25])
    assert rates([0, 9], lr_schedule="constant") == pytest.approx([0.5, 0.5])
    assert rates([0, 1, 3, 9], lr_warmup_iters=4) == pytest.approx([0.0625, 0.125, 0.25, 0.25])
    assert rates([0, 3], lr_warmup_iters=4, lr_schedule="constant") == pytest.approx([0.125, 0.5])
