"""What the MTP metrics add to a training step: the same model with `--mtp-metrics off`, `summary` and `full`, in turns.

    python benchmarks/metrics_cost.py --output benchmarks/data/metrics-cost.json

Everything that a metric costs is inside the time: adding up each micro-batch, and at every log interval the reduction
over ranks, the ratios and writing to TensorBoard if it is installed. One model is trained; what differs between its
steps is the level alone, which changes with every step in an order drawn anew each round. Before anything is timed,
steps with each level must leave the same weights. `ce` is listed apart: measuring needs the target's logits, which its
loss does not.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import random
import statistics
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import torch

from bebop_megatron.evaluation.environment import environment
from benchmarks.freeze_step import Training, add_sizes, one_process, write_results

LEVELS = ("off", "summary", "full")
LIMIT = 0.03


def _writer(folder: str) -> Any:
    """A TensorBoard writer, where TensorBoard is installed."""
    if importlib.util.find_spec("tensorboard") is None:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(folder)


class Measured:
    """A model in training whose metrics level can be changed between two steps."""

    def __init__(self, args: argparse.Namespace, loss: str, folder: str) -> None:
        from bebop_megatron.config import MetricsConfig
        from bebop_megatron.mcore import attached

        self.args = args
        self.training = Training(argparse.Namespace(**{**vars(args), "loss": loss}), args.depths, frozen=False)
        self.attachment: Any = attached(self.training.model.config)
        self.levels = {level: replace(MetricsConfig(), level=level) for level in LEVELS}
        self.writer = _writer(folder)
        self.iteration = 0

    def step(self, level: str) -> None:
        """One iteration, with whatever is due at its end; steps of each level come to their log intervals alike."""
        self.attachment.metrics = self.levels[level]
        self.training.step(self.iteration)
        self.iteration += 1

    def log(self, level: str) -> None:
        """What a log interval costs."""
        from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

        self.attachment.metrics = self.levels[level]
        MTPLossLoggingHelper.track_mtp_metrics(1.0, self.iteration, self.writer, None, {"advanced iterations": 1})

    def weights(self) -> list[torch.Tensor]:
        """Copies of everything that trains."""
        return [parameter.detach().clone() for parameter in self.training.model.parameters()]


def check(args: argparse.Namespace, folder: str) -> None:
    """Stop unless every level trains the same weights.

    Raises:
        RuntimeError: with the level that changes training.
    """
    found = []
    for level in LEVELS:
        torch.manual_seed(0)
        model = Measured(args, "tv", folder)
        for _ in range(2):
            model.step(level)
        found.append(model.weights())
    for level, weights in zip(LEVELS[1:], found[1:], strict=True):
        if not all(torch.equal(a, b) for a, b in zip(found[0], weights, strict=True)):
            raise RuntimeError(f"--mtp-metrics {level} changes what is trained")


def _seconds(run: Any) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def measure(args: argparse.Namespace, loss: str, folder: str) -> dict[str, Any]:
    """Times of a step and of a log interval's end with each level, and what a step costs beyond that of `off`."""
    # the log goes through every model that is alive
    gc.collect()
    model = Measured(args, loss, folder)
    steps: dict[str, list[float]] = {level: [] for level in LEVELS}
    logs: dict[str, list[float]] = {level: [] for level in LEVELS}
    order = list(LEVELS)
    for round_ in range(args.rounds + args.warmup):
        random.shuffle(order)
        for level in order:
            step = _seconds(lambda level=level: model.step(level))
            log = _seconds(lambda level=level: model.log(level))
            if round_ >= args.warmup:
                steps[level].append(step)
                logs[level].append(log)
    rows = {}
    for level in LEVELS:
        # of the same round: the machine's moods are shared
        ratios = [
            (step + log / args.log_interval) / (plain + plain_log / args.log_interval) - 1
            for step, log, plain, plain_log in zip(steps[level], logs[level], steps["off"], logs["off"], strict=True)
        ]
        low, high = _interval(ratios)
        rows[level] = {
            "step_seconds": steps[level],
            "log_seconds": logs[level],
            "step_median": statistics.median(steps[level]),
            "log_median": statistics.median(logs[level]),
            "cost": statistics.median(ratios),
            "cost_low": low,
            "cost_high": high,
        }
    return rows


def _interval(values: list[float]) -> tuple[float, float]:
    """95% interval of the median, from resampled rounds."""
    generator = random.Random(0)
    medians = sorted(statistics.median(generator.choices(values, k=len(values))) for _ in range(1000))
    return medians[25], medians[974]


def report(results: dict[str, dict[str, Any]], log_interval: int) -> str:
    """A table; the goal is for losses that know the target anyway."""
    lines = [f"{'loss':<6} {'metrics':<8} {'step ms':>9} {'log ms':>8} {'cost':>8} {'95% interval':>18}"]
    for loss, rows in results.items():
        for level, row in rows.items():
            lines.append(
                f"{loss:<6} {level:<8} {row['step_median'] * 1e3:>9.2f} {row['log_median'] * 1e3:>8.2f} "
                f"{row['cost']:>+8.2%} {row['cost_low']:>+8.2%} ..{row['cost_high']:>+7.2%}"
            )
    lines.append(f"cost: of a step and its share of a log interval of {log_interval}, against off in the same round")
    if "tv" in results:
        worst = max(row["cost"] for row in results["tv"].values())
        verdict = "meets" if worst < LIMIT else "misses"
        lines.append(f"tv: {worst:+.2%} at most, {verdict} the goal of less than {LIMIT:.0%}")
    return "\n".join(lines)


def main() -> None:
    """Measure, print a table, write the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, rounds=40, warmup=3, log_interval=10)
    parser.add_argument("--loss", nargs="+", default=["tv", "ce"])
    parser.add_argument("--quick", action="store_true", help="sizes that say nothing, to see that it runs")
    args = parser.parse_args()
    if args.quick:
        quick = {"layers": 1, "hidden": 64, "vocab": 512, "sequence": 32, "batch": 2, "rounds": 3, "warmup": 1}
        vars(args).update(quick)
    # the CPU platform answers for a GPU once it is entered
    where = environment()
    with one_process(args.threads) as folder:
        from megatron.training.global_vars import set_args

        # the log's wrapper asks Megatron's arguments whether an interval ends; here each one does
        set_args(SimpleNamespace(log_interval=1))
        check(args, folder)
        results = {loss: measure(args, loss, folder) for loss in args.loss}
    print(report(results, args.log_interval))
    if args.output is not None:
        write_results(args, "losses", results, where)


if __name__ == "__main__":
    main()
