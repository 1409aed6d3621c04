#!/bin/bash
# Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/holdfast-prolog.sh), run by root on each node of a job. It starts the
# job's SMP in a systemd unit, outside the job's own cgroup. Trainers find the SMP by the job id; task-prolog.sh gives
# them the same node name and address.
# Settings for all jobs are in /etc/holdfast/slurm.env: HOLDFAST_MEMORY, HOLDFAST_HTTP, HOLDFAST_KEEP_S, and
# HOLDFAST_TLS_CERT, _KEY and _CA, or HOLDFAST_INSECURE=1 on a network that only these nodes can reach.
set -eu
PATH="/opt/train/bin:/usr/local/bin:/usr/bin:/bin" # includes the environment with holdfast
unit="holdfast-${SLURM_JOB_ID}"
systemctl is-active --quiet "$unit" && exit 0
# Under Debian a node resolves its own name to 127.0.1.1. If `holdfast doctor` says that the card is a slow one, put in
# the address of the fast network, here and in task-prolog.sh.
address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '$1 !~ /^127\./ { print $1; exit }')
[ -n "$address" ] || address=$(hostname -I | cut -d' ' -f1)
exec systemd-run --quiet --collect --unit="$unit" --uid="$SLURM_JOB_USER" \
    --property=EnvironmentFile=-/etc/holdfast/slurm.env \
    --property=Restart=on-failure --property=RestartSec=1 --property=TimeoutStopSec=30 \
    --property=OOMScoreAdjust=-500 \
    --setenv=PATH="$PATH" \
    --setenv=HOLDFAST_JOB="$SLURM_JOB_ID" --setenv=HOLDFAST_NODE="$SLURMD_NODENAME" \
    --setenv=HOLDFAST_HOST="$address" \
    /usr/bin/env holdfast smp start
