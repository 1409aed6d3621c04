#!/bin/bash
# Slurm's Epilog (slurm.conf: Epilog=/etc/slurm/holdfast-epilog.sh), run by root on each node when a job has ended.
# After a successful job the SMP has ended already. After a failed or requeued job it stays for HOLDFAST_KEEP_S seconds
# (/etc/holdfast/slurm.env), and is removed by the user's next Epilog here. With 0 it ends now, which frees its memory.
set -eu
PATH="/opt/train/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" # includes the environment with holdfast
keep=0
if [ -r /etc/holdfast/slurm.env ]; then
    keep=$(sed -n 's/^HOLDFAST_KEEP_S=//p' /etc/holdfast/slurm.env)
fi
as_user() { runuser -u "$SLURM_JOB_USER" -- /usr/bin/env PATH="$PATH" "$@"; }
if [ "${keep:-0}" = 0 ]; then
    as_user holdfast smp stop --job "$SLURM_JOB_ID" --force --remove || true
else
    as_user holdfast gc --older-than "${keep}s" || true
fi
