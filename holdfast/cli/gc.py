"""``holdfast gc``: remove what dead jobs left behind."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from holdfast.cli.output import add_json, write_json


def add(commands: Any) -> None:
    """Put the command into `commands`."""
    gc = commands.add_parser(
        "gc",
        help="remove snapshots and SMPs that dead jobs left behind",
        description="Finds arenas of this user that no trainer uses and ends their SMPs. Snapshots in them are lost: "
        "a job that is to be restarted needs them, so only those untouched for a while are taken.",
    )
    gc.add_argument("--job", help="only this job")
    gc.add_argument("--older-than", type=float, default=3600.0, metavar="SECONDS", help="untouched for (default 3600)")
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--zero", action="store_true", help="overwrite what is removed with zeros first")
    gc.add_argument("--arena", type=Path, help="where to look (default HOLDFAST_ARENA or /dev/shm/holdfast-<uid>)")
    add_json(gc)
    gc.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from holdfast.smp_daemon.shared.spawn import find_leftovers, remove

    found = []
    for leftover in find_leftovers(parsed.arena, job=parsed.job, older_than_s=parsed.older_than):
        smp = f", SMP {leftover.smp.pid}" if leftover.smp else ""
        if not parsed.dry_run:
            remove(leftover, zero=parsed.zero)
        verb = "would remove" if parsed.dry_run else "removed"
        print(f"{verb} {leftover.arena}: job {leftover.job}, {leftover.bytes:,} bytes{smp}", file=sys.stderr)
        found.append(
            {
                "arena": str(leftover.arena),
                "job": leftover.job,
                "bytes": leftover.bytes,
                "smp_pid": leftover.smp.pid if leftover.smp else None,
                "removed": not parsed.dry_run,
            }
        )
    if not found:
        print("nothing to remove", file=sys.stderr)
    write_json(parsed.json, found)
    return 0
