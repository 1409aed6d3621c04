#!/bin/bash
# Slurm's Prolog (slurm.conf: Prolog=/etc/slurm/holdfast-prolog.sh), run by root on each node of a job: starts the job's
# SMP in a unit of systemd, out of reach of the job's own cgroup. Trainers find it by the job's id.
# Settings for all jobs stand in /etc/holdfast/slurm.env: HOLDFAST_MEMORY, HOLDFAST_KEEP_S, and HOLDFAST_TLS_CERT, _KEY and
# _CA, or HOLDFAST_INSECURE=1 on a network that only these nodes can reach.
set -eu
unit="holdfast-${SLURM_JOB_ID}"
systemctl is-active --quiet "$unit" && exit 0
address=$(getent ahostsv4 "$SLURMD_NODENAME" | awk '{ print $1; exit }')
exec systemd-run --quiet --collect --unit="$unit" --uid="$SLURM_JOB_USER" \
    --property=EnvironmentFile=-/etc/holdfast/slurm.env \
    --property=Restart=on-failure --property=RestartSec=1 --property=TimeoutStopSec=30 \
    --property=OOMScoreAdjust=-500 \
    --setenv=HOLDFAST_JOB="$SLURM_JOB_ID" --setenv=HOLDFAST_NODE="$SLURMD_NODENAME" \
    --setenv=HOLDFAST_HOST="$address" \
    /usr/bin/env holdfast smp start
