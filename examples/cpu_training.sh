# shellcheck shell=bash
# What the examples on two CPU cores share, to be sourced with OUT (where runs go) set: a small Qwen3-shaped model as flags
# of Megatron, and `train`, which runs Megatron's loop on a corpus and leaves a complete checkpoint alone.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
export PYTHONWARNINGS=ignore TOKENIZERS_PARALLELISM=false
mkdir -p "$OUT/logs"

MODEL="--num-layers 4 --hidden-size 128 --ffn-hidden-size 384 --num-attention-heads 4 --group-query-attention
  --num-query-groups 2 --kv-channels 32 --qk-layernorm --normalization RMSNorm --swiglu --disable-bias-linear
  --position-embedding-type rope --mtp-num-layers 3 --mtp-use-repeated-layer --hidden-dropout 0 --attention-dropout 0"
RUN="--distributed-backend gloo --use-cpu-initialization --no-gradient-accumulation-fusion --no-persist-layer-norm
  --no-masked-softmax-fusion --no-bias-swiglu-fusion --no-bias-dropout-fusion --no-rope-fusion
  --no-create-attention-mask-in-dataloader --num-workers 0 --ckpt-format torch_dist --exit-signal-handler
  --micro-batch-size 16 --global-batch-size 16 --eval-interval 100000 --eval-iters 1"

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

# train NAME STEPS CORPUS TOKENIZER FLAGS...: trains to STEPS, from where an earlier run stopped
train() {
  local name=$1 steps=$2 corpus=$3 tokenizer=$4
  shift 4
  if [ "$(cat "$OUT/$name/latest_checkpointed_iteration.txt" 2>/dev/null)" = "$steps" ]; then
    echo "  $OUT/$name is complete"
    return
  fi
  # shellcheck disable=SC2086
  torchrun --standalone --nproc-per-node 1 -m bebop_megatron.pretrain $MODEL $RUN \
    --train-iters "$steps" --data-path "$corpus" --split 99,1,0 --data-cache-path "$(dirname "$corpus")/cache" \
    --tokenizer-type HuggingFaceTokenizer --tokenizer-model "$tokenizer" \
    --save "$OUT/$name" --load "$OUT/$name" "$@" 2>&1 | show_progress "$OUT/logs/$name.log" ||
    { echo "error: training $name failed; see $OUT/logs/$name.log" >&2; exit 1; }
}
