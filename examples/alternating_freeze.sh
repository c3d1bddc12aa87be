#!/usr/bin/env bash
# Backbone and MTP head in turns: the backbone trains while the head waits, then the head catches up with it.
# As it stands this is a tiny run on two CPU cores (a few minutes). On a cluster, set MODEL, RUN, DATA and TOKENIZER to
# those of your launch script and keep the two lines marked below. Run it again and it resumes, also in the middle of a phase.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/alternating}
STEPS=${STEPS:-120}
SCHEDULE=${SCHEDULE:-mtp:20,backbone:20}
DATA=${DATA:-$OUT/data/stdlib}
TOKENIZER=${TOKENIZER:-$OUT/data/tokenizer}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2} PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT"

[ -d "$TOKENIZER" ] || python -m bebop_megatron.data tokenizer --input stdlib --vocab-size 2048 --output "$TOKENIZER"
[ -e "$DATA.idx" ] ||
  python -m bebop_megatron.data build --input stdlib --tokenizer "$TOKENIZER" --holdout 0.02 --output "$DATA"

MODEL=${MODEL:-"--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
  --position-embedding-type rope --seq-length 128 --max-position-embeddings 1024 --hidden-dropout 0
  --attention-dropout 0 --mtp-num-layers 3 --mtp-use-repeated-layer"}
RUN=${RUN:-"--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion
  --no-persist-layer-norm --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --no-create-attention-mask-in-dataloader --num-workers 0 --micro-batch-size 8 --global-batch-size 8"}

# the two lines that alternate: what is frozen for how long, and a learning rate of the head's own
ALTERNATE="--mtp-loss tv --mtp-freeze-schedule $SCHEDULE
  --mtp-lr 1e-3 --mtp-lr-schedule constant --mtp-lr-warmup-iters 5"

# shellcheck disable=SC2086
torchrun --nnodes "${NNODES:-1}" --node-rank "${NODE_RANK:-0}" --nproc-per-node "${PROCESSES:-1}" \
  --master-addr "${MASTER_ADDR:-localhost}" --master-port "${MASTER_PORT:-29500}" \
  -m bebop_megatron.pretrain $MODEL $RUN $ALTERNATE \
  --data-path "$DATA" --split 99,1,0 --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$TOKENIZER" \
  --train-iters "$STEPS" --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.05 \
  --load "$OUT/model" --save "$OUT/model" --save-interval 50 --ckpt-format torch_dist --exit-signal-handler \
  --log-interval 10 --eval-interval 1000 --eval-iters 1 "$@" 2>&1 | tee -a "$OUT/log" |
  grep --line-buffered -E '^bebop_megatron: | iteration +[0-9]+/|^  (iterations|[0-9]+-|repeats)|^error: ' |
  sed -uE 's/.*(iteration +[0-9]+\/ +[0-9]+) .*(lm loss: [0-9.E+-]+) .*(freeze phase: [^|]*) .*/  \1  \2  \3/'
