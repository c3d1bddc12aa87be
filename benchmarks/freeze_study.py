"""Does alternation help? Four ways to spend the same tokens on one model, judged by the same two numbers.

    python benchmarks/freeze_study.py --output runs/freeze-study

one-off      the backbone alone, then the head alone on the finished backbone (end-to-end TV)
alternating  the same shares of steps in turns
joint        both at once, head detached from the backbone
coupled      both at once, the MTP loss reaching the backbone

Every run sees the same batches of real code (the standard library of this interpreter). At each checkpoint: loss of the
language model on held-out text, and accept length of the head by rejection sampling on held-out prompts. Runs and
evaluations that are complete are not repeated.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from pathlib import Path

from bebop_megatron.evaluation.results import load_rows

MODEL = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 1000000 --seq-length 256 --max-position-embeddings 1024
--mtp-num-layers 3 --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0""".split()
RUN = """--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
--no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --micro-batch-size 8
--global-batch-size 8 --log-interval 10 --eval-iters 4 --split 98,2,0 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
--lr-warmup-fraction 0.05 --seed 1234""".split()
TOKENS_PER_STEP = 8 * 256


def strategies(steps: int, share: float, turns: int) -> dict[str, list[str]]:
    """Flags of each strategy; the backbone trains for `share` of the steps where it trains alone."""
    alone = round(steps * share)
    backbone, head = alone // turns, (steps - alone) // turns
    return {
        "one-off": ["--mtp-freeze-schedule", f"mtp:{alone},backbone"],
        "alternating": ["--mtp-freeze-schedule", f"mtp:{backbone},backbone:{head}"],
        "joint": ["--mtp-freeze-schedule", "none"],
        "coupled": ["--mtp-freeze-schedule", "none", "--mtp-joint"],
    }


def run(command: list[str], log: Path, threads: int) -> str:
    """Run a command to its end; its output goes to `log` and comes back.

    Raises:
        RuntimeError: it failed; with the end of what it printed.
    """
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    log.write_text(done.stdout + done.stderr)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command[:6])} ... failed, see {log}:\n{done.stderr[-2000:]}")
    return done.stdout


def build_data(folder: Path) -> None:
    """Tokenizer and data of the standard library, once."""
    base = [sys.executable, "-m", "bebop_megatron.data"]
    if not (folder / "tokenizer").is_dir():
        size = ["--vocab-size", "2048"]
        run(
            [*base, "tokenizer", "--input", "stdlib", *size, "--output", str(folder / "tokenizer")], folder / "t.log", 1
        )
    if not (folder / "stdlib.idx").is_file():
        where = ["--tokenizer", str(folder / "tokenizer"), "--holdout", "0.02", "--output", str(folder / "stdlib")]
        run([*base, "build", "--input", "stdlib", *where], folder / "b.log", 1)


def train(name: str, flags: list[str], args: argparse.Namespace) -> dict[int, float]:
    """Train one strategy: step -> held-out loss of the language model."""
    root, data = args.output / name, args.output / "data"
    log = args.output / f"{name}.log"
    tracker = root / "latest_checkpointed_iteration.txt"
    if not (tracker.is_file() and tracker.read_text() == str(args.steps) and log.is_file()):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["-m", "bebop_megatron.pretrain", *MODEL, *RUN, "--mtp-loss", args.loss, *flags]
        command += ["--train-iters", str(args.steps), "--save", str(root), "--save-interval", str(args.every)]
        command += ["--eval-interval", str(args.every), "--data-path", str(data / "stdlib")]
        command += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(data / "tokenizer")]
        run([*command, "--data-cache-path", str(data / "cache")], log, args.threads)
    found = re.findall(r"validation loss at iteration (\d+) \| lm loss value: ([0-9.E+-]+)", log.read_text())
    return {int(step): float(value) for step, value in found}


def accept_length(name: str, step: int, args: argparse.Namespace) -> float:
    """Accept length of a checkpoint's head under rejection sampling."""
    root, data = args.output / name, args.output / "data"
    output = args.output / f"{name}-{step}.json"
    if not output.is_file():
        (root / "latest_checkpointed_iteration.txt").write_text(str(step))
        command = [sys.executable, "-m", "bebop_megatron.evaluation", "--load", str(root), "--label", name]
        command += ["--rule", "rejection", "--gamma", "3", "--temperature", "1.0", "--batch-size", "16"]
        command += ["--tokenizer", str(data / "tokenizer"), "--prompts", str(data / "stdlib-holdout.jsonl")]
        command += ["--prompt-tokens", "64", "--max-new-tokens", "128", "--num-tokens", str(args.tokens)]
        try:
            run([*command, "--output", str(output)], args.output / f"{name}-{step}.log", 1)
        finally:
            (root / "latest_checkpointed_iteration.txt").write_text(str(args.steps))
    (row,) = load_rows(output)
    return row.accept_length


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/freeze-study"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--share", type=float, default=0.6, help="of the steps, for the backbone where it trains alone")
    parser.add_argument("--turns", type=int, default=4, help="cycles of the alternating run")
    parser.add_argument("--tokens", type=int, default=3000, help="generated for each evaluation")
    parser.add_argument("--loss", default="tv")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    (args.output / "data").mkdir(parents=True, exist_ok=True)
    build_data(args.output / "data")
    rows = []
    for name, flags in strategies(args.steps, args.share, args.turns).items():
        losses = train(name, flags, args)
        for step in range(args.every, args.steps + 1, args.every):
            row = {"strategy": name, "tokens": step * TOKENS_PER_STEP, "lm loss": losses.get(step, float("nan"))}
            row["accept length"] = accept_length(name, step, args)
            rows.append(row)
            print(
                f"{name:<12} {row['tokens']:>9,} tokens  lm loss {row['lm loss']:.3f}  "
                f"accept length {row['accept length']:.3f}",
                flush=True,
            )
    (args.output / "study.json").write_text(
        json.dumps({"settings": vars(args) | {"output": ""}, "rows": rows}, indent=1)
    )


if __name__ == "__main__":
    main()
