#!/bin/bash
# Slurm's TaskProlog (slurm.conf: TaskProlog=/etc/slurm/holdfast-task-prolog.sh), run as the user before each task: what it
# prints stands in the task's environment. Trainers get the name and address of their node, as its SMP has them from
# prolog.sh, and what of /etc/holdfast/slurm.env lets them in.
set -eu
address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '$1 !~ /^127\./ { print $1; exit }')
[ -n "$address" ] || address=$(hostname -I | cut -d' ' -f1)
echo "export HOLDFAST_NODE=$SLURMD_NODENAME"
echo "export HOLDFAST_HOST=$address"
if [ -r /etc/holdfast/slurm.env ]; then
    sed -n 's/^HOLDFAST_\(TLS_[A-Z]*\|TOKEN_FILE\|INSECURE\|MEMORY\|HTTP\)=/export &/p' /etc/holdfast/slurm.env
fi
