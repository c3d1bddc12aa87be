"""What a training step costs in each freeze phase, against the matrix products that it has to do.

    make bench-freeze      # or: python -m benchmarks.freeze_step --output FILE

One model trains through phases that change with every step, and beside it the same model without MTP layers, so that
all are measured under the same conditions. Before anything is timed, frozen parts are checked for every bit, and the
operations of one step of each kind are counted. On a GPU memory is the allocator's peak; on the CPU it is what autograd
keeps for the backward pass.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bebop_megatron.evaluation.environment import environment

PHASES = {"frozen backbone": "backbone", "frozen MTP": "mtp", "joint": "none"}
SCHEDULE = "backbone:1,mtp:1,none:1"


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """Megatron's model configuration: a Qwen3-shaped decoder."""
    return {
        "num_layers": args.layers,
        "hidden_size": args.hidden,
        "ffn_hidden_size": 3 * args.hidden,
        "num_attention_heads": args.hidden // 64,
        "num_query_groups": max(1, args.hidden // 128),
        "kv_channels": 64,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "bf16": args.bf16,
        "params_dtype": torch.bfloat16 if args.bf16 else torch.float32,
    }


class Training:
    """A model with or without MTP layers, trained one micro-batch at a step, in changing phases if `frozen`."""

    def __init__(self, args: argparse.Namespace, depths: int | None, frozen: bool = True) -> None:
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec, get_gpt_mtp_block_spec
        from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
        from megatron.core.transformer.module import Float16Module
        from megatron.core.transformer.transformer_config import TransformerConfig

        from bebop_megatron.config import FreezeConfig, ObjectiveConfig
        from bebop_megatron.mcore import attach
        from bebop_megatron.mcore.freeze_control import FreezeController
        from bebop_megatron.mcore.freeze_install import install_freezing, prepare_chunks
        from bebop_megatron.mcore.freeze_optimizer import part_overrides
        from bebop_megatron.mcore.freeze_state import follow_schedule
        from bebop_megatron.schedule.phases import FreezeSchedule

        self.args = args
        own = {"mtp_num_layers": depths, "mtp_use_repeated_layer": True} if depths else {}
        config = TransformerConfig(**settings(args), **own)
        spec = get_gpt_layer_local_spec(normalization="RMSNorm")
        if depths:
            attach(config, ObjectiveConfig(loss=args.loss))
        self.model = GPTModel(
            config,
            spec,
            vocab_size=args.vocab,
            max_sequence_length=args.sequence,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
            mtp_block_spec=get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False) if depths else None,
        )
        if torch.cuda.is_available():
            self.model.cuda()
        options = FreezeConfig(schedule=SCHEDULE)
        phases = bool(depths) and frozen
        if phases:
            install_freezing(options)
            prepare_chunks([self.model], follow_schedule(config, FreezeSchedule.parse(SCHEDULE)))
        config.finalize_model_grads_func = finalize_model_grads
        inner = Float16Module(config, self.model) if args.bf16 else self.model
        self.wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(grad_reduce_in_fp32=True), inner)
        adam = OptimizerConfig(optimizer="adam", lr=1e-4, weight_decay=0.1, bf16=args.bf16)
        overrides = part_overrides(adam, None, options) if phases else None
        self.optimizer = get_megatron_optimizer(adam, [self.wrapped], config_overrides=overrides)
        self.controller = FreezeController([self.wrapped], self.optimizer, options) if phases else None
        tokens = torch.randint(0, args.vocab, (args.batch, args.sequence + 1), device=torch.cuda.current_device())
        self.batch = (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    def _forward(self, data_iterator: Any, model: Any) -> Any:
        tokens, labels = next(data_iterator)
        mask = torch.ones_like(tokens, dtype=torch.float32)
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        output = model(tokens, positions, None, labels=labels, loss_mask=mask)

        def loss(output: torch.Tensor) -> Any:
            total = (output.float() * mask).sum()
            return total, mask.sum().to(torch.int), {"lm": total.detach()}

        return output, loss

    def step(self, iteration: int) -> None:
        """One iteration: forward, backward, optimizer."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if self.controller is not None:
            self.controller.before_step(iteration)
        self.wrapped.zero_grad_buffer()
        self.optimizer.zero_grad()
        get_forward_backward_func()(
            forward_step_func=self._forward,
            data_iterator=iter([self.batch]),
            model=[self.wrapped],
            num_microbatches=1,
            seq_length=self.args.sequence,
            micro_batch_size=self.args.batch,
            forward_only=False,
        )
        self.optimizer.step()

    def bits(self, part: str) -> list[torch.Tensor]:
        """Copies of a part's parameters and optimizer state."""
        from bebop_megatron.schedule.freezing import parameters_of

        found = [p.detach().clone() for p in parameters_of([self.model], part)]
        for group in self.optimizer.param_groups:
            if group["bebop_part"] == part:
                for parameter in group["params"]:
                    state = self.optimizer.chained_optimizers[0].optimizer.state[parameter]
                    found += [parameter.detach().clone(), *(value.clone() for value in state.values())]
        return found


def matrix_products(run: Any) -> int:
    """Floating-point operations of the matrix products that `run` does, counted as they are dispatched."""
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        run()
    return counter.get_total_flops()


def kept_for_backward(run: Any) -> int:
    """Peak bytes: of the allocator on a GPU, of what autograd keeps on the CPU."""
    if not _on_cpu():
        torch.cuda.reset_peak_memory_stats()
        run()
        return torch.cuda.max_memory_allocated()
    storages: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run()
    return sum(storages.values())


def _on_cpu() -> bool:
    from bebop_megatron.platform import active

    return active()


def check(training: Training) -> None:
    """Stop unless frozen parts stay as they are to the bit and the others move.

    Raises:
        RuntimeError: with the phase in which something is wrong.
    """
    for iteration in range(6):
        before = {part: training.bits(part) for part in ("backbone", "mtp")}
        training.step(iteration)
        frozen = training.controller.state.frozen if training.controller else frozenset()
        for part, values in before.items():
            same = all(torch.equal(a, b) for a, b in zip(values, training.bits(part), strict=True))
            if same != (part in frozen):
                raise RuntimeError(f"iteration {iteration}: {part} {'did not move' if same else 'moved while frozen'}")


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Counts and times of a step in each phase and of a step without MTP layers."""
    with_mtp, without = Training(args, args.depths), Training(args, None)
    check(with_mtp)
    steps = {name: (with_mtp, index) for index, name in enumerate(PHASES)} | {"no MTP layers": (without, 0)}
    rows: dict[str, dict[str, Any]] = {name: {"seconds": []} for name in steps}
    base = 6
    for name, (training, index) in steps.items():
        rows[name]["flops"] = matrix_products(lambda t=training, i=base + index: t.step(i))
    for name, (training, index) in steps.items():
        rows[name]["bytes"] = kept_for_backward(lambda t=training, i=base + 3 + index: t.step(i))
    for round_ in range(args.rounds + args.warmup):
        for name, (training, index) in steps.items():
            torch.cuda.synchronize()
            begin = time.perf_counter()
            training.step(base + 6 + 3 * round_ + index)
            torch.cuda.synchronize()
            if round_ >= args.warmup:
                rows[name]["seconds"].append(time.perf_counter() - begin)
    for row in rows.values():
        times = sorted(row["seconds"])
        row["median"] = statistics.median(times)
        row["p20"], row["p80"] = times[len(times) // 5], times[len(times) * 4 // 5]
    return rows


def report(rows: dict[str, dict[str, Any]]) -> str:
    """A table: times, memory, and both ratios beside each other."""
    joint = rows["joint"]
    lines = [
        f"{'step':<16} {'median ms':>10} {'p20-p80':>15} {'MiB kept':>9} {'GFLOP':>9} {'of joint':>9} {'counted':>8}"
    ]
    for name, row in rows.items():
        lines.append(
            f"{name:<16} {row['median'] * 1e3:>10.1f} {row['p20'] * 1e3:>7.1f}-{row['p80'] * 1e3:<7.1f} "
            f"{row['bytes'] / 2**20:>9.1f} {row['flops'] / 1e9:>9.2f} {row['median'] / joint['median']:>9.3f} "
            f"{row['flops'] / joint['flops']:>8.3f}"
        )
    counted = rows["frozen backbone"]["flops"] / joint["flops"]
    measured = rows["frozen backbone"]["median"] / joint["median"]
    lines.append(f"frozen backbone: {measured / counted - 1:+.1%} against its counted matrix products")
    plain = rows["no MTP layers"]["median"]
    lines.append(f"frozen MTP: {rows['frozen MTP']['median'] / plain - 1:+.1%} against the model without MTP layers")
    return "\n".join(lines)


def add_sizes(parser: argparse.ArgumentParser, **more: int) -> None:
    """Flags of the model's and the run's sizes, which `Training` reads; `more` are those of one benchmark."""
    sizes = {"layers": 8, "hidden": 256, "vocab": 8192, "sequence": 256, "batch": 4, "depths": 3}
    for name, default in (sizes | more | {"threads": torch.get_num_threads()}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--output", type=Path)


@contextmanager
def one_process(threads: int) -> Iterator[str]:
    """Megatron in this process alone, on the GPU where there is one; yields a folder for the time being."""
    from bebop_megatron.platform import enter

    torch.set_num_threads(threads)
    if not torch.cuda.is_available():
        enter()
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from bebop_megatron.mcore import install

    install()
    backend = "gloo" if _on_cpu() else "nccl"
    with tempfile.TemporaryDirectory() as folder:
        torch.distributed.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1)
        yield folder
        torch.distributed.destroy_process_group()


def write_results(args: argparse.Namespace, name: str, measured: Any, where: dict[str, Any]) -> None:
    """What was measured, where (asked before `one_process`) and with which settings, to `args.output`."""
    settings = {key: str(value) for key, value in vars(args).items() if key != "output"}
    facts = where | {"device": "cpu" if _on_cpu() else torch.cuda.get_device_name(), "settings": settings}
    args.output.parent.mkdir(parents=True, exist_ok=True)
    args.output.write_text(json.dumps(facts | {name: measured}, indent=1) + "\n")


def main() -> None:
    """Measure, print a table, write the data."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_sizes(parser, rounds=20, warmup=2)
    parser.add_argument("--loss", default="tv")
    args = parser.parse_args()

    # the CPU platform answers for a GPU once it is entered
    where = environment()
    with one_process(args.threads):
        rows = measure(args)
    print(report(rows))
    if args.output is not None:
        write_results(args, "steps", rows, where)


if __name__ == "__main__":
    main()
