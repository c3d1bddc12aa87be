"""Published architectures by name, as Megatron flags: for an estimate without a launch script.

Sizes are as public launch scripts and model cards state them; hold them against the `config.json` of the model that
you have. The vocabulary is the number of rows of the embedding. These are GPT models with linear attention, not
`--hybrid-layer-pattern`: they have the parameter names that Megatron Bridge reads and writes.
"""

from __future__ import annotations

_QWEN = """--group-query-attention --kv-channels {head} --qk-layernorm --normalization RMSNorm --norm-epsilon 1e-6
--swiglu --disable-bias-linear --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
--max-position-embeddings 262144 --mtp-num-layers 3 --mtp-use-repeated-layer"""
_DELTA = """--attention-output-gate --apply-layernorm-1p --rotary-percent 0.25 --rotary-base 10000000
--experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
--linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16"""
_EXPERTS = """--moe-router-score-function softmax --moe-router-dtype fp32 --moe-router-load-balancing-type none
--moe-grouped-gemm --moe-token-dispatcher-type alltoall"""
_UNTIED = "--untie-embeddings-and-output-weights"

PRESETS: dict[str, str] = {
    "qwen3-8b": f"""--num-layers 36 --hidden-size 4096 --ffn-hidden-size 12288 --num-attention-heads 32
        --num-query-groups 8 --rotary-base 1000000 --vocab-size 151936 {_UNTIED} {_QWEN.format(head=128)}""",
    "qwen3-30b-a3b": f"""--num-layers 48 --hidden-size 2048 --ffn-hidden-size 6144 --num-attention-heads 32
        --num-query-groups 4 --rotary-base 1000000 --vocab-size 151936 {_UNTIED} {_QWEN.format(head=128)}
        --num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 {_EXPERTS}""",
    "qwen3-next-80b-a3b": f"""--num-layers 48 --hidden-size 2048 --ffn-hidden-size 512 --num-attention-heads 16
        --num-query-groups 2 --vocab-size 151936 {_UNTIED} {_QWEN.format(head=256)} {_DELTA} --linear-num-value-heads 32
        --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
        --moe-shared-expert-gate {_EXPERTS}""",
    "qwen3.5-35b-a3b": f"""--num-layers 40 --hidden-size 2048 --ffn-hidden-size 512 --num-attention-heads 16
        --num-query-groups 2 --vocab-size 248320 {_UNTIED} {_QWEN.format(head=256)} {_DELTA} --linear-num-value-heads 32
        --num-experts 256 --moe-router-topk 8 --moe-ffn-hidden-size 512 --moe-shared-expert-intermediate-size 512
        --moe-shared-expert-gate {_EXPERTS}""",
    "qwen3.5-397b-a17b": f"""--num-layers 60 --hidden-size 4096 --ffn-hidden-size 1024 --num-attention-heads 32
        --num-query-groups 2 --vocab-size 248320 {_UNTIED} {_QWEN.format(head=256)} {_DELTA} --linear-num-value-heads 64
        --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024
        --moe-shared-expert-gate {_EXPERTS}""",
}

# how a launch of a preset trains where nothing else is asked for
DEFAULTS = """--bf16 --use-distributed-optimizer --tokenizer-type NullTokenizer --mock-data --lr 3.5e-5
--train-iters 1000 --mtp-loss tv --mtp-freeze-schedule backbone"""


def arguments(name: str) -> list[str]:
    """The architecture's flags.

    Raises:
        ValueError: an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"unknown preset {name!r}: choose one of {', '.join(PRESETS)}")
    return PRESETS[name].split()
