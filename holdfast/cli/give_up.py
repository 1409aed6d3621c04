"""``holdfast give-up``: say that runs of a job are over, so that the next start begins anew."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from holdfast.cli.arguments import add_arena, add_job
from holdfast.cli.drain import look_at
from holdfast.cli.output import add_json, write_json
from holdfast.cli.smp import check_readable
from holdfast.cli.status import check_answers, gather
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.ops.overview import Overview
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError, NotFound
from holdfast.smp_daemon.shared.messages import GiveUpRuns
from holdfast.smp_daemon.shared.runs import GIVE_UP_ENV, named

DEADLINE_S = 30.0
"""Timeout for the answer of one SMP, in seconds. It deletes files, and moves no bytes."""


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    give_up = commands.add_parser(
        "give-up",
        help="say that runs of a job are over: their snapshots are dropped",
        description="Drops the snapshots of runs of a job on all nodes that answer, and has these tell every later "
        "start that the runs are over. The next start begins anew. Refused while trainers of such a run are "
        f"connected. {GIVE_UP_ENV}=RUN does the same for a start whose nodes do not run yet. What was persisted stays.",
    )
    give_up.add_argument(
        "runs", nargs="*", metavar="RUN", help="ids, as `holdfast status` tells them (default: the only run)"
    )
    add_job(give_up, "id of the job (default: the only one on this machine)")
    add_arena(give_up)
    give_up.add_argument(
        "--at", metavar="HOST:PORT", help="any SMP of the job, if none is on this machine; needs --job"
    )
    add_json(give_up)
    give_up.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """``holdfast give-up``."""
    overview = _job_of(parsed)
    overview.check_let_in()
    ids = _chosen(overview, parsed.runs)
    out = sys.stderr if parsed.json == "-" else sys.stdout
    told: dict[str, str] = {}
    with PeerClient(overview.job) as peers:
        for status in overview.statuses:
            node = status.inventory.node
            try:
                peers.ask(status.inventory.control, GiveUpRuns(job=overview.job, runs=ids), DEADLINE_S)
                told[node] = ""
                print(f"{node}: run {', '.join(ids)} is given up", file=out)
            except HoldfastError as error:
                told[node] = str(error)
                print(f"{node}: not given up: {error}", file=out)
    for name in (*overview.silent, *overview.lost):
        why = overview.refused.get(name, "does not answer")
        print(f"{name} {why}: if it comes back, the next start's nodes know its run as old", file=out)
    write_json(parsed.json, {"job": overview.job, "runs": list(ids), "nodes": told})
    return int(any(told.values()))


def _job_of(parsed: argparse.Namespace) -> Overview:
    if parsed.at:
        return look_at(parsed)
    found = gather(parsed.arena, parsed.job)
    check_answers(found)
    if not found:
        check_readable(parsed.job, parsed.arena)
        raise NotFound(
            f"no SMP of {f'job {parsed.job!r}' if parsed.job else 'any job'} is on this machine: name one with --at "
            f"HOST:PORT, or start the job with {GIVE_UP_ENV}=RUN"
        )
    if len(found) > 1:
        raise ConfigError(f"this machine has the jobs {', '.join(o.job for _, o in found)}: choose one with --job")
    return found[0][1]


def _chosen(overview: Overview, wanted: list[str]) -> tuple[str, ...]:
    known = {each.run.id for each in overview.runs}
    if unknown := sorted(set(wanted) - known):
        raise ConfigError(
            f"run {', '.join(unknown)} is not among those of job {overview.job!r}: {named(overview.runs) or 'none'}"
        )
    if wanted:
        return tuple(wanted)
    if len(known) != 1:
        raise ConfigError(
            f"job {overview.job!r} has {len(known)} runs in reach: {named(overview.runs) or 'none'}. Say which one"
        )
    return tuple(known)
