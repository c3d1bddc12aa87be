#!/usr/bin/env bash
# Asynchronous GRPO with speculative rollouts on two CPU cores, from nothing: a small model learns to write out sums, some
# of them wrongly; its MTP head is adapted with the end-to-end TV loss while the backbone is frozen; then reinforcement
# learning raises the share of right answers, one process decoding while the other trains.
# Run it again and finished stages are skipped; an interrupted stage goes on from its checkpoint.
set -euo pipefail
cd "$(dirname "$0")/.."

OUT=${OUT:-runs/rl_async}
TASK=${TASK:-arithmetic:difficulty=1}
BACKBONE_STEPS=${BACKBONE_STEPS:-900}
HEAD_STEPS=${HEAD_STEPS:-150}
RL_STEPS=${RL_STEPS:-60}
DATA=$OUT/data
# the steps are too small to share: on a busy machine one thread is many times faster
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# shellcheck source=examples/cpu_training.sh
source examples/cpu_training.sh
# deep enough to carry digits. The length is that of the longest document: each sample then begins with its question, as
# a rollout does
MODEL+=" --num-layers 8 --seq-length 64 --max-position-embeddings 256"
# later drafts see in training what they see when they are decoded
RUN+=" --log-interval 50 --save-interval 100 --mtp-attention chain"

stage "data: written-out sums, some steps of which are wrong"
[ -e "$DATA/corpus.idx" ] ||
  python -m bebop_megatron.rl.corpus --task "$TASK" --slips 0.2 --documents 20000 --vocab-size 352 --pad-to 64 \
    --output "$DATA"

stage "backbone with a warm MTP head (cross entropy), $BACKBONE_STEPS steps"
train backbone "$BACKBONE_STEPS" "$DATA/corpus" "$DATA/tokenizer" \
  --mtp-loss ce --lr 3e-3 --min-lr 3e-4 --lr-decay-style cosine --lr-warmup-fraction 0.08

stage "MTP head on the end-to-end TV loss, backbone frozen, $HEAD_STEPS steps"
train tv "$HEAD_STEPS" "$DATA/corpus" "$DATA/tokenizer" --pretrained-checkpoint "$OUT/backbone" \
  --mtp-loss tv --mtp-freeze-schedule backbone --lr 1e-3 --lr-decay-style constant --lr-warmup-fraction 0.03

stage "GRPO, $RL_STEPS steps: one worker decodes while the learner trains"
python -m bebop_megatron.rl --load "$OUT/tv" --task "$TASK" --tokenizer "$DATA/tokenizer" \
  --output "$OUT/rl" --steps "$RL_STEPS" --groups 8 --group-size 16 --groups-per-rollout 4 --max-new-tokens 64 \
  --rule rejection --gamma 3 --lr 1e-4 --micro-batch-size 64 --probe 0 --save-interval 20 "$@"

stage "what changed"
python - "$OUT/rl/steps.jsonl" <<'PY'
import json
import sys

rows = [json.loads(line) for line in open(sys.argv[1])]
fifth = max(1, len(rows) // 5)
for name in ("reward", "entropy", "accept_length", "accept_rate", "completion_tokens", "step_seconds"):
    first, last = (sum(row[name] for row in part) / fifth for part in (rows[:fifth], rows[-fifth:]))
    print(f"  {name:18} {first:8.3f} -> {last:8.3f}   (means of the first and last {fifth} of {len(rows)} steps)")
PY
