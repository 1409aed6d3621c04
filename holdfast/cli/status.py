"""``holdfast status`` and ``holdfast top``: the jobs of this machine, and which losses their snapshots survive."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from holdfast.cli.arguments import add_arena, add_job
from holdfast.cli.output import add_json, console_of, make_console, write_json
from holdfast.cli.smp import check_readable, no_arena_message
from holdfast.report import Report, say
from holdfast.smp_daemon.ops.overview import Overview, look
from holdfast.smp_daemon.shared.errors import NotFound, SmpUnavailable
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.paths import Owner, arena_path, find_owners
from holdfast.smp_daemon.shared.quantities import amount
from holdfast.smp_daemon.shared.spawn import process_of

LOOK_EVERY_S = 2.0
"""Interval between two looks of ``holdfast top``, in seconds."""

STRAGGLERS_SHOWN = 5

COLOURS = {-1: "bold red", 0: "yellow"}


def add(commands: Any) -> None:
    """Add the commands to a parser's subcommands."""
    status = commands.add_parser(
        "status",
        help="say which step of which job is safe against what",
        description="Asks the SMPs of this machine, and those of other nodes that they know, what they hold. Status 0 "
        "only if there is a job, every SMP of it answers, no node and no snapshot is lost, and its trainers are here.",
    )
    top = commands.add_parser("top", help="what holdfast status says, every two seconds until interrupted")
    for parser, run in ((status, show_status), (top, show_top)):
        add_job(parser, "only this job")
        add_arena(parser)
        parser.set_defaults(run=run)
    add_json(status)


def show_status(parsed: argparse.Namespace) -> int:
    """``holdfast status``."""
    console = console_of(parsed)
    overviews = gather(parsed.arena, parsed.job)
    if not overviews:
        check_readable(parsed.job, parsed.arena)
    if parsed.job and not overviews:
        raise NotFound(no_arena_message(parsed.job, arena_path(parsed.job, parsed.arena)))
    say(console, render(overviews))
    write_json(parsed.json, [overview.to_json() for _, overview in overviews])
    return 0 if overviews and all(overview.is_well for _, overview in overviews) else 1


def show_top(parsed: argparse.Namespace) -> NoReturn:
    """``holdfast top``."""
    console = make_console()
    with (
        Live(Text("looking ..."), console=console, auto_refresh=False) if console.is_terminal else nullcontext() as live
    ):
        while True:
            found = render(gather(parsed.arena, parsed.job))
            if live is not None:
                live.update(found, refresh=True)
            else:
                say(console, found)
            time.sleep(LOOK_EVERY_S)


def gather(base: Path | None = None, job: str | None = None) -> list[tuple[Owner, Overview]]:
    """Every job with an arena below `base`, as one of its local SMPs sees it. Blocks for a few seconds at most."""
    found: dict[str, tuple[Owner, Overview]] = {}
    for owner in find_owners(base, job):
        if owner.job not in found or not found[owner.job][1].statuses:
            found[owner.job] = owner, look(owner.job, owner.control)
    return list(found.values())


def check_answers(found: Sequence[tuple[Owner, Overview]]) -> None:
    """Raise `SmpUnavailable` if there are jobs, and no SMP of any answers."""
    if found and not any(overview.statuses for _, overview in found):
        raise SmpUnavailable("; ".join(_why_silent(*each) for each in found))


def _why_silent(owner: Owner, overview: Overview) -> str:
    silent = f"the SMP {owner.pid} does not answer at {owner.host}:{owner.control_port}"
    gone = silent if process_of(owner) else f"its SMP {owner.pid} has ended; what it held is kept for the next one"
    return f"{overview.job}: {'; '.join(overview.refusals) or gone}"


def render(overviews: Sequence[tuple[Owner, Overview]]) -> RenderableType:
    """The text about all jobs, one below the other."""
    if not overviews:
        return Text("no job has snapshots on this machine")
    return Group(*(part for owner, overview in overviews for part in _job(owner, overview)))


def _job(owner: Owner, overview: Overview) -> list[RenderableType]:
    safe = overview.safest
    if not overview.statuses:
        return [Text(_why_silent(owner, overview), style=COLOURS[-1])]
    style = COLOURS.get(safe.tolerates, "green") if safe else "yellow"
    parts: list[RenderableType] = [Text.assemble((overview.job, "bold"), ": ", (overview.sentence(), style))]
    parts += [Text(trouble, style=COLOURS[-1]) for trouble in overview.alarms]
    version = f"holdfast {owner.version or 'of unknown version'}"
    run = "" if overview.run is None else f", run {overview.run}"
    parts.append(Text(f"{owner.url if owner.http_port else 'no page'}, {version}{run}", style="dim"))
    parts += [
        Text(f"{each} is an older run, which no restart goes on with: `holdfast give-up` drops it", style="yellow")
        for each in overview.older_runs
    ]
    parts += [Text(line, style="yellow" if ": " in line else "") for line in overview.tiers]
    parts += [Text(overview.repeats, style="yellow")] if overview.repeats else []
    older = ", ".join(f"{snapshot.step:,}" for snapshot in overview.older)
    parts += [Text(f"HOLDFAST_RESTORE_STEP could go back to step {older}")] if older else []
    insecure = [status.inventory.node for status in overview.statuses if status.access == "insecure"]
    if insecure:
        parts.append(
            Text(f"INSECURE: anybody on the network may read and spoil {', '.join(insecure)}", style=COLOURS[-1])
        )
    parts += [Text(status.said) for status in overview.statuses if status.said]
    parts += [Text(trouble, style="yellow") for trouble in overview.troubles]
    for each in overview.statuses:
        parts += [Text(f"{each.inventory.node}: {line}") for line in (each.reserving, each.verifying) if line]
    parts += [Text(f"{name} is leaving: it moves what it holds to others", style="yellow") for name in overview.leaving]
    _, spent = overview.goodput
    parts += [Text(spent)] if spent else []
    parts += [Text(line, style="yellow") for line in overview.stragglers[:STRAGGLERS_SHOWN]]
    parts += [Text(recovery_line(recovery)) for recovery in overview.recoveries[:2]]
    rows = []
    for status, own in zip(overview.statuses, overview.inventories, strict=True):
        held, counters = status.inventory, status.counters
        newest = max((snapshot for snapshot, _ in own.shards), default=None)
        damaged = f"{counters['units_damaged']:,}"
        if counters["units_repaired"]:
            damaged += f" ({counters['units_repaired']:,} repaired)"
        rows.append(
            [
                held.node,
                f"{held.host}:{held.control_port}",
                str(held.trainers),
                f"{newest.step:,}" if newest else "-",
                amount(status.arena_bytes),
                amount(status.rss_bytes),
                damaged,
            ]
        )
    for how, names in (("silent", overview.silent), ("lost", overview.lost)):
        rows += [[name, str(overview.refused.get(name, how)), "-", "-", "-", "-", "-"] for name in names]
    head = ("node", "address", "connections", "newest", "arena", "process", "damaged")
    styles = [COLOURS[-1] if row[2] == "-" else "" for row in rows]
    return [*parts, Report(head, rows, left=2, styles=styles), Text("")]


def recovery_line(recovery: dict[str, Any]) -> str:
    """One line about a recovery from `smp_daemon.recovery.recoveries.summarise`, with the times of its slowest node."""
    slowest = recovery["nodes"][0]
    spans = ", ".join(f"{name} {seconds:,.2f}" for name, seconds in slowest["spans"])
    verb = "went" if recovery["done"] else "is going"
    epoch, protect_s = epoch_text(recovery["epoch"]), recovery["protect_s"]
    again = "not yet protected again" if protect_s is None else f"protected again {protect_s:,.2f} s later"
    return (
        f"epoch {epoch} {verb} back to step {recovery['step']:,}, {recovery['seconds']:,.2f} s from the first loss to "
        f"the first new step ({slowest['node']}: {spans}); {again}; {recovery['bytes_fetched'] / 1e6:,.1f} MB fetched"
    )
