#!/usr/bin/env bash
# The whole story on two CPU cores: train a small Qwen3-shaped model on real code, adapt its MTP head with the backbone
# frozen under three objectives from the same start, and judge each head by real speculative decoding.
# Run it again and finished stages are skipped; an interrupted stage resumes from its checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/demo}
BACKBONE_STEPS=${BACKBONE_STEPS:-120}
HEAD_STEPS=${HEAD_STEPS:-45}
EVAL_TOKENS=${EVAL_TOKENS:-6000}
LOSSES=${LOSSES:-"ce kl tv"}
DATA=$OUT/data
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
mkdir -p "$DATA" "$OUT/logs"

stage() { printf '\n== %s\n' "$1"; }

# Megatron's log goes to a file; one short line per logging interval goes to the screen
show_progress() {
  # on Ctrl-C the trainer still writes its checkpoint, and whoever reads its log must outlive it
  trap '' INT TERM
  tee -a "$1" | grep --line-buffered -oE 'iteration +[0-9]+/ +[0-9]+|lm loss: [0-9.E+-]+|mtp [^|]*loss: [0-9.E+-]+|^error: .*' |
    while IFS= read -r piece; do
      case $piece in iteration*) printf '\n  %s' "$piece" ;; *) printf '   %s' "$piece" ;; esac
    done
  echo
}

MODEL="--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
  --position-embedding-type rope --rotary-base 1000000 --seq-length 256 --max-position-embeddings 1024
  --mtp-num-layers 3 --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0"
RUN="--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
  --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --exit-signal-handler
  --micro-batch-size 16 --global-batch-size 16 --log-interval 10 --save-interval 50 --eval-interval 1000 --eval-iters 1"

# train NAME STEPS FLAGS...: Megatron's loop through our entry point, unless the checkpoint is already complete
train() {
  local name=$1 steps=$2
  shift 2
  if [ "$(cat "$OUT/$name/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$steps" ]; then
    echo "  $OUT/$name is complete"
    return
  fi
  # shellcheck disable=SC2086
  torchrun --standalone --nproc-per-node 1 -m bebop_megatron.pretrain $MODEL $RUN \
    --train-iters "$steps" --data-path "$DATA/stdlib" --split 99,1,0 --data-cache-path "$DATA/cache" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer" \
    --save "$OUT/$name" --load "$OUT/$name" "$@" 2>&1 | show_progress "$OUT/logs/$name.log" ||
    { echo "error: training $name failed; see $OUT/logs/$name.log" >&2; exit 1; }
}

stage "data: the Python standard library of this interpreter"
[ -d "$DATA/tokenizer" ] ||
  python -m bebop_megatron.data tokenizer --input stdlib --vocab-size 2048 --output "$DATA/tokenizer"
[ -e "$DATA/stdlib.idx" ] ||
  python -m bebop_megatron.data build --input stdlib --tokenizer "$DATA/tokenizer" --holdout 0.02 --output "$DATA/stdlib"

stage "backbone with a warm MTP head (cross entropy), $BACKBONE_STEPS steps"
train backbone "$BACKBONE_STEPS" --mtp-loss ce --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08

for loss in $LOSSES; do
  stage "MTP head on --mtp-loss $loss, backbone frozen, $HEAD_STEPS steps"
  train "$loss" "$HEAD_STEPS" --pretrained-checkpoint "$OUT/backbone" --mtp-loss "$loss" \
    --mtp-freeze-schedule backbone --lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0.03
done

for loss in $LOSSES; do
  stage "speculative decoding with the $loss head, both verification rules"
  # steps of a few tokens are too small to share: on busy cores one thread is many times faster
  [ -e "$OUT/eval-$loss.json" ] ||
    OMP_NUM_THREADS=1 python -m bebop_megatron.evaluation --load "$OUT/$loss" --label "$loss" --rule rejection --rule target-only \
      --gamma 3 --temperature 1.0 --tokenizer "$DATA/tokenizer" --prompts "$DATA/stdlib-holdout.jsonl" \
      --prompt-tokens 64 --max-new-tokens 128 --batch-size 16 --num-tokens "$EVAL_TOKENS" --output "$OUT/eval-$loss.json"
done

stage "report"
inputs=()
for loss in $LOSSES; do inputs+=("$OUT/eval-$loss.json"); done
python -m bebop_megatron.evaluation merge --input "${inputs[@]}" --output "$OUT"
