#!/bin/bash
# Slurm's TaskProlog (slurm.conf: TaskProlog=/etc/slurm/holdfast-task-prolog.sh), run as the user before each task.
# Slurm adds the exports that it prints to the task's environment: the node's name and address, which must be those that
# prolog.sh gave to the SMP, and the settings in /etc/holdfast/slurm.env that trainers need.
set -eu
address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '$1 !~ /^127\./ { print $1; exit }')
[ -n "$address" ] || address=$(hostname -I | cut -d' ' -f1)
echo "export HOLDFAST_NODE=$SLURMD_NODENAME"
echo "export HOLDFAST_HOST=$address"
if [ -r /etc/holdfast/slurm.env ]; then
    sed -n 's/^HOLDFAST_\(TLS_[A-Z]*\|TOKEN_FILE\|INSECURE\|MEMORY\|HTTP\)=/export &/p' /etc/holdfast/slurm.env
fi
