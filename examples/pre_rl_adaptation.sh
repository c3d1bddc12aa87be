#!/usr/bin/env bash
# Pre-RL adaptation of an MTP head on a GPU cluster: backbone frozen, end-to-end TV loss, the paper's learning rate.
# Start one copy per node. Set MODEL to the architecture flags of your own launch script, CKPT to a torch_dist checkpoint
# that holds MTP weights, DATA to a prefix made by `python -m bebop_megatron.data build`, TOKENIZER to its folder.
set -euo pipefail
: "${MODEL:?architecture flags of your launch script}" "${CKPT:?checkpoint to start from}" "${ADAPTED:?where to save}"
: "${DATA:?data prefix}" "${TOKENIZER:?tokenizer folder}" "${STEPS:?training iterations}"
export CUDA_DEVICE_MAX_CONNECTIONS=1

# shellcheck disable=SC2086
torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${GPUS_PER_NODE:-8}" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  -m bebop_megatron.pretrain $MODEL \
  --data-path "$DATA" --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" --split 99,1,0 \
  --pretrained-checkpoint "$CKPT" --load "$ADAPTED" --save "$ADAPTED" --ckpt-format torch_dist --save-interval 100 \
  --mtp-loss tv --mtp-freeze-schedule backbone --mtp-loss-scaling-factor 1.0 \
  --train-iters "$STEPS" --lr 3.5e-5 --lr-decay-style constant --lr-warmup-fraction 0.03 \
  --global-batch-size "${GLOBAL_BATCH:-256}" --micro-batch-size "${MICRO_BATCH:-1}" \
  --exit-signal-handler --log-interval 10 --eval-interval 1000 --eval-iters 10 "$@"
