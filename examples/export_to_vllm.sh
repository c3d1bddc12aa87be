#!/usr/bin/env bash
# Export a trained checkpoint for vLLM: CKPT is the folder of --save, HF the folder of the model it was imported from
# (config and tokenizer), OUT a new folder. ONLY_MTP=1 lays just the head over a copy of HF that shares its files.
set -euo pipefail
: "${CKPT:?checkpoint folder}" "${HF:?Hugging Face folder of the same model}" "${OUT:?new folder}"
GAMMA=${GAMMA:-3}

if [ "${ONLY_MTP:-0}" = 1 ]; then
  [ ! -e "$OUT" ] || { echo "error: $OUT exists" >&2; exit 1; }
  python -m bebop_megatron.convert export --load "$CKPT" --hf "$HF" --output "$OUT.head" --only-mtp
  # hard links where both lie on one file system; the files that change are replaced, not written into
  cp -rl "$HF" "$OUT" 2>/dev/null || { rm -rf "$OUT"; cp -r "$HF" "$OUT"; }
  cp --remove-destination "$OUT.head"/* "$OUT"/
else
  python -m bebop_megatron.convert export --load "$CKPT" --hf "$HF" --output "$OUT"
fi
# the names of an MTP head are not checked by engines: a missing one is served uninitialised
python -m bebop_megatron.convert inspect "$OUT" | tee /dev/stderr | grep '^tensors: all there' >/dev/null ||
  { echo "error: $OUT is not whole" >&2; exit 1; }

cat <<EOF

Serve it with rejection sampling of the head's own distribution (vLLM's default, greedy drafts, verifies against the
target alone):

vllm serve $OUT --speculative-config \\
  '{"method": "mtp", "num_speculative_tokens": $GAMMA, "draft_sample_method": "probabilistic"}'
EOF
