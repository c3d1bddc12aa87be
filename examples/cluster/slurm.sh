#!/usr/bin/env bash
#SBATCH --job-name=mtp-adapt
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=04:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=%x-%j.log
#SBATCH --signal=USR1@600
# One of the launch scripts beside this one, on many nodes, in a container, again and again until its steps are done:
#   sbatch --nodes 2 --export ALL,CKPT=...,ADAPTED=...,DATA=...,TOKENIZER=... examples/cluster/slurm.sh \
#     examples/cluster/qwen3_5_35b_a3b.sh
# Ten minutes before the time limit every trainer gets SIGUSR1, finishes its step, writes a checkpoint and ends with status 0;
# the job then queues itself again and resumes. A node that fails requeues the job as well (--requeue).
set -euo pipefail
: "${1:?launch script}" "${ADAPTED:?folder of checkpoints}" "${STEPS:=1000}"
export STEPS ADAPTED EXIT_SIGNAL=SIGUSR1
export NNODES=${SLURM_JOB_NUM_NODES:?start it with sbatch} GPUS_PER_NODE=${SLURM_NTASKS_PER_NODE:-8}
# only the first name is read, and a scontrol that is cut off while it prints the others has not failed
read -r MASTER_ADDR < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
export MASTER_ADDR MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))

# pyxis and enroot; leave CONTAINER empty to run in the environment that is active
CONTAINER_FLAGS=()
if [ -n "${CONTAINER:-}" ]; then
  CONTAINER_FLAGS=(--container-image "$CONTAINER" --container-mounts "$PWD:$PWD,${MOUNTS:-/tmp:/tmp}" --container-workdir "$PWD")
fi

status=0
# shellcheck disable=SC2016
srun --kill-on-bad-exit=1 "${CONTAINER_FLAGS[@]}" bash -c '
  export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
  exec bash "$@"
' launch "$@" || status=$?

done_steps=$(cat "$ADAPTED/latest_checkpointed_iteration.txt" 2>/dev/null || echo 0)
echo "status $status, $done_steps of $STEPS steps"
if [ "$status" -ne 0 ]; then exit "$status"; fi
if [ "$done_steps" -lt "$STEPS" ]; then scontrol requeue "$SLURM_JOB_ID"; fi
