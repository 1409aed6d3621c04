#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
# Without an administrator: the SMPs are a step of the job itself, beside the trainers' step, and outlive that one.
set -u
umask 077
export HOLDFAST_JOB="$SLURM_JOB_ID" HOLDFAST_TOKEN_FILE="$HOME/.holdfast-$SLURM_JOB_ID"
[ -e "$HOLDFAST_TOKEN_FILE" ] || head -c 32 /dev/urandom | base64 >"$HOLDFAST_TOKEN_FILE"
trap 'rm -f "$HOLDFAST_TOKEN_FILE"' EXIT
# shellcheck disable=SC2016  # each node's own shell is to expand these, not this one
srun --overlap --ntasks-per-node=1 --cpus-per-task=1 --kill-on-bad-exit=0 --label bash -c '
    export HOLDFAST_NODE="$SLURMD_NODENAME"
    HOLDFAST_HOST=$(hostname -I | cut -d" " -f1) exec holdfast smp start' &
smps=$!
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
for attempt in 1 2 3 4 5; do
    if srun --overlap --ntasks-per-node=1 torchrun --nnodes="$SLURM_NNODES" --nproc-per-node=8 \
        --rdzv-backend=c10d --rdzv-endpoint="$head:29500" --rdzv-id="$SLURM_JOB_ID" train.py; then
        break
    fi
    echo "attempt $attempt failed; the next one goes on from memory" >&2
done
kill "$smps" 2>/dev/null
wait
