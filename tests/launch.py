"""Starts `bebop_megatron.pretrain` the way a user does, and reads Megatron's log line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64 --normalization RMSNorm --disable-bias-linear --swiglu
--qk-layernorm --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 2
--mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0""".split()
RUN = """--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion --num-workers 0
--ckpt-format torch_dist --micro-batch-size 2 --global-batch-size 4 --lr 1e-2 --lr-decay-style constant --log-interval 1
--eval-interval 1000000 --eval-iters 1 --tokenizer-type NullTokenizer --vocab-size 95""".split()


def _launch(
    arguments: tuple[str, ...], processes: int, mock_data: bool = True, model: list[str] = MODEL
) -> tuple[list[str], dict[str, Any]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "bebop_megatron.pretrain", *model, *RUN, *(["--mock-data"] if mock_data else []), *arguments]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    return command, {"text": True, "cwd": ROOT, "env": environment}


def pretrain(
    *arguments: str, processes: int = 1, timeout: int = 240, mock_data: bool = True, model: list[str] = MODEL
) -> subprocess.CompletedProcess[str]:
    """Run the training entry point under torchrun on a free local port, to its end."""
    command, options = _launch(arguments, processes, mock_data, model)
    return subprocess.run(command, capture_output=True, timeout=timeout, check=False, **options)


def start(*arguments: str) -> subprocess.Popen[str]:
    """Start the training entry point and return while it runs; its output is one stream."""
    command, options = _launch(arguments, 1)
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)


def log(output: str) -> dict[int, dict[str, str]]:
    """Megatron's log lines: iteration -> name -> printed value, without times."""
    lines = {}
    for line in output.splitlines():
        match = re.search(r"iteration +(\d+)/ +\d+ \|(.*)", line)
        if match:
            pairs = [part.rsplit(":", 1) for part in match[2].split("|") if ":" in part]
            values = {name.strip(): value.strip() for name, value in pairs}
            lines[int(match[1])] = {k: v for k, v in values.items() if "elapsed" not in k}
    return lines
