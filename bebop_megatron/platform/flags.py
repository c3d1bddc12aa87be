"""Megatron's flags for a machine without a GPU, or without the extensions that its fused kernels need."""

from __future__ import annotations

# without these Megatron asks for apex or Transformer Engine, or compiles a kernel
UNFUSED = (
    "--no-gradient-accumulation-fusion",
    "--no-persist-layer-norm",
    "--no-masked-softmax-fusion",
    "--no-bias-swiglu-fusion",
    "--no-bias-dropout-fusion",
    "--no-rope-fusion",
)
# the backend is what `maybe_enter_cpu` looks for
ON_CPU = ("--distributed-backend", "gloo", "--use-cpu-initialization")
