"""``holdfast gc``: remove what dead jobs left behind, and jobs that are given up."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.cli.arguments import add_arena, add_job, time
from holdfast.cli.output import FAILED, NOT_FOUND, OK, add_json, write_json
from holdfast.cli.smp import check_readable, jobs_in
from holdfast.smp_daemon.shared.errors import HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.plain import Address
from holdfast.smp_daemon.shared.quantities import duration

if TYPE_CHECKING:
    from holdfast.leftovers import Leftover

UNTOUCHED_S = 3600.0
"""How long an arena must be untouched if no job is named: a job may be between two starts, and needs it."""


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    gc = commands.add_parser(
        "gc",
        help="remove snapshots and SMPs that dead jobs left behind",
        description="Ends SMPs that no trainer uses, and deletes their arenas with all snapshots: only those "
        "untouched for an hour, unless the job is named. What a command such as `holdfast demo` left when it was "
        f"killed goes at once. What stays is listed, with the reason. Status {NOT_FOUND}: the job that was named has "
        f"no arena; {FAILED}: its arena stays.",
    )
    add_job(gc, "only this job, which is given up: also if its SMP still runs or was used just now")
    gc.add_argument(
        "--older-than",
        type=time,
        metavar="TIME",
        help="how long arenas must be untouched (default 1h; 0 with --job)",
    )
    gc.add_argument("--dry-run", action="store_true", help="only say what would be removed")
    gc.add_argument("--zero", action="store_true", help="overwrite what is removed with zeros first")
    add_arena(gc)
    add_json(gc)
    gc.set_defaults(run=_run)


def _run(parsed: argparse.Namespace) -> int:
    from holdfast.leftovers import find_arenas, remove
    from holdfast.smp_daemon.shared.paths import arena_base

    base: Path = parsed.arena or arena_base()
    older_than_s = parsed.older_than
    if older_than_s is None:
        older_than_s = 0.0 if parsed.job else UNTOUCHED_S
    found, seen, kept = [], False, False
    for each in find_arenas(base, job=parsed.job):
        seen = True
        pids = [smp.pid for smp in each.smps]
        smps = f", SMP {', '.join(map(str, pids))}" if pids else ""
        whose = f"job {each.job}" if each.job else "left by a command that was killed"
        said = f"{each.path}: {whose}, {each.bytes:,} bytes{smps}"
        if why := _why_kept(each, older_than_s):
            print(f"kept {said}: {why}", file=sys.stderr)
            kept = True
            continue
        if not parsed.dry_run:
            remove(each, zero=parsed.zero)
        print(f"{'would remove' if parsed.dry_run else 'removed'} {said}", file=sys.stderr)
        found.append(
            {
                "arena": str(each.path),
                "job": each.job,
                "bytes": each.bytes,
                "smp_pids": pids,
                "removed": not parsed.dry_run,
            }
        )
    if not seen:
        if parsed.job:
            check_readable(parsed.job, base)
        of = f" of job {parsed.job}; jobs there: {jobs_in(base)}" if parsed.job else ""
        print(f"nothing to remove: {base} has no arena{of}", file=sys.stderr)
    write_json(parsed.json, found)
    if not parsed.job:
        return OK
    return FAILED if kept else OK if seen else NOT_FOUND


def _why_kept(arena: Leftover, older_than_s: float) -> str:
    """Why an arena is left alone, and what to do if it is to go; empty if it is to go."""
    if arena.user:
        return f"process {arena.user} uses it: end that first"
    if arena.untouched_s < older_than_s:
        return (
            f"it was changed {duration(arena.untouched_s)} ago, and its job may be about to start again; if not, add "
            f"--job {arena.job}"
        )
    return _used_elsewhere(arena)


def _used_elsewhere(arena: Leftover) -> str:
    """`_why_kept` by what the arena's SMP says, if it runs and answers: it also knows of trainers whose memory cannot
    be looked at from here."""
    from holdfast.smp_daemon.net.refusals import refusal_of
    from holdfast.smp_daemon.ops.status import take_statuses
    from holdfast.smp_daemon.shared.spawn import running_owner

    try:
        owner = running_owner(arena.path) if arena.job and arena.smps else None
    except ProtocolError:
        return ""  # its smp.json was lost: this SMP is about to write it again, or hangs and serves nobody
    if owner is None:
        return ""
    failures: dict[Address, HoldfastError] = {}
    statuses = take_statuses(owner.job, [owner.control], failures=failures)
    if trainers := sum(status.inventory.trainers for status in statuses):
        return f"its SMP has {trainers} connections of trainers, in another container perhaps: end these first"
    refusals = map(refusal_of, failures.values())
    return next((f"whether trainers use it is not known: {why}: {why.fix}" for why in refusals if why), "")
