"""Refusals come before training, name the flag, and say what to do. Catches a run that hangs or trains on nonsense."""

from __future__ import annotations

import argparse

import pytest
import torch

from bebop_megatron.mcore import compat, refusals


def config(**settings):
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if settings.get("multi_latent_attention") else TransformerConfig
    base = {
        "num_layers": 4,
        "hidden_size": 16,
        "num_attention_heads": 4,
        "mtp_num_layers": 2,
        "pipeline_dtype": torch.float32,
    }
    return kind(**(base | settings))


OVERLAPPED = {"overlap_p2p_comm": True, "batch_p2p_comm": False}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ettttmm|L"}, "pipeline rank 0"),
        (
            {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|tt|mm|L"} | OVERLAPPED,
            r"stages 1, 3, 5, \.\.\. of the layout belong to rank 0",
        ),
        (
            {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
            "overlap_p2p_comm=True, batch_p2p_comm=False",
        ),
        ({"fp8": "hybrid"}, "needs Transformer Engine"),
        ({"multi_latent_attention": True, "tensor_model_parallel_size": 2}, "--sequence-parallel"),
    ],
    ids=["m-on-rank-0", "m-on-rank-0-virtual", "virtual-without-overlap", "fp8", "latent-attention"],
)
def test_config_is_refused_with_what_to_do(settings, message, monkeypatch):
    if settings.get("fp8") and compat.have_transformer_engine():
        monkeypatch.setattr(compat, "have_transformer_engine", lambda: False)
    with pytest.raises(ValueError, match=message):
        refusals.check_config(config(**settings))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Ett|ttmmL"},
        {"pipeline_model_parallel_size": 4, "pipeline_model_parallel_layout": "Ett|tt|mm|L"},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2} | OVERLAPPED,
        {"multi_latent_attention": True, "tensor_model_parallel_size": 2, "sequence_parallel": True},
    ],
)
def test_what_works_is_not_refused(settings):
    refusals.check_config(config(**settings))


def test_attach_refuses_too():
    from bebop_megatron.config import ObjectiveConfig
    from bebop_megatron.mcore import attach

    with pytest.raises(ValueError, match="pipeline rank 0"):
        attach(
            config(pipeline_model_parallel_size=2, pipeline_model_parallel_layout="Ettttmm|L"),
            ObjectiveConfig(loss="tv"),
        )
    changing = config()
    changing.hybrid_context_parallel = True
    with pytest.raises(ValueError, match="use --context-parallel-size alone"):
        attach(changing, ObjectiveConfig(loss="tv"))


@pytest.mark.parametrize(
    ("pattern", "layout", "message"),
    [
        ("*-*-/*-", "Et*2|t*2|m|L", r"mark the stages with \| in --hybrid-layer-pattern"),
        ("*-|*-||/*-", None, "its last stage has no backbone layer"),
    ],
)
def test_hybrid_with_a_separate_mtp_stage_is_refused(pattern, layout, message):
    with pytest.raises(ValueError, match=message):
        refusals.check_hybrid(pattern, layout)


def test_hybrid_with_mtp_on_the_last_stage_is_not_refused():
    refusals.check_hybrid("G-G-|G-*-/*-", None)
    refusals.check_hybrid("*-|*-|", None)


def arguments(monkeypatch, saved, **settings):
    monkeypatch.setattr(refusals, "starting_dir", lambda root, step: root)
    monkeypatch.setattr(compat, "checkpoint_layout", lambda folder: saved)
    base = {
        "use_distributed_optimizer": True,
        "finetune": False,
        "no_load_optim": False,
        "tensor_model_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "padded_vocab_size": 128,
        "load": None,
        "ckpt_step": None,
        "moe_use_upcycling": False,
    }
    return argparse.Namespace(**(base | settings))


@pytest.mark.parametrize(
    ("kind", "tensor", "refused"),
    [("dp_reshardable", 2, True), ("dp_reshardable", 1, False), ("fully_reshardable", 2, False), (None, 2, False)],
)
def test_flat_optimizer_state_is_not_cut_anew(monkeypatch, tmp_path, kind, tensor, refused):
    args = arguments(monkeypatch, compat.SavedLayout(1, 1, kind), tensor_model_parallel_size=tensor)
    if refused:
        with pytest.raises(ValueError, match="--dist-ckpt-optim-fully-reshardable"):
            refusals.check_resuming(args, tmp_path)
    else:
        refusals.check_resuming(args, tmp_path)


def test_step_that_is_asked_for_is_read_and_not_the_newest(monkeypatch, tmp_path):
    args = argparse.Namespace(ckpt_step=3)
    read = []
    monkeypatch.setattr(compat, "checkpoint_layout", read.append)
    # no file names a newest one
    refusals.check_resuming(args, tmp_path)
    assert read == [tmp_path / "iter_0000003"]


def test_checkpoint_of_another_model_is_refused_with_every_flag_that_differs():
    args = argparse.Namespace(hybrid_layer_pattern=None, num_layers=2, hidden_size=64, num_attention_heads=4)
    saved = argparse.Namespace(num_layers=3, hidden_size=32, num_attention_heads=4, ffn_hidden_size=128)
    with pytest.raises(ValueError, match=r"--num-layers 3 there, 2 here; --hidden-size 32 there, 64 here$"):
        refusals.check_same_model(args, saved)
    refusals.check_same_model(args, argparse.Namespace(num_layers=2, hidden_size=64))


def test_vocabulary_padded_differently_is_refused_with_the_flag_that_keeps_it(monkeypatch, tmp_path):
    saved = compat.SavedLayout(1, 1, None, padded_vocab=128)
    args = arguments(monkeypatch, saved, tensor_model_parallel_size=2, padded_vocab_size=256)
    with pytest.raises(ValueError, match="--make-vocab-size-divisible-by 64"):
        refusals.check_resuming(args, tmp_path)
    refusals.check_resuming(arguments(monkeypatch, saved, tensor_model_parallel_size=2), tmp_path)


SCHEDULE = {
    "max_lr": 1e-3,
    "min_lr": 1e-4,
    "lr_warmup_steps": 8,
    "lr_decay_steps": 80,
    "lr_decay_style": "cosine",
    "start_wd": 0.1,
    "end_wd": 0.1,
    "wd_incr_steps": 80,
    "wd_incr_style": "constant",
}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, None),
        ({"train_iters": 40}, r"--train-iters: 80 there, 160 here; .*--override-opt-param-scheduler"),
        ({"lr": 2e-3}, r"--lr: 0\.001 there, 0\.002 here"),
        ({"train_iters": 40, "lr_decay_iters": 20}, r"length of the weight decay, --train-iters: 80 there, 160 here\."),
        ({"train_iters": 40, "override_opt_param_scheduler": True}, None),
        ({"train_iters": 40, "use_checkpoint_opt_param_scheduler": True}, None),
        ({"train_iters": 40, "no_load_optim": True}, None),
        ({"train_iters": 40, "moe_use_upcycling": True}, None),
        # it starts from there, it does not go on from there
        ({"train_iters": 40, "load": "elsewhere"}, None),
    ],
)
def test_another_learning_rate_schedule_is_refused_with_the_flag_that_means_it(monkeypatch, tmp_path, changed, message):
    flags = {
        "load": str(tmp_path),
        "train_iters": 20,
        "global_batch_size": 4,
        "lr": 1e-3,
        "min_lr": 1e-4,
        "lr_decay_iters": None,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": 2,
        "lr_warmup_fraction": None,
        "start_weight_decay": 0.1,
        "end_weight_decay": 0.1,
        "weight_decay_incr_style": "constant",
        "override_opt_param_scheduler": False,
        "use_checkpoint_opt_param_scheduler": False,
    }
    args = arguments(monkeypatch, compat.SavedLayout(1, 1, None, schedule=SCHEDULE), **(flags | changed))
    if message is None:
        refusals.check_resuming(args, tmp_path)
    else:
        with pytest.raises(ValueError, match=message):
            refusals.check_resuming(args, tmp_path)
