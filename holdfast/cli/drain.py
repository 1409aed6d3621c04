"""``holdfast drain NODE``: move a node's bytes to other nodes before it is taken away."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from holdfast.cli.arguments import add_arena, add_job, deadline_up_to
from holdfast.cli.output import add_json, write_json
from holdfast.cli.smp import check_readable
from holdfast.cli.status import check_answers, gather
from holdfast.smp_daemon.coding.regroup import Drained
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.ops.overview import Overview, look
from holdfast.smp_daemon.ops.status import Status
from holdfast.smp_daemon.shared.addresses import parse_spares
from holdfast.smp_daemon.shared.errors import ConfigError, NotFound, SmpUnavailable
from holdfast.smp_daemon.shared.limits import move_deadline
from holdfast.smp_daemon.shared.messages import LONGEST_S, Drain
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.quantities import duration

MARGIN_S = 10.0
"""How much longer than the drain's own deadline to wait for its answer, in seconds."""


def add(commands: Any) -> None:
    """Add the command to a parser's subcommands."""
    drain = commands.add_parser(
        "drain",
        help="move what a node holds to other nodes before it is taken away",
        description="Moves the newest snapshot that a node holds a part of to other nodes of the job, or to spares, "
        "which protect it among themselves; then the node's SMP ends, and its memory is free. A job that trains takes "
        "a last snapshot, waits while that is moved, and ends with the error NodeLeaves. Status 0 only if nothing on "
        "the node is needed any more.",
    )
    drain.add_argument("node", help="name of the node, as `holdfast status` tells it")
    add_job(drain, "id of the training run (default: the one that has this node)")
    add_arena(drain)
    drain.add_argument("--at", metavar="HOST:PORT", help="any SMP of the job, if none is on this machine; needs --job")
    drain.add_argument("--to", default="", metavar="HOST:PORT,...", help="spares: SMPs that the job does not use yet")
    drain.add_argument(
        "--wait",
        action="store_true",
        help="wait for trainers to go, for as long as --deadline says, instead of having them end",
    )
    drain.add_argument(
        "--deadline",
        type=deadline_up_to(LONGEST_S),
        metavar="TIME",
        help="at most 24h (default: 10min, and as long as the node's bytes take at 100 MB/s)",
    )
    add_json(drain)
    drain.set_defaults(run=run)


def run(parsed: argparse.Namespace) -> int:
    """``holdfast drain``."""
    overview = _job_of(parsed)
    overview.check_let_in()
    status = _status_of(overview, parsed.node)
    spares = parse_spares(parsed.to)
    deadline_s = parsed.deadline or min(move_deadline(status.arena_bytes), LONGEST_S)
    message = Drain(job=overview.job, deadline_s=deadline_s, spares=spares, wait=parsed.wait)
    out = sys.stderr if parsed.json == "-" else sys.stdout
    print(
        f"moving what {parsed.node} holds of job {overview.job}, for at most {duration(deadline_s)}",
        file=out,
        flush=True,
    )
    with PeerClient(overview.job) as peers:
        drained = from_plain(
            Drained, peers.ask(status.inventory.control, message, deadline_s + MARGIN_S), "what became of a drain"
        )
    print(sentence(parsed.node, drained), file=out)
    write_json(parsed.json, {"job": overview.job, "node": parsed.node, **to_plain(drained)})
    return 0


def sentence(node: str, drained: Drained) -> str:
    """The result of draining a node, in words."""
    begin = f"{node} may be taken away, and its memory is free: "
    if drained.snapshot is None:
        return begin + "it held no snapshot that is needed"
    held = f"{drained.snapshot} is held whole by {', '.join(drained.holders)}"
    if drained.tolerates == 0:
        return f"{begin}{held}, but the loss of one more node would lose it"
    more = "any 1 more node" if drained.tolerates == 1 else f"any {drained.tolerates} more nodes"
    return f"{begin}{held}, and safe against the loss of {more}"


def look_at(parsed: argparse.Namespace) -> Overview:
    """The job ``--job``, as the SMP ``--at`` knows it. Blocks as `look`. Raises `ConfigError`, or `SmpUnavailable` if
    that one does not answer."""
    if not parsed.job:
        raise ConfigError("--at needs --job, for an SMP answers for its own job only")
    addresses = parse_spares(parsed.at)
    if len(addresses) != 1:
        raise ConfigError(f"--at {parsed.at!r} names {len(addresses)} SMPs: name one")
    overview = look(parsed.job, addresses[0])
    overview.check_let_in()
    if not overview.statuses:
        raise SmpUnavailable(
            f"no SMP of job {parsed.job!r} answers at {parsed.at}: name one that `holdfast status` shows"
        )
    return overview


def _job_of(parsed: argparse.Namespace) -> Overview:
    if parsed.at:
        return look_at(parsed)
    found = gather(parsed.arena, parsed.job)
    having = [overview for _, overview in found if parsed.node in _names(overview)]
    if len(having) > 1:
        raise ConfigError(f"{parsed.node} is in the jobs {', '.join(o.job for o in having)}: choose one with --job")
    if not having:
        for _, overview in found:
            overview.check_let_in()
        check_answers(found)
        check_readable(parsed.job, parsed.arena)
        known = ", ".join(sorted({name for _, overview in found for name in _names(overview)}))
        there = f"there are {known}: name one of these, or" if known else "there is no job:"
        raise NotFound(f"no job on this machine has a node {parsed.node!r}: {there} say --at HOST:PORT")
    return having[0]


def _names(overview: Overview) -> set[str]:
    return {status.inventory.node for status in overview.statuses} | set(overview.silent)


def _status_of(overview: Overview, node: str) -> Status:
    for status in overview.statuses:
        if status.inventory.node == node:
            return status
    refusal = overview.refused.get(node)
    why = f": {refusal}: {refusal.fix}" if refusal else " does not answer"
    raise SmpUnavailable(
        f"the SMP of {node}{why}, so nothing can be moved from it. What the others can restore without it, "
        f"they protect again on their own: {overview.sentence()}"
    )
