# Sourced by the launch scripts beside it, which set NAME, MODEL, LAYOUT and sizes: what adapting a head is the same for all.
#   CKPT       torch_dist checkpoint that holds the released MTP weights
#   DATA       prefix of the training data, TOKENIZER its folder
#   ADAPTED    checkpoints of the run ($OUT/checkpoints): run it again and it resumes from there
#   ESTIMATE=1 print the memory of each rank and start nothing
#   by hand    NODE_RANK and MASTER_ADDR on every node; Slurm sets what it needs
: "${NAME:?set by a launch script}" "${NNODES:?}" "${GPUS_PER_NODE:=8}" "${STEPS:=1000}" "${GLOBAL_BATCH:?}" "${OUT:=runs/$NAME}"
if [ -z "${ESTIMATE:-}" ]; then
  : "${CKPT:?checkpoint to start from}" "${DATA:?data prefix}" "${TOKENIZER:?tokenizer folder}"
fi
ADAPTED=${ADAPTED:-$OUT/checkpoints}
export CUDA_DEVICE_MAX_CONNECTIONS=1

# one head, applied three times, attending as vLLM and SGLang will serve it
HEAD=(
  --mtp-num-layers 3 --mtp-use-repeated-layer --mtp-attention chain
  --mtp-loss tv --mtp-freeze-schedule backbone --mtp-loss-scaling-factor 1.0
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
  LOGGING+=(--wandb-project "$WANDB_PROJECT" --wandb-exp-name "${WANDB_NAME:-$NAME-tv}" --wandb-save-dir "$OUT")
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
