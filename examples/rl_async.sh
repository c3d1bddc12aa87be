#!/usr/bin/env bash
# Asynchronous GRPO with speculative rollouts on two CPU cores, from nothing: a small model learns to write out sums, some
# of them wrongly; its MTP head is adapted with the end-to-end TV loss while the backbone is frozen; then reinforcement
# learning raises the share of right answers, one process decoding while the other trains.
# Run it again and finished stages are skipped; an interrupted stage goes on from its checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/rl_async}
TASK=${TASK:-arithmetic:difficulty=1}
BACKBONE_STEPS=${BACKBONE_STEPS:-700}
HEAD_STEPS=${HEAD_STEPS:-150}
RL_STEPS=${RL_STEPS:-60}
DATA=$OUT/data
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT/logs"

stage() { printf '\n== %s\n' "$1"; }

MODEL="--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
  --position-embedding-type rope --seq-length 64 --max-position-embeddings 256
  --mtp-num-layers 3 --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0"
RUN="--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
  --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --exit-signal-handler
  --micro-batch-size 16 --global-batch-size 16 --log-interval 20 --save-interval 100 --eval-interval 100000 --eval-iters 1"

# train NAME STEPS FLAGS...: Megatron's loop through our entry point, unless the checkpoint is already complete
train() {
  local name=$1 steps=$2
  shift 2
  if [ "$(cat "$OUT/$name/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$steps" ]; then
    echo "  $OUT/$name is complete"
    return
  fi
  # shellcheck disable=SC2086
  torchrun --standalone --nproc-per-node 1 -m bebop_megatron.pretrain $MODEL $RUN --mtp-attention chain \
    --train-iters "$steps" --data-path "$DATA/corpus" --split 99,1,0 --data-cache-path "$DATA/cache" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$DATA/tokenizer" \
    --save "$OUT/$name" --load "$OUT/$name" "$@" >>"$OUT/logs/$name.log" 2>&1 ||
    { echo "error: training $name failed; see $OUT/logs/$name.log" >&2; exit 1; }
  grep -oE 'iteration +[0-9]+/ +[0-9]+ |lm loss: [0-9.E+-]+|mtp [^|]*loss: [0-9.E+-]+' "$OUT/logs/$name.log" |
    tail -n 3 | paste -sd' ' | sed 's/^/  /'
}

stage "data: written-out sums, some steps of which are wrong"
[ -e "$DATA/corpus.idx" ] ||
  python -m bebop_megatron.rl.corpus --task "$TASK" --slips 0.2 --documents 20000 --vocab-size 352 --pad-to 64 \
    --output "$DATA"

stage "backbone with a warm MTP head (cross entropy), $BACKBONE_STEPS steps"
train backbone "$BACKBONE_STEPS" --mtp-loss ce --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08

stage "MTP head on the end-to-end TV loss, backbone frozen, $HEAD_STEPS steps"
train tv "$HEAD_STEPS" --pretrained-checkpoint "$OUT/backbone" --mtp-loss tv --mtp-freeze-schedule backbone \
  --lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0.03

stage "GRPO, $RL_STEPS steps: one worker decodes while the learner trains"
OMP_NUM_THREADS=1 python -m bebop_megatron.rl --load "$OUT/tv" --task "$TASK" --tokenizer "$DATA/tokenizer" \
  --output "$OUT/rl" --steps "$RL_STEPS" --groups 8 --group-size 8 --groups-per-rollout 4 --max-new-tokens 64 \
  --rule rejection --gamma 3 --lr 2e-4 --entropy-bonus 0.003 --micro-batch-size 32 --save-interval 20 "$@"

stage "what changed"
python - "$OUT/rl/steps.jsonl" <<'PY'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1])]
tenth = max(1, len(rows) // 10)
for name in ("reward", "entropy", "accept_length", "accept_rate", "completion_tokens", "step_seconds"):
    first, last = (sum(row[name] for row in part) / tenth for part in (rows[:tenth], rows[-tenth:]))
    print(f"  {name:18} {first:8.3f} -> {last:8.3f}   (means of the first and last {tenth} of {len(rows)} steps)")
PY
