#!/bin/bash
#SBATCH --job-name=train
#SBATCH --nodes=5
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --gpus-per-node=8
#SBATCH --mem=0
#SBATCH --no-kill
# All GPUs, cores and memory of each node. SMP_CORES of the cores are for the SMP: `holdfast plan` says how many.
# Without an administrator: the SMPs are a step of the job itself, beside the trainers' step, and outlive that step.
# TRAINING nodes train; all other allocated nodes are spares. --no-kill: the loss of a node ends what ran on it, but not
# the job, which continues with a spare.
set -u
umask 077
training=${TRAINING:-4} gpus=${GPUS:-8} smp_cores=${SMP_CORES:-4}
trainer_cores=$((SLURM_CPUS_ON_NODE - smp_cores))
export HOLDFAST_JOB="$SLURM_JOB_ID" HOLDFAST_TOKEN_FILE="$HOME/.holdfast-$SLURM_JOB_ID"
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
[ -e "$HOLDFAST_TOKEN_FILE" ] || head -c 32 /dev/urandom | base64 >"$HOLDFAST_TOKEN_FILE"
trap 'rm -f "$HOLDFAST_TOKEN_FILE"' EXIT
# Sets each node's name and address, for its SMP and for its trainers, which start another SMP if that one is gone. The
# first address may be a management card's: `holdfast doctor` on a node says which card it is, and of a faster one.
# shellcheck disable=SC2016  # each node's own shell must expand these, not this one
on_node='export HOLDFAST_NODE="$SLURMD_NODENAME" HOLDFAST_HOST
    HOLDFAST_HOST=$(hostname -I | cut -d" " -f1)
    exec "$@"'
srun --overlap --no-kill --kill-on-bad-exit=0 --ntasks-per-node=1 --cpus-per-task="$smp_cores" --gres=none --mem=0 --label \
    bash -c "$on_node" on_node holdfast smp start &
smps=$!
for attempt in 1 2 3 4 5; do
    up=$(sinfo --noheader --Node --responding --nodes="$SLURM_JOB_NODELIST" --states=allocated,mixed --format=%N |
        sort -u | head -n "$training")
    if [ "$(echo "$up" | wc -w)" -lt "$training" ]; then
        echo "attempt $attempt: $training nodes are needed to train, but only these respond:" "$up" >&2
        sleep "${RETRY_S:-60}"
        continue
    fi
    if srun --overlap --no-kill --nodes="$training" --nodelist="$(echo "$up" | paste -sd,)" --ntasks-per-node=1 \
        --cpus-per-task="$trainer_cores" --gpus-per-node="$gpus" --mem=0 \
        bash -c "$on_node" on_node torchrun --nnodes="$training" --nproc-per-node="$gpus" \
        --rdzv-backend=c10d --rdzv-endpoint="$(echo "$up" | head -n 1):29500" --rdzv-id="$SLURM_JOB_ID" train.py; then
        break
    fi
    echo "attempt $attempt failed; the next one goes on from memory" >&2
done
kill "$smps" 2>/dev/null
wait
