#!/usr/bin/env bash
# Pre-RL adaptation of Qwen3.5-397B-A17B's MTP head: backbone frozen, end-to-end TV loss. Sixteen nodes of eight GPUs.
#   by hand, on every node:  NODE_RANK=0 MASTER_ADDR=node-0 CKPT=... ADAPTED=... DATA=... TOKENIZER=... bash THIS
#   by Slurm:                sbatch examples/cluster/slurm.sh examples/cluster/qwen3_5_397b_a17b.sh
#   memory of each rank, before anything is started:  ESTIMATE=1 bash THIS
# CKPT is a torch_dist checkpoint that holds the released MTP weights. Run it again and it resumes from ADAPTED.
set -euo pipefail
: "${NNODES:=16}" "${GPUS_PER_NODE:=8}" "${STEPS:=1000}" "${GLOBAL_BATCH:=128}" "${OUT:=runs/qwen3.5-397b-a17b}"
if [ -z "${ESTIMATE:-}" ]; then
  : "${CKPT:?checkpoint to start from}" "${DATA:?data prefix}" "${TOKENIZER:?tokenizer folder}"
fi
ADAPTED=${ADAPTED:-$OUT/checkpoints}
export CUDA_DEVICE_MAX_CONNECTIONS=1

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
# one head, applied three times, attending as vLLM and SGLang will serve it
HEAD=(
  --mtp-num-layers 3 --mtp-use-repeated-layer --mtp-attention chain
  --mtp-loss tv --mtp-freeze-schedule backbone --mtp-loss-scaling-factor 1.0
)
LAYOUT=(
  --tensor-model-parallel-size 2 --sequence-parallel --context-parallel-size 2 --pipeline-model-parallel-size 4
  --pipeline-model-parallel-layout "Et*15|t*16|t*16|t*13mmmL" --expert-model-parallel-size 32
  --expert-tensor-parallel-size 1
  --moe-grouped-gemm --moe-token-dispatcher-type alltoall --moe-permute-fusion --use-distributed-optimizer
  --overlap-grad-reduce --overlap-param-gather --bf16 --seq-length 32768 --micro-batch-size 1
)
TRAINING=(
  --global-batch-size "$GLOBAL_BATCH" --train-iters "$STEPS" --lr 3.5e-5 --lr-decay-style constant
  --lr-warmup-fraction 0.03 --weight-decay 0.0 --clip-grad 1.0 --eval-interval 1000 --eval-iters 10
)
# without a data prefix (an estimate) nothing is read
INPUT=(--mock-data)
if [ -n "${DATA:-}" ]; then INPUT=(--data-path "$DATA" --split 99,1,0); fi
if [ -n "${TOKENIZER:-}" ]; then
  INPUT+=(--tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER")
else
  INPUT+=(--tokenizer-type NullTokenizer)
fi
CHECKPOINTS=(
  --pretrained-checkpoint "${CKPT:-none}" --load "$ADAPTED" --save "$ADAPTED" --save-interval 100
  --ckpt-format torch_dist --dist-ckpt-optim-fully-reshardable --exit-signal-handler
)
# a scheduler that warns with another signal names it here: EXIT_SIGNAL=SIGUSR1
if [ -n "${EXIT_SIGNAL:-}" ]; then CHECKPOINTS+=(--exit-signal "$EXIT_SIGNAL"); fi
LOGGING=(--log-interval 10 --log-throughput --tensorboard-dir "$OUT/tensorboard")
if [ -n "${WANDB_PROJECT:-}" ]; then
  LOGGING+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_NAME:-qwen3.5-397b-a17b-tv}" --wandb-save-dir "$OUT")
fi
ARGUMENTS=(
  "${MODEL[@]}" "${HEAD[@]}" "${LAYOUT[@]}" "${TRAINING[@]}" "${INPUT[@]}" "${CHECKPOINTS[@]}" "${LOGGING[@]}" "$@"
)

if [ -n "${ESTIMATE:-}" ]; then
  exec python -m bebop_megatron.estimate --world-size $((NNODES * GPUS_PER_NODE)) -- "${ARGUMENTS[@]}"
fi
mkdir -p "$OUT"
if [ -n "${SLURM_PROCID:-}" ]; then
  # one task for each GPU: the scheduler's signals reach the trainer itself
  exec python -m bebop_megatron.pretrain "${ARGUMENTS[@]}"
fi
exec torchrun --nnodes "$NNODES" --node-rank "${NODE_RANK:-0}" --nproc-per-node "$GPUS_PER_NODE" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  -m bebop_megatron.pretrain "${ARGUMENTS[@]}"
