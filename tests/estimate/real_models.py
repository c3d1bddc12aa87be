"""`python -m tests.estimate.real_models`: what tiny models really hold, beside what is estimated, as JSON.

Real parameters, gradient buffers and optimizer states of one rank, allocated on the CPU: Megatron's own builder,
wrapper and optimizer in torch's fake world, where collectives do nothing. And Megatron's own estimate of one model.
"""

from __future__ import annotations

import contextlib
import json
import sys
from dataclasses import dataclass
from typing import Any

COMMON = """--hidden-size 32 --num-attention-heads 4 --ffn-hidden-size 64 --seq-length 32 --max-position-embeddings 64
--normalization RMSNorm --disable-bias-linear --swiglu --position-embedding-type rope --hidden-dropout 0
--attention-dropout 0 --mtp-num-layers 2 --mtp-use-repeated-layer --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
--train-iters 3 --tokenizer-type NullTokenizer --vocab-size 250 --make-vocab-size-divisible-by 32 --mock-data
--mtp-loss tv"""
QWEN = """--group-query-attention --num-query-groups 2 --qk-layernorm --attention-output-gate --apply-layernorm-1p
--experimental-attention-variant gated_delta_net --linear-attention-freq 2 --linear-key-head-dim 8
--linear-value-head-dim 8 --linear-num-key-heads 2 --linear-num-value-heads 4 --linear-conv-kernel-dim 3
--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 --moe-shared-expert-intermediate-size 16
--moe-shared-expert-gate --moe-token-dispatcher-type alltoall --untie-embeddings-and-output-weights"""


@dataclass(frozen=True)
class Case:
    """A launch and the parts that train."""

    flags: str
    world: int
    trained: frozenset[str]


BOTH, HEAD = frozenset({"backbone", "mtp"}), frozenset({"mtp"})
CASES = {
    "dense-tied-fp32": Case("--num-layers 2", 1, BOTH),
    "dense-tied-bf16-frozen": Case("--num-layers 2 --bf16 --mtp-freeze-schedule backbone", 1, HEAD),
    "tied-pp2-tp2-distributed": Case(
        "--num-layers 2 --bf16 --pipeline-model-parallel-size 2 --tensor-model-parallel-size 2 --sequence-parallel "
        "--use-distributed-optimizer",
        8,
        BOTH,
    ),
    "qwen3.5-ep2-tp2-distributed": Case(
        f"--num-layers 4 --bf16 --tensor-model-parallel-size 2 --sequence-parallel --expert-model-parallel-size 2 "
        f"--expert-tensor-parallel-size 1 --use-distributed-optimizer {QWEN}",
        8,
        BOTH,
    ),
}


def _held(optimizer: Any) -> int:
    """Bytes of main parameters and moments over the optimizers of a chain."""
    total = 0
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        if part.optimizer is None:
            continue
        for name in ("fp32_from_float16_groups", "shard_fp32_from_float16_groups"):
            for group in getattr(part, name, []):
                total += sum(p.numel() * 4 for p in group if p is not None)
        for state in part.optimizer.state.values():
            total += sum(v.numel() * v.element_size() for k, v in state.items() if k in ("exp_avg", "exp_avg_sq"))
    return total


def measure(case: Case) -> dict[str, Any]:
    """What the first and the last pipeline stage hold, and what is estimated for them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    from bebop_megatron.estimate.weights import count, weigh
    from bebop_megatron.platform.rehearsal import Rehearsal
    from bebop_megatron.schedule.freezing import freeze

    launch = Rehearsal([*COMMON.split(), *case.flags.split()], case.world)
    args, out = launch.args, {"real": [], "estimated": []}
    for rank in launch.stage_ranks():
        with launch.rank(rank) as chunks:
            weights = weigh(args, count(chunks), case.trained)
            out["estimated"].append([weights.parameters, weights.gradients, weights.optimizer])
        with launch.rank(rank, device="cpu") as chunks:
            if case.trained == HEAD:
                freeze(chunks, "backbone")
            out_parameters = sum(p.numel() * p.element_size() for chunk in chunks for p in chunk.parameters())
            ddp = DistributedDataParallelConfig(
                grad_reduce_in_fp32=args.accumulate_allreduce_grads_in_fp32,
                use_distributed_optimizer=args.use_distributed_optimizer,
            )
            wrapped = [DistributedDataParallel(launch.config.transformer, ddp, chunk) for chunk in chunks]
            buffers = [b for w in wrapped for b in (*w.buffers, *w.expert_parallel_buffers)]
            gradients = sum(b.grad_data.numel() * b.grad_data.element_size() for b in buffers)
            settings = OptimizerConfig(
                optimizer="adam",
                lr=1e-3,
                bf16=args.bf16,
                params_dtype=launch.config.transformer.params_dtype,
                use_distributed_optimizer=args.use_distributed_optimizer,
            )
            optimizer = get_megatron_optimizer(settings, wrapped, use_gloo_process_groups=False)
            for part in getattr(optimizer, "chained_optimizers", [optimizer]):
                part.prepare_grads()
                part.optimizer.step()
            out["real"].append([out_parameters, gradients, _held(optimizer)])
    return out


# without what Megatron's function does not know: linear attention, and a repeated MTP layer, which it counts K times
PLAIN = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
--ffn-hidden-size 96 --swiglu --disable-bias-linear --normalization RMSNorm --position-embedding-type rope
--seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3 --train-iters 2
--bf16 --mock-data --use-distributed-optimizer --tokenizer-type NullTokenizer --vocab-size 256
--untie-embeddings-and-output-weights"""


def weights_by_both() -> tuple[float, float]:
    """Bytes of weights, gradients and optimizer: ours and those of Megatron's own function."""
    from megatron.training.theoretical_memory_usage import compute_weight_and_optimizer_memory

    from bebop_megatron.estimate.report import estimate
    from bebop_megatron.platform.rehearsal import Rehearsal

    ours = estimate(PLAIN.split(), 8).stages["mtp frozen"][0]
    theirs = compute_weight_and_optimizer_memory(Rehearsal(PLAIN.split(), 8).args)
    return ours.parameters + ours.gradients + ours.optimizer, theirs


def main() -> None:
    """Print every case's numbers."""
    with contextlib.redirect_stdout(sys.stderr):
        found = {name: measure(case) for name, case in CASES.items()}
        both = weights_by_both()
    print(json.dumps({"cases": found, "by both": both}))


if __name__ == "__main__":
    main()
