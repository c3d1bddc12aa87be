"""The CPU platform. Catches a shim that stays on, that starts by accident, or that moves tensors wrongly."""

import subprocess
import sys

import pytest
import torch

from bebop_megatron.platform import cpu


def run(code: str) -> str:
    """A fresh interpreter: the shim must be seen from before Megatron is imported."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is present")
def test_entering_redirects_cuda_and_leaving_restores_everything():
    out = run(
        "import torch, bebop_megatron.platform as p\n"
        "before = {n: getattr(torch, n) for n in ('zeros', 'empty_like', 'tensor')} | {'to': torch.Tensor.to}\n"
        "p.enter(); p.enter()\n"
        "x = torch.zeros(2, device='cuda').to('cuda:0').cuda()\n"
        "assert x.device.type == 'cpu' and x.type() == 'torch.cuda.FloatTensor'\n"
        "assert torch.empty_like(x, device=torch.device('cuda')).device.type == 'cpu'\n"
        "assert torch.nn.Linear(2, 2).to('cuda').weight.device.type == 'cpu'\n"
        "torch.manual_seed(3); a = torch.rand(2); torch.cuda.manual_seed(3); assert torch.equal(a, torch.rand(2))\n"
        "p.leave()\n"
        "assert not torch.cuda.is_available() and x.type() == 'torch.FloatTensor'\n"
        "assert all(getattr(torch, n, None) is f or getattr(torch.Tensor, n, None) is f for n, f in before.items())\n"
        "print('ok')\n"
    )
    assert out.strip().endswith("ok")


def test_gpu_machine_never_enters(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert cpu.maybe_enter_cpu(["--distributed-backend", "gloo"]) is False
    with pytest.raises(RuntimeError, match="CUDA device"):
        cpu.enter()
    assert not cpu.active()


def test_cpu_machine_asks_for_gloo(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match="--distributed-backend gloo"):
        cpu.maybe_enter_cpu(["--num-layers", "2"])


@pytest.mark.parametrize(
    ("arguments", "backend"),
    [([], "nccl"), (["--distributed-backend", "gloo"], "gloo"), (["--distributed-backend=gloo"], "gloo")],
)
def test_backend_is_read_from_the_command_line(arguments, backend):
    assert cpu.requested_backend(arguments) == backend
