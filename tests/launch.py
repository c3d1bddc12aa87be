"""Starts `bebop_megatron.pretrain` the way a user does, and reads Megatron's log line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

from bebop_megatron.platform.flags import ON_CPU, UNFUSED
from tests.forks import Run, run_module

ROOT = Path(__file__).resolve().parent.parent

MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64 --normalization RMSNorm --disable-bias-linear --swiglu
--qk-layernorm --position-embedding-type rope --untie-embeddings-and-output-weights --mtp-num-layers 2
--mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0""".split()
RUN = [
    *ON_CPU,
    *UNFUSED,
    *"""--num-workers 0 --ckpt-format torch_dist --micro-batch-size 2 --global-batch-size 4 --lr 1e-2
    --lr-decay-style constant --log-interval 1 --eval-interval 1000000 --eval-iters 1 --tokenizer-type NullTokenizer
    --vocab-size 95 --distributed-timeout-minutes 2""".split(),
]


def _flags(arguments: tuple[str, ...], mock_data: bool = True, model: list[str] = MODEL) -> list[str]:
    return [*model, *RUN, *(["--mock-data"] if mock_data else []), *arguments]


def pretrain(*arguments: str, processes: int = 1, mock_data: bool = True, model: list[str] = MODEL) -> Run:
    """Run the training entry point to its end."""
    return run_module("bebop_megatron.pretrain", *_flags(arguments, mock_data, model), processes=processes)


def start(*arguments: str, processes: int = 1) -> subprocess.Popen[str]:
    """Start the training entry point under torchrun and return while it runs; its output is one stream."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command += ["-m", "bebop_megatron.pretrain", *_flags(arguments)]
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "OMP_NUM_THREADS": "1"}
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, cwd=ROOT, env=environment, **streams)


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
