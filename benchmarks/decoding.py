"""Decoding with an MTP head against decoding without: the same engine, cache, batch and prompts.

    python -m benchmarks.decoding

Trains what it measures (once, into runs/decoding/): a Qwen3-shaped backbone of 12 layers on the Python standard
library, then its head under the end-to-end TV objective. In every round all numbers of drafts take their turn, so that
a machine whose speed drifts drifts for all of them; ratios are taken within a round.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from statistics import median
from typing import Any

import torch

from bebop_megatron.platform.flags import ON_CPU, UNFUSED
from benchmarks.loss.results import Ratio
from benchmarks.loss.run import machine_name

ROOT = Path(__file__).resolve().parent.parent
GAMMAS = (1, 2, 3, 4, 5)
MODEL = """--num-layers {layers} --hidden-size {hidden} --ffn-hidden-size {ffn} --num-attention-heads 4
--group-query-attention --num-query-groups 2 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
--position-embedding-type rope --rotary-base 1000000 --seq-length 256 --max-position-embeddings 1024 --mtp-num-layers 3
--mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0"""
RUN = """--num-workers 0 --no-create-attention-mask-in-dataloader --ckpt-format torch_dist --exit-signal-handler
--micro-batch-size 8 --global-batch-size 8 --log-interval 10 --save-interval 50 --eval-interval 100000 --eval-iters 1
--split 99,1,0 --tokenizer-type HuggingFaceTokenizer"""


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _python(log: Path, *command: str) -> None:
    environment = os.environ | {"PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("a") as output:
        done = subprocess.run(
            [sys.executable, *command], cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT, check=False
        )
    if done.returncode:
        raise SystemExit(f"{' '.join(command[:3])} failed; see {log}")


def _train(folder: Path, args: argparse.Namespace, name: str, steps: int, *flags: str) -> None:
    tracker = folder / name / "latest_checkpointed_iteration.txt"
    if tracker.exists() and tracker.read_text().strip() == str(steps):
        return
    _note(f"training {name}, {steps} steps: {folder / name}.log")
    shape = MODEL.format(layers=args.layers, hidden=args.hidden, ffn=3 * args.hidden).split()
    data = ["--data-path", str(folder / "stdlib"), "--data-cache-path", str(folder / "cache")]
    data += ["--tokenizer-model", str(folder / "tokenizer")]
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1", "-m", "bebop_megatron.pretrain"]
    places = ["--save", str(folder / name), "--load", str(folder / name), "--train-iters", str(steps)]
    _python(folder / f"{name}.log", *launcher, *shape, *ON_CPU, *UNFUSED, *RUN.split(), *data, *places, *flags)


def prepare(folder: Path, args: argparse.Namespace) -> None:
    """Tokenizer, data, backbone with a warm head, TV head: each once."""
    folder.mkdir(parents=True, exist_ok=True)
    data, log = ["-m", "bebop_megatron.data"], folder / "data.log"
    tokenizer = str(folder / "tokenizer")
    if not Path(tokenizer).exists():
        _note("training the tokenizer")
        _python(log, *data, "tokenizer", "--input", "stdlib", "--vocab-size", str(args.vocab), "--output", tokenizer)
    if not (folder / "stdlib.idx").exists():
        prefix = str(folder / "stdlib")
        _python(
            log, *data, "build", "--input", "stdlib", "--tokenizer", tokenizer, "--holdout", "0.02", "--output", prefix
        )
    schedule = ("--lr-decay-style", "cosine", "--lr-warmup-fraction", "0.08")
    _train(folder, args, "backbone", args.steps, "--mtp-loss", "kl", "--lr", "3e-3", "--min-lr", "3e-4", *schedule)
    head = ("--pretrained-checkpoint", str(folder / "backbone"), "--mtp-freeze-schedule", "backbone")
    rate = ("--lr", "1e-3", "--lr-decay-style", "constant", "--lr-warmup-fraction", "0.03")
    _train(folder, args, "tv", args.head_steps, *head, "--mtp-loss", "tv", *rate)


def measure(folder: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One entry per batch size and number of drafts, with its seconds of every round."""
    from bebop_megatron.data.tokenizer import load_tokenizer
    from bebop_megatron.evaluation import DecodeConfig, SpeculativeDecoder
    from bebop_megatron.evaluation.loading import load_model
    from bebop_megatron.evaluation.outcome import GenerationResult, merged
    from bebop_megatron.evaluation.prompts import read_prompts

    tokenizer = load_tokenizer(str(folder / "tokenizer"))
    prompts = read_prompts(str(folder / "stdlib-holdout.jsonl"), tokenizer, 64)
    prompts = [prompt for prompt in prompts if len(prompt) == 64]
    loaded = load_model(str(folder / "tv"))
    entries = []
    for batch in args.batches:
        # no stop token: every run yields equally many tokens
        settings = {
            "batch_size": batch,
            "temperature": args.temperature,
            "rule": args.rule,
            "max_new_tokens": args.new_tokens,
        }
        plan = {str(gamma): DecodeConfig(gamma=gamma, **settings) for gamma in (0, *GAMMAS)}
        plan["adaptive"] = DecodeConfig(gamma=GAMMAS[-1], adaptive_gamma=True, **settings)
        decoders = {
            name: SpeculativeDecoder(loaded.model, config, vocab_size=len(tokenizer)) for name, config in plan.items()
        }
        results: dict[str, list[GenerationResult]] = {name: [] for name in plan}
        for turn in range(-1, args.rounds):
            count = max(batch, 4)
            start = max(turn, 0) * count
            mine = [prompts[index % len(prompts)] for index in range(start, start + count)]
            # the first to run in a round rotates too
            order = [*plan][turn % len(plan) :] + [*plan][: turn % len(plan)]
            for name in order:
                # round -1 warms up
                result = decoders[name].generate(mine if turn >= 0 else mine[:batch])
                if turn >= 0:
                    results[name].append(result)
            _note(f"batch {batch}, round {turn + 1} of {args.rounds}")
        for name, rounds in results.items():
            whole = merged(rounds)
            entries.append(
                {
                    "batch": batch,
                    "gamma": name,
                    "tokens": [result.num_tokens for result in rounds],
                    "seconds": [result.seconds for result in rounds],
                    "accept_length": whole.accept_length,
                    # without drafts there is nothing to accept
                    "accept_length_error": whole.accept_length_error if name != "0" else None,
                    "accept_rate": whole.accept_rate if name != "0" else None,
                    "mean_gamma": whole.mean_gamma,
                    "verifications": whole.num_verifications,
                }
            )
    return entries


def ratios(entries: list[dict[str, Any]], batch: int) -> dict[str, Ratio]:
    """Tokens per second over those without drafts in the same round, by number of drafts."""
    mine = {entry["gamma"]: entry for entry in entries if entry["batch"] == batch}
    speeds = {
        name: [tokens / seconds for tokens, seconds in zip(entry["tokens"], entry["seconds"], strict=True)]
        for name, entry in mine.items()
    }
    return {
        name: Ratio.of([own / other for own, other in zip(values, speeds["0"], strict=True)])
        for name, values in speeds.items()
        if name != "0"
    }


def break_even(ratio: dict[str, Ratio]) -> int:
    """The largest number of drafts measured that is still faster than none; 0 if none is."""
    return max((int(name) for name, value in ratio.items() if name != "adaptive" and value.middle > 1), default=0)


def needed_length(entry: dict[str, Any], ratio: Ratio) -> float:
    """The accept length at which this number of drafts would be as fast as none, at the measured cost of a step."""
    return entry["accept_length"] / ratio.middle


def show(data: dict[str, Any]) -> None:
    """One table per batch size."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    console = Console(width=130)
    environment, setting = data["environment"], data["setting"]
    hardware = environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"
    console.print(f"{hardware}, torch {environment['torch']}, {environment['date']}", highlight=False)
    for batch in setting["batches"]:
        ratio = ratios(data["entries"], batch)
        gamma = break_even(ratio)
        verdict = f"break-even gamma {gamma}" + ("" if gamma < GAMMAS[-1] else " or more") if gamma else "never pays"
        title = (
            f"batch {batch}: rule {setting['rule']}, T={setting['temperature']:g}, attention chain, {setting['data']}, "
            f"TV head; {verdict}"
        )
        table = Table(title=title, box=SIMPLE_HEAD, title_justify="left")
        for column in ("gamma", "tokens/s", "against none", "accept length", "needed to break even", "mean gamma"):
            table.add_column(column, justify="right")
        for entry in data["entries"]:
            if entry["batch"] != batch:
                continue
            pairs = zip(entry["tokens"], entry["seconds"], strict=True)
            speed = f"{median(tokens / seconds for tokens, seconds in pairs):,.0f}"
            if entry["gamma"] == "0":
                table.add_row("none", speed, "1", "1", "1", "0")
                continue
            own = ratio[entry["gamma"]]
            length = f"{entry['accept_length']:.2f} ± {entry['accept_length_error']:.2f}"
            needed = f"{needed_length(entry, own):.2f}"
            table.add_row(entry["gamma"], speed, str(own), length, needed, f"{entry['mean_gamma']:.2f}")
        console.print(table)


def plot(data: dict[str, Any], path: Path) -> None:
    """Speed ratio and accept length against the number of drafts, a panel for each batch size."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    from bebop_megatron.outputs import replacing

    setting, environment = data["setting"], data["environment"]
    # a Figure of its own: no global state, no display
    figure = Figure(figsize=(9, 4), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(setting["batches"]), squeeze=False, sharey=True)[0]
    for axis, batch in zip(panels, setting["batches"], strict=True):
        ratio = ratios(data["entries"], batch)
        entries = {entry["gamma"]: entry for entry in data["entries"] if entry["batch"] == batch}
        names = [str(gamma) for gamma in GAMMAS]
        middle = [ratio[name].middle for name in names]
        spread = [[ratio[n].middle - ratio[n].low for n in names], [ratio[n].high - ratio[n].middle for n in names]]
        axis.errorbar(GAMMAS, middle, yerr=spread, color="#D55E00", marker="D", capsize=2, label="tokens/s over none")
        lengths = [entries[name]["accept_length"] for name in names]
        axis.plot(GAMMAS, lengths, color="#0072B2", marker="o", label="accept length")
        needed = [needed_length(entries[name], ratio[name]) for name in names]
        axis.plot(GAMMAS, needed, color="#0072B2", linestyle=":", label="accept length needed to break even")
        adaptive = ratio["adaptive"].middle
        axis.axhline(adaptive, color="#009E73", linestyle="--", linewidth=1, label="tokens/s over none, adaptive gamma")
        axis.axhline(1, color="black", linewidth=1)
        axis.set_title(f"batch {batch}", fontsize=9)
        axis.set_xlabel("gamma", fontsize=8)
        axis.set_xticks(GAMMAS)
        axis.set_ylim(0, GAMMAS[-1] + 1)
        axis.spines[["top", "right"]].set_visible(False)
    panels[0].legend(frameon=False, fontsize=7)
    hardware = environment.get("gpu") or f"{environment['cpu']}, {environment['threads']} threads"
    figure.suptitle(
        f"Decoding with a TV head against none: {setting['layers']} layers, h={setting['hidden']}, "
        f"V={setting['vocab']:,}, rule {setting['rule']}, T={setting['temperature']:g}, attention chain, "
        f"{setting['data']}\n{hardware}, torch {environment['torch']}, {environment['date']} (median, p20 to p80)",
        fontsize=8,
    )
    with replacing(path) as partial:
        figure.savefig(partial, dpi=160, format="png")


def _parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.decoding", description=(__doc__ or "").partition("\n")[0]
    )
    add = parser.add_argument
    add("--data", type=Path, help="measure nothing: table and figure from this data file")
    add(
        "--quick", action="store_true", help="a small model, a minute of training, few rounds, into runs/decoding-quick"
    )
    add("--threads", type=int, default=1, help="CPU threads of the decoder: its steps are too small to share (1)")
    add("--rounds", type=int, default=7, help="(7)")
    add("--temperature", type=float, default=1.0)
    add("--rule", choices=("rejection", "target-only"), default="rejection")
    add("--steps", type=int, default=200, help="training steps of the backbone (200)")
    add("--head-steps", type=int, default=100, help="training steps of the head (100)")
    add("--work", type=Path, default=ROOT / "runs/decoding", help="where the trained model is kept (runs/decoding)")
    add("--output", type=Path, help="folder for data/ and figures/ (benchmarks, or the work folder with --quick)")
    args = parser.parse_args(argv)
    args.layers, args.hidden, args.vocab, args.batches = 12, 256, 4096, [1, 8]
    args.new_tokens = 128
    if args.quick:
        args.layers, args.hidden, args.vocab, args.rounds = 2, 64, 512, min(args.rounds, 2)
        args.steps, args.head_steps, args.new_tokens = 20, 10, 24
        args.work = ROOT / "runs/decoding-quick"
    return args


def main(argv: list[str] | None = None) -> None:
    args = _parse(argv)
    if args.data:
        try:
            data = json.loads(args.data.read_text())
        except (OSError, ValueError) as error:
            raise SystemExit(f"error: --data {args.data} cannot be read: {error}") from error
    else:
        from bebop_megatron.evaluation.environment import environment
        from bebop_megatron.outputs import write_json

        torch.set_num_threads(args.threads)
        measured_in = environment() | {"load_before": round(os.getloadavg()[0], 2)}
        prepare(args.work, args)
        names = ("layers", "hidden", "vocab", "batches", "temperature", "rule", "new_tokens", "rounds", "steps")
        setting = {name: getattr(args, name) for name in (*names, "head_steps")}
        setting["data"] = "held-out standard library"
        data = {"environment": measured_in, "setting": setting, "entries": measure(args.work, args)}
        folder = args.output or (args.work if args.quick else ROOT / "benchmarks")
        args.data = folder / "data" / f"decoding-{machine_name(measured_in)}-{measured_in['date']}.json"
        write_json(args.data, data)
    figure = args.data.parent.parent / "figures" / f"{args.data.stem}.png"
    plot(data, figure)
    _note(f"data: {args.data}, figure: {figure}")
    show(data)


if __name__ == "__main__":
    main()
