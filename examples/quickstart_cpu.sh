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
# shellcheck source=examples/cpu_training.sh
source examples/cpu_training.sh
MODEL+=" --seq-length 256 --max-position-embeddings 1024 --rotary-base 1000000"
RUN+=" --log-interval 10 --save-interval 50"

stage "data: the Python standard library of this interpreter"
[ -d "$DATA/tokenizer" ] ||
  python -m bebop_megatron.data tokenizer --input stdlib --vocab-size 2048 --output "$DATA/tokenizer"
[ -e "$DATA/stdlib.idx" ] ||
  python -m bebop_megatron.data build --input stdlib --tokenizer "$DATA/tokenizer" --holdout 0.02 --output "$DATA/stdlib"

stage "backbone with a warm MTP head (cross entropy), $BACKBONE_STEPS steps"
train backbone "$BACKBONE_STEPS" "$DATA/stdlib" "$DATA/tokenizer" \
  --mtp-loss ce --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08

for loss in $LOSSES; do
  stage "MTP head on --mtp-loss $loss, backbone frozen, $HEAD_STEPS steps"
  train "$loss" "$HEAD_STEPS" "$DATA/stdlib" "$DATA/tokenizer" --pretrained-checkpoint "$OUT/backbone" \
    --mtp-loss "$loss" --mtp-freeze-schedule backbone --lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0.03
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
