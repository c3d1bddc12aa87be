"""The doctor. Catches a seam that is gone and not reported, an exit status that lies, output that is not JSON."""

from __future__ import annotations

import json

import pytest
import torch

from bebop_megatron import doctor
from bebop_megatron.mcore import compat


@pytest.fixture(scope="module")
def report():
    return doctor.examine()


def find(report, section, name):
    return next(line for line in report.sections[section] if line.name == name)


def test_this_environment_trains(report, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "examine", lambda: report)
    assert doctor.main(["--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["trains"] is True
    assert data["blockers"] == []
    lines = {line["name"]: line for lines in data["sections"].values() for line in lines}
    assert lines["megatron-core"]["found"].startswith("0.19.")
    assert lines["objective"]["found"].endswith("as expected")
    assert lines["gloo"]["ok"] is True
    assert lines["bebop_megatron.pretrain"]["ok"] is True
    assert doctor.main([]) == 0
    text = capsys.readouterr().out
    for part in ("Versions", "freeze schedules", "Training can work here."):
        assert part in text


@pytest.mark.skipif(torch.cuda.is_available(), reason="says what a machine without a GPU says")
def test_machine_without_gpu_is_told_how_to_train(report):
    assert find(report, "Devices", "CUDA").ok is None
    assert "--distributed-backend gloo" in find(report, "Devices", "CUDA").advice
    assert find(report, "Kernels", "objective, --mtp-loss-backend auto").found == "PyTorch"
    assert find(report, "What works here", "fp8").ok is None


def test_every_seam_of_a_missing_name_is_reported_and_blocks(monkeypatch, capsys):
    from megatron.core.pipeline_parallel import schedules

    monkeypatch.delattr(schedules, "forward_backward_no_pipelining")
    monkeypatch.setattr(doctor, "_try_gloo", lambda: None)
    broken = doctor.examine()
    line = find(broken, "Megatron", "objective")
    assert line.ok is False
    assert "schedules.forward_backward_no_pipelining" in line.found
    assert find(broken, "Megatron", "GPT builder").ok
    assert not find(broken, "What works here", "bebop_megatron.pretrain").ok
    monkeypatch.setattr(doctor, "examine", lambda: broken)
    assert doctor.main([]) == 1
    assert "Training cannot work: objective: " in capsys.readouterr().out


def test_survey_covers_everything_that_is_rebound():
    surveyed = {where for _, where, _ in compat.survey()}
    groups = (compat.LOSS_SEAMS, compat.SCHEDULE_SEAMS, compat.FREEZE_SEAMS, compat.GROUP_KEY_SEAMS, compat.LOOP_SEAMS)
    for seam in (seam for group in groups for seam in group):
        assert f"{seam.module.replace(':', '.')}.{seam.name}" in surveyed
    assert all(problem is None for _, _, problem in compat.survey())


@pytest.mark.parametrize(
    ("name", "version", "ok", "text"),
    [
        ("apex", "0.9.10", False, "not NVIDIA's"),
        ("nemo", "3.0.0", False, "gone since 3.0"),
        ("nemo", "2.7.3", True, ""),
        ("vllm", None, None, "environment of its own"),
    ],
)
def test_wrong_packages_are_named(name, version, ok, text):
    found, advice = doctor._advice(name, version)
    assert found is ok
    assert text in advice


def test_gloo_that_does_not_start_blocks_a_machine_without_gpu(monkeypatch):
    def fail():
        raise RuntimeError("no interface")

    monkeypatch.setattr(doctor, "_try_gloo", fail)
    report = doctor.Report()
    doctor._backends(report, gpu=False)
    assert report.blockers == ["gloo: no interface. GLOO_SOCKET_IFNAME=lo names the network interface."]
