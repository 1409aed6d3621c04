"""``holdfast smp start | stop | status``: control the SMP of one job on this machine, by hand or from a supervisor."""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from holdfast.cli.arguments import add_arena, add_job
from holdfast.cli.output import NO_ANSWER, NOT_FOUND, add_json, write_json
from holdfast.leftovers import find_leftovers, remove
from holdfast.smp_daemon.__main__ import add_options
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError, NotFound, SmpUnavailable
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.paths import arena_base, arena_path, closed_to_us, find_owners
from holdfast.smp_daemon.shared.plain import Address
from holdfast.smp_daemon.shared.processes import own_environment
from holdfast.smp_daemon.shared.settings import HOST, JOB, MEMORY, NODE, SMP_OPTIONS, SWITCH, given
from holdfast.smp_daemon.shared.spawn import found_or_started, running_owner, smp_command
from holdfast.snapshot.connect import check_reachable, job_from_environment, node_from_environment, spanning


def add(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    smp = commands.add_parser("smp", help="start, stop or look at the SMP of a job on this machine")
    kinds = smp.add_subparsers(title="what to do", metavar="WHAT", required=True)
    start = kinds.add_parser(
        "start",
        help="run one here, in the foreground or, with --detach, in the background",
        description="Runs the SMP of a job on this node; trainers that start later find it by the job's id. In the "
        "foreground this process becomes the SMP. With --detach it is started in a session of its own, and if one runs "
        "already that is fine.",
    )
    start.add_argument("--node", help=NODE.help)
    add_options(start)
    start.set_defaults(run=_start)
    stop = kinds.add_parser(
        "stop",
        help="end it; what it holds stays in memory for the next one",
        description="Ends the SMP orderly. What it holds stays on tmpfs, and the next SMP of the job on this node "
        "takes it over; --remove deletes it. Refused while trainers are connected. It moves nothing to other nodes: "
        f"that is what `holdfast drain` does. Status 0: it has ended; {NOT_FOUND}: none ran.",
    )
    stop.add_argument("--remove", action="store_true", help="also delete what it holds, or what a dead SMP left")
    stop.add_argument("--force", action="store_true", help="even while trainers are connected")
    status = kinds.add_parser(
        "status",
        help="say whether it runs, and what it holds",
        description=f"Status 0: it runs and answers; {NOT_FOUND}: none runs; {NO_ANSWER}: one does not answer.",
    )
    stop.set_defaults(run=_stop)
    status.set_defaults(run=_status)
    for parser in (start, stop, status):
        add_job(parser, JOB.help)
        add_arena(parser)
        add_json(parser)


def smp_arguments(parsed: argparse.Namespace) -> list[str]:
    """The arguments for ``python -m holdfast.smp_daemon`` that say what was said here. Pure."""
    words = ["--port", str(parsed.port), "--bulk-port", str(parsed.bulk_port), *["--detach"] * parsed.detach]
    for each in SMP_OPTIONS:
        if (text := getattr(parsed, each.name)) is not None:
            words += [each.option] if each.kind is SWITCH else [each.option, text]
    return words


def _start(parsed: argparse.Namespace) -> int:
    job = parsed.job or job_from_environment()
    arena = arena_path(job, parsed.arena)
    environment = os.environ | given(parsed, SMP_OPTIONS)
    for each in SMP_OPTIONS:
        each.value(environment)  # refused here, where the caller sees it, and before an SMP starts
    memory = MEMORY.value(environment)
    check_reachable(HOST.text(environment), spanning(os.environ))
    own = smp_command(job, parsed.node or node_from_environment(), arena, HOST.text(environment))
    command = [*own, *smp_arguments(parsed)]
    if not parsed.detach:
        sys.stdout.flush()
        os.execve(command[0], command, own_environment())
    owner, is_new = found_or_started(command, arena)
    verb, reserved = ("started", memory) if is_new else ("runs already", 0)
    where = f"{owner.host}:{owner.control_port}" + (f", reserves {reserved:,} bytes" if reserved else "")
    print(f"SMP {owner.pid} of job {owner.job} on {owner.node}: {verb}, {where}", file=sys.stderr)
    write_json(parsed.json, {"started": is_new, **asdict(owner)})
    return 0


def _stop(parsed: argparse.Namespace) -> int:
    job = parsed.job or job_from_environment()
    check_readable(job, parsed.arena)
    arena = arena_path(job, parsed.arena)
    pid = None
    try:
        client = SmpClient(arena, job)
        try:
            pid = client.pid
            client.stop(remove=parsed.remove, force=parsed.force)
        finally:
            client.close()
    except (SmpUnavailable, DeadlineExceeded) as error:
        if (running := running_owner(arena)) is not None:
            raise SmpUnavailable(f"SMP {running.pid} runs and does not answer: {error}") from error
        if not arena.exists():
            raise NotFound(no_arena_message(job, arena)) from error
        dead = [each for each in find_leftovers(arena, job=job) if each.path == arena] if parsed.remove else []
        for leftover in dead:
            remove(leftover)
    said = f"SMP {pid} of job {job}: ended" if pid else f"no SMP of job {job} runs here"
    kept = arena.exists()
    print(f"{said}; {arena} {'stays for the next one' if kept else 'is removed'}", file=sys.stderr)
    write_json(parsed.json, {"job": job, "pid": pid, "arena": str(arena), "kept": kept})
    return 0 if pid else NOT_FOUND


def no_arena_message(job: str, arena: Path) -> str:
    """The message that a job has no arena where it was looked for, and which jobs have one."""
    return f"job {job}: there is no arena {arena}; jobs in {arena.parent}: {jobs_in(arena.parent)}"


def check_readable(job: str | None, base: Path | None) -> None:
    """Raises `SmpUnavailable` if this user may not read the arena of `job`, or of some job, below `base`."""
    from holdfast.smp_daemon.net.refusals import Refusal

    for path in closed_to_us(arena_path(job, base) if job else base or arena_base()):
        raise SmpUnavailable(f"{path}: {Refusal.PERMISSION}: {Refusal.PERMISSION.fix}")


def jobs_in(base: Path) -> str:
    """The jobs with arenas below `base`, as text."""
    return ", ".join(sorted({owner.job for owner in find_owners(base)})) or "none"


def _status(parsed: argparse.Namespace) -> int:
    from holdfast.smp_daemon.net.refusals import refusal_of
    from holdfast.smp_daemon.ops.status import take_statuses

    job = parsed.job or job_from_environment()
    check_readable(job, parsed.arena)
    arena = arena_path(job, parsed.arena)
    owner = running_owner(arena)
    report: dict[str, Any] = {"job": job, "arena": str(arena), "running": owner is not None, "answers": False}
    said = (
        f"no SMP of job {job} runs here; its arena {arena} is there" if arena.exists() else no_arena_message(job, arena)
    )
    lines, code = [said], NOT_FOUND
    if owner is not None:
        failures: dict[Address, HoldfastError] = {}
        statuses = take_statuses(job, [owner.control], failures=failures)
        refusal = next(filter(None, map(refusal_of, failures.values())), None)
        report |= {**asdict(owner), "refused": refusal and refusal.value}
        why = f": {refusal}: {refusal.fix}" if refusal else " does not answer"
        lines, code = [f"SMP {owner.pid} of job {job} on {owner.node}{why}"], NO_ANSWER
        for status in statuses:
            held = status.inventory
            newest = max((snapshot for snapshot, _ in held.shards), default=None)
            lines, code = (
                [
                    f"SMP {owner.pid} of job {job} on {owner.node}: up {status.up_s:,.0f} s, "
                    f"epoch {epoch_text(held.epoch)}, "
                    f"{held.trainers} connections of trainers" + (", leaving" if held.leaving else ""),
                    f"{owner.host}: bytes {owner.bulk_port}, gRPC {owner.control_port}, page {owner.http_port}"
                    + "".join(f"; {host}: bytes {port}" for host, port in owner.more_bulk),
                    f"{arena}: {status.arena_bytes:,} bytes in slots"
                    + (f" of {status.memory_bytes:,} allowed" if status.memory_bytes else "")
                    + f", {len(held.shards)} shards sealed, newest "
                    f"{newest or 'none'}, protected {held.protected or 'none'}",
                    *filter(None, (status.reserving, status.verifying)),
                    *status.troubles,
                ],
                0,
            )
            report |= {"answers": True, "status": status.to_plain()}
    for line in lines:
        print(line, file=sys.stderr if parsed.json == "-" else sys.stdout)
    write_json(parsed.json, report)
    return code
