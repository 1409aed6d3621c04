"""``holdfast gc``: remove what dead jobs left behind."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from holdfast.cli.arguments import arena_folder, time
from holdfast.cli.output import add_json, write_json


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    gc = commands.add_parser(
        "gc",
        help="remove snapshots and SMPs that dead jobs left behind",
        description="Finds arenas of this user that no trainer uses and ends their SMPs. Snapshots in them are lost: "
        "a job that is to be restarted needs them, so only those untouched for a while are taken. What a command such "
        "as `holdfast demo` left when it was killed goes at once.",
    )
    gc.add_argument("--job", help="only this job")
    gc.add_argument(
        "--older-than", type=time, default="1h", metavar="TIME", help="how long arenas must be untouched (default 1h)"
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--zero", action="store_true", help="overwrite what is removed with zeros first")
    gc.add_argument(
        "--arena", type=arena_folder, help="where to look (default HOLDFAST_ARENA or /dev/shm/holdfast-<uid>)"
    )
    add_json(gc)
    gc.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from holdfast.smp_daemon.shared.paths import arena_base
    from holdfast.smp_daemon.shared.spawn import find_leftovers, remove

    found = []
    for leftover in find_leftovers(parsed.arena, job=parsed.job, older_than_s=parsed.older_than):
        pids = [smp.pid for smp in leftover.smps]
        smps = f", SMP {', '.join(map(str, pids))}" if pids else ""
        whose = f"job {leftover.job}" if leftover.job else "left by a command that was killed"
        if not parsed.dry_run:
            remove(leftover, zero=parsed.zero)
        verb = "would remove" if parsed.dry_run else "removed"
        print(f"{verb} {leftover.path}: {whose}, {leftover.bytes:,} bytes{smps}", file=sys.stderr)
        found.append(
            {
                "arena": str(leftover.path),
                "job": leftover.job,
                "bytes": leftover.bytes,
                "smp_pids": pids,
                "removed": not parsed.dry_run,
            }
        )
    if not found:
        where = parsed.arena or arena_base()
        of = f" of job {parsed.job}" if parsed.job else ""
        print(f"nothing to remove: {where} has no unused arena{of} untouched for --older-than", file=sys.stderr)
    write_json(parsed.json, found)
    return 0
