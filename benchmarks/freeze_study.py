"""Does alternation help? Four ways to spend the same tokens on one model, judged by the same two numbers.

    make study-freeze          # or: python -m benchmarks.freeze_study --output runs/freeze-study

one-off      the backbone alone, then the head alone on the finished backbone (end-to-end TV)
alternating  the same shares of steps in turns
joint        both at once, head detached from the backbone
coupled      both at once, the MTP loss reaching the backbone

Every run sees the same batches of real code (the standard library of this interpreter). At each checkpoint: loss of the
language model on held-out text, and accept length of the head by rejection sampling on held-out prompts. Runs and
evaluations that are complete are not repeated. `--publish` puts data and figure under `benchmarks/`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from bebop_megatron.evaluation.environment import environment
from bebop_megatron.evaluation.results import load_rows
from bebop_megatron.outputs import check_writable
from bebop_megatron.platform.flags import ON_CPU, UNFUSED

HERE = Path(__file__).parent

MODEL = """--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
--num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 1000000 --seq-length 256 --max-position-embeddings 1024
--mtp-num-layers 3 --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0""".split()
RUN = """--no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --micro-batch-size 8
--global-batch-size 8 --log-interval 10 --eval-iters 4 --split 98,2,0 --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine
--lr-warmup-fraction 0.05""".split()
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
    variables = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, check=False)
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


def train(name: str, flags: list[str], seed: int, args: argparse.Namespace) -> dict[int, float]:
    """Train one strategy: step -> held-out loss of the language model."""
    root, data = args.output / name, args.output / "data"
    log = args.output / f"{name}.log"
    tracker = root / "latest_checkpointed_iteration.txt"
    if not (tracker.is_file() and tracker.read_text() == str(args.steps) and log.is_file()):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["-m", "bebop_megatron.pretrain", *MODEL, *ON_CPU, *UNFUSED, *RUN, "--mtp-loss", args.loss, *flags]
        command += [
            "--seed",
            str(1234 + seed),
            "--train-iters",
            str(args.steps),
            "--save",
            str(root),
            "--save-interval",
            str(args.every),
        ]
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


def figure(rows: list[dict[str, Any]], title: str, path: Path) -> None:
    """Both numbers against tokens: a line through the means, a dot for each seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    fig, panels = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for strategy in dict.fromkeys(row["strategy"] for row in rows):
        mine = [row for row in rows if row["strategy"] == strategy]
        tokens = sorted({row["tokens"] for row in mine})
        for panel, name in zip(panels, ("lm loss", "accept length"), strict=True):
            means = [statistics.mean(row[name] for row in mine if row["tokens"] == at) for at in tokens]
            (line,) = panel.plot(tokens, means, label=strategy)
            panel.plot([r["tokens"] for r in mine], [r[name] for r in mine], "o", color=line.get_color(), markersize=3)
    panels[0].set(xlabel="tokens", ylabel="held-out loss of the language model, nats")
    panels[1].set(xlabel="tokens", ylabel="accept length (rejection, gamma 3)")
    panels[0].legend()
    fig.suptitle(title, fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path)
    plt.close(fig)


def study(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Every strategy with every seed; complete parts of an earlier run are read, not repeated."""
    rows = []
    for seed in range(args.seeds):
        for strategy, flags in strategies(args.steps, args.share, args.turns).items():
            name = f"{strategy}-{seed}"
            losses = train(name, flags, seed, args)
            for step in range(args.every, args.steps + 1, args.every):
                row = {"strategy": strategy, "seed": seed, "tokens": step * TOKENS_PER_STEP}
                row |= {"lm loss": losses.get(step, float("nan")), "accept length": accept_length(name, step, args)}
                rows.append(row)
                print(
                    f"{strategy:<12} seed {seed} {row['tokens']:>9,} tokens  lm loss {row['lm loss']:.3f}  "
                    f"accept length {row['accept length']:.3f}",
                    flush=True,
                )
    return rows


def main() -> None:
    """Run the study and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, default=Path("runs/freeze-study"))
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=50, help="steps between two measurements")
    parser.add_argument("--share", type=float, default=0.6, help="of the steps, for the backbone where it trains alone")
    parser.add_argument("--turns", type=int, default=4, help="cycles of the alternating run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=3000, help="generated for each evaluation")
    parser.add_argument("--loss", default="tv")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--publish", action="store_true", help="write data and figure to benchmarks/")
    args = parser.parse_args()
    try:
        check_writable(args.output / "data", "--output", is_folder=True)
    except ValueError as error:
        sys.exit(f"error: {error}")
    build_data(args.output / "data")
    rows = study(args)
    settings = {key: value for key, value in vars(args).items() if key not in ("output", "publish")}
    measured_in = environment()
    text = json.dumps({"settings": settings, "environment": measured_in, "rows": rows}, indent=1) + "\n"
    (args.output / "study.json").write_text(text)
    title = f"4 layers, h = 128, Python code, {args.loss}, {args.seeds} seeds; {measured_in['date']}"
    figure(rows, title, args.output / "study.svg")
    if args.publish:
        name = f"freeze-study-{measured_in['date']}"
        (HERE / "data" / f"{name}.json").write_text(text)
        figure(rows, title, HERE / "figures" / f"{name}.svg")


if __name__ == "__main__":
    main()
