#!/usr/bin/env bash
# Pre-RL adaptation of Qwen3.5-397B-A17B's MTP head: backbone frozen, end-to-end TV loss. Sixteen nodes of eight GPUs.
#   by hand, on every node:  NODE_RANK=0 MASTER_ADDR=node-0 CKPT=... ADAPTED=... DATA=... TOKENIZER=... bash THIS
#   by Slurm:                sbatch examples/cluster/slurm.sh examples/cluster/qwen3_5_397b_a17b.sh
#   memory of each rank, before anything is started:  ESTIMATE=1 bash THIS
# What it reads and how it resumes: adapt.sh, beside this script.
set -euo pipefail
NAME=qwen3.5-397b-a17b
: "${NNODES:=16}" "${GLOBAL_BATCH:=128}"

# the architecture, as published; the last two rows are the linear-attention layers, three of every four
MODEL=(
  --num-layers 60 --hidden-size 4096 --ffn-hidden-size 1024 --num-attention-heads 32 --group-query-attention
  --num-query-groups 2 --kv-channels 256 --qk-layernorm --attention-output-gate --normalization RMSNorm
  --apply-layernorm-1p --norm-epsilon 1e-6 --swiglu --disable-bias-linear --position-embedding-type rope
  --rotary-percent 0.25 --rotary-base 10000000 --max-position-embeddings 262144 --vocab-size 248320
  --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
  --num-experts 512 --moe-router-topk 10 --moe-ffn-hidden-size 1024 --moe-shared-expert-intermediate-size 1024
  --moe-shared-expert-gate --moe-router-score-function softmax --moe-router-dtype fp32
  --moe-router-load-balancing-type none
  --experimental-attention-variant gated_delta_net --linear-attention-freq 4 --linear-conv-kernel-dim 4
  --linear-key-head-dim 128 --linear-value-head-dim 128 --linear-num-key-heads 16 --linear-num-value-heads 64
)
LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 4
  --pipeline-model-parallel-layout "Et*15|t*16|t*16|t*13mmmL" --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --use-distributed-optimizer
  --overlap-grad-reduce --overlap-param-gather --bf16 --seq-length 32768 --micro-batch-size 1
)
source "$(dirname "${BASH_SOURCE[0]}")/adapt.sh"
