"""Installing and uninstalling. Catches a seam bound in the wrong module, double wrapping, and a silent mismatch."""

import pytest

from bebop_megatron.mcore import compat, install, uninstall

SEAMS = (*compat.LOSS_SEAMS, *compat.SCHEDULE_SEAMS, compat.EMBEDDING_SEAM)


def bound():
    return {(s.module, s.name): getattr(s.owner(), s.name) for s in SEAMS}


@pytest.fixture
def clean():
    uninstall()
    yield bound()
    uninstall()


def test_install_wraps_every_seam_once_and_uninstall_restores_it(clean):
    install()
    install()
    for key, function in bound().items():
        assert function is not clean[key]
        assert function.__wrapped__ is clean[key]
    uninstall()
    assert bound() == clean
    assert isinstance(vars(compat.LOGGING_SEAM.owner())[compat.LOGGING_SEAM.name], staticmethod)


def test_missing_name_is_reported_with_versions_and_nothing_is_changed(clean, monkeypatch):
    import megatron.core.pipeline_parallel.schedules as schedules

    original = schedules.forward_backward_no_pipelining
    monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
    with pytest.raises(RuntimeError, match=r"forward_backward_no_pipelining.*tested with 0\.19\.2"):
        install()
    monkeypatch.setattr(schedules, "forward_backward_no_pipelining", original, raising=False)
    assert bound() == clean


def test_changed_signature_is_reported(clean, monkeypatch):
    import megatron.core.models.gpt.gpt_model as gpt_model

    monkeypatch.setattr(gpt_model, "process_mtp_loss", lambda hidden_states: hidden_states)
    with pytest.raises(RuntimeError, match="no longer takes labels"):
        install()


def test_other_megatron_version_is_refused(clean, monkeypatch):
    import megatron.core

    monkeypatch.setattr(megatron.core, "__version__", "0.16.1")
    with pytest.raises(RuntimeError, match=r"megatron-core 0\.16\.1 is not supported.*0\.19"):
        install()


def test_missing_name_that_is_only_read_is_reported(clean, monkeypatch):
    monkeypatch.setattr(compat, "CONFIG_FIELDS", (*compat.CONFIG_FIELDS, "mtp_gone"))
    with pytest.raises(RuntimeError, match=r"TransformerConfig\.mtp_gone, which .* reads \(tested with 0\.19\.2\)"):
        install()
    monkeypatch.undo()
    group = "megatron.core.distributed.param_and_grad_buffer:_ParamAndGradBucketGroup"
    monkeypatch.setattr(compat, "CONSTRUCTED", ((group, ("gone",)),))
    with pytest.raises(RuntimeError, match=r"_ParamAndGradBucketGroup\.gone"):
        install()
    assert bound() == clean
