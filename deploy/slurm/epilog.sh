#!/bin/bash
# Slurm's Epilog (slurm.conf: Epilog=/etc/slurm/holdfast-epilog.sh), run by root on each node when a job has ended.
# The SMP of a job that ended well is gone by now. That of one that failed, or is to be requeued, stays for
# HOLDFAST_KEEP_S seconds (/etc/holdfast/slurm.env; 0: it goes at once, and its memory is free for the next job).
set -eu
PATH=/opt/train/bin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin # of the environment that has holdfast in it
keep=0
if [ -r /etc/holdfast/slurm.env ]; then
    keep=$(sed -n 's/^HOLDFAST_KEEP_S=//p' /etc/holdfast/slurm.env)
fi
as_user() { runuser -u "$SLURM_JOB_USER" -- /usr/bin/env PATH="$PATH" "$@"; }
if [ "${keep:-0}" = 0 ]; then
    as_user holdfast smp stop --job "$SLURM_JOB_ID" --force --remove || true
else
    as_user holdfast gc --older-than "${keep}s"
fi
