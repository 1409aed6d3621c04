#!/bin/bash
# Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/holdfast-prolog.sh), run by root on each node of a job: starts the job's
# SMP in a unit of systemd, out of reach of the job's own cgroup. Trainers find it by the job's id; task-prolog.sh tells
# them the same name and address.
# Settings for all jobs stand in /etc/holdfast/slurm.env: HOLDFAST_MEMORY, HOLDFAST_HTTP, HOLDFAST_KEEP_S, and
# HOLDFAST_TLS_CERT, _KEY and _CA, or HOLDFAST_INSECURE=1 on a network that only these nodes can reach.
set -eu
PATH=/opt/train/bin:/usr/local/bin:/usr/bin:/bin # of the environment that has holdfast in it
unit="holdfast-${SLURM_JOB_ID}"
systemctl is-active --quiet "$unit" && exit 0
# A node's own name is 127.0.1.1 to itself under Debian.
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
