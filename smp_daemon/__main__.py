"""``python -m holdfast.smp_daemon``: run one SMP, in the foreground or detached.

Prints one line of JSON on standard output: ``{"ready": {...}}`` once it serves, or ``{"error": ..., "message": ...}``.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from holdfast.smp_daemon.shared.credentials import access_of, current
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.logs import about, chosen_format, get_log, log_later, log_to
from holdfast.smp_daemon.shared.priority import PRIORITIES, make_idle, make_session_nice
from holdfast.smp_daemon.shared.quantities import duration, parse_rate, parse_size, parse_time

if TYPE_CHECKING:
    from holdfast.smp_daemon.node.core import Settings
    from holdfast.smp_daemon.service import Smp

MOST_GRACE_S = 3600.0

log = get_log("holdfast.smp_daemon")


def main() -> None:
    """Parse arguments, detach if asked to, and serve until the SMP is stopped."""
    arguments = _parser().parse_args()
    out = sys.stdout.fileno()
    if arguments.detach:
        out = _detach()
    sys.exit(_serve(arguments, out))


def _serve(arguments: argparse.Namespace, out: int) -> int:
    if arguments.priority == "idle":
        if arguments.detach:
            make_session_nice()  # without --detach the session is the caller's
        make_idle()  # before the first thread starts: the policy is per thread, and new threads inherit it

    from holdfast.smp_daemon.coding.drain import leave_on_signals, parse_spares
    from holdfast.smp_daemon.ops.web import parse_http, show
    from holdfast.smp_daemon.service import Smp, watch  # late: importing NumPy starts threads
    from holdfast.smp_daemon.shared.addresses import parse_hosts
    from holdfast.smp_daemon.shared.spawn import sweep

    log_later()  # what the SMP finds in its arena is logged there, once it knows that the arena is its own
    try:
        chosen_format()
        http = parse_http(arguments.http)
        hosts = parse_hosts(arguments.host)
        access = access_of(hosts, arguments.insecure, current())
        spares = parse_spares(arguments.spares)
        grace_s = parse_grace(arguments.grace)
        settings = settings_of(arguments)
        smp = Smp(
            arguments.job,
            arguments.node,
            arguments.arena,
            arguments.host,
            arguments.port,
            arguments.bulk_port,
            settings,
            access,
        )
    except HoldfastError as error:
        _say(out, {"error": type(error).__name__, "message": str(error)})
        return 1
    log_to(
        arguments.arena / "smp.log", job=arguments.job, node=arguments.node, epoch=lambda: epoch_text(smp.store.epoch)
    )
    threading.excepthook = _log_bug
    web = show(smp, http)
    _log_backend(settings.backend)
    _log_access(access, hosts)
    _log_memory(smp)
    smp.watchdog.start()
    ended_by: list[int] = []
    leave_on_signals(lambda: smp.drain(grace_s, spares, wait=True), smp.stop, grace_s, ended_by.append)
    _say(out, {"ready": asdict(smp.owner)})
    sweep(arguments.arena.parent, zero=settings.zero)
    watch(smp, arguments.owner_pid)
    if web is not None:
        web.close()
    smp.close()
    return 128 + signal.SIGINT if signal.SIGINT in ended_by else 0


def settings_of(arguments: argparse.Namespace) -> Settings:
    """The settings in the options of `add_options`. Raises `ConfigError`, which names the option and its variable."""
    from holdfast.smp_daemon.coding.sending import parse_links
    from holdfast.smp_daemon.node.core import Settings
    from holdfast.smp_daemon.persist.options import parse_options
    from holdfast.smp_daemon.shared.pacer import parse_turns
    from holdfast.smp_daemon.watchdog.liveness import parse_deadlines

    return Settings(
        backend=arguments.backend,
        bandwidth=parse_rate(arguments.bandwidth, "--bandwidth (HOLDFAST_BANDWIDTH)"),
        turns=parse_turns(arguments.turns),
        links=parse_links(arguments.links),
        scrub=parse_rate(arguments.scrub, "--scrub (HOLDFAST_SCRUB)"),
        regroup_after_s=parse_time(arguments.regroup_after, "--regroup-after (HOLDFAST_REGROUP_AFTER)"),
        rebuild=arguments.rebuild,
        memory=parse_size(arguments.memory, "--memory (HOLDFAST_MEMORY)"),
        zero=arguments.zero,
        deadlines=parse_deadlines(arguments.deadlines),
        on_hang=arguments.on_hang,
        priority=arguments.priority,
        persist=parse_options(
            arguments.persist, arguments.persist_every, arguments.persist_keep, arguments.persist_bandwidth
        ),
    )


def parse_grace(text: str) -> float:
    """The value of ``--grace`` in seconds. Raises `ConfigError`."""
    what = "--grace (HOLDFAST_GRACE)"
    grace_s = parse_time(text, what)
    if grace_s > MOST_GRACE_S:
        raise ConfigError(f"{what}: {text!r} is longer than {duration(MOST_GRACE_S)}: give less")
    return grace_s


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.smp_daemon", description="Run a snapshot management process."
    )
    parser.add_argument("--job", required=True, help="id of the training run")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument("--arena", required=True, type=_absolute, help="directory on tmpfs that this SMP owns")
    add_options(parser)
    return parser


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add every option except job, node and arena. `holdfast.cli.smp` adds the same options."""
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS,...",
        help="where to listen for other SMPs: an address of this machine, or one for each of its network cards, which "
        "then share the raw bytes; gRPC is served on the first",
    )
    parser.add_argument("--port", default=0, type=int, help="gRPC port; 0: the one before, or any")
    parser.add_argument(
        "--bulk-port",
        default=0,
        type=int,
        help="TCP port for raw bytes on every address of --host; where it is taken, the addresses after the first use "
        "another. 0: the predecessor's port, or any free one",
    )
    parser.add_argument(
        "--http",
        default=os.environ.get("HOLDFAST_HTTP", "auto"),
        metavar="PORT",
        help="loopback port for the page, /status.json and /metrics; ADDRESS:PORT: an address off loopback serves "
        "/metrics only; auto: the predecessor's port, or any free one; off: none. If the port is taken, another one is "
        "used (default HOLDFAST_HTTP or auto)",
    )
    parser.add_argument("--owner-pid", type=int, help="finish when this process is gone")
    parser.add_argument(
        "--priority",
        choices=PRIORITIES,
        default=os.environ.get("HOLDFAST_PRIORITY", "auto"),
        help="auto: encoding and the scrub give way to the trainers; idle: run only when nobody else wants "
        "a core, which needs cores to spare; normal: hold nothing back (default HOLDFAST_PRIORITY or auto)",
    )
    parser.add_argument(
        "--backend",
        default=os.environ.get("HOLDFAST_BACKEND", "auto"),
        help="who computes parity: auto, isal, numpy or pyeclib; all write the same bytes (default HOLDFAST_BACKEND "
        "or auto)",
    )
    parser.add_argument(
        "--bandwidth",
        metavar="RATE",
        default=os.environ.get("HOLDFAST_BANDWIDTH", "0"),
        help="most bytes per second that encoding sends, such as 2GB/s; 0: no limit (default HOLDFAST_BANDWIDTH or 0)",
    )
    parser.add_argument(
        "--turns",
        default=os.environ.get("HOLDFAST_TURNS", "1"),
        help="in how many turns the groups encode each snapshot, 1 to 64, for networks that cannot carry all at once; "
        "1: all at once (default HOLDFAST_TURNS or 1)",
    )
    parser.add_argument(
        "--links",
        default=os.environ.get("HOLDFAST_LINKS", "auto"),
        help="connections to each peer, for each network card of this node, over which units travel side by side, 1 to "
        "16; auto: one for every 16 processors, 1 to 4 (default HOLDFAST_LINKS or auto)",
    )
    parser.add_argument(
        "--scrub",
        metavar="RATE",
        default=os.environ.get("HOLDFAST_SCRUB", "64MB/s"),
        help="bytes per second at which sealed snapshots are read and checked in the background; 0: not "
        "(default HOLDFAST_SCRUB or 64MB/s)",
    )
    parser.add_argument(
        "--regroup-after",
        default=os.environ.get("HOLDFAST_REGROUP_AFTER", "30s"),
        metavar="TIME",
        help="how long a node may be missing, with no trainer connected, before the survivors regroup "
        "without it; 0: never (default HOLDFAST_REGROUP_AFTER or 30s)",
    )
    parser.add_argument(
        "--rebuild",
        default=os.environ.get("HOLDFAST_REBUILD", "chain"),
        help="how the shards of a lost node are computed: chain (helpers pass partial sums on) or decode (default "
        "HOLDFAST_REBUILD or chain)",
    )
    parser.add_argument(
        "--persist",
        default=os.environ.get("HOLDFAST_PERSIST", ""),
        metavar="URL",
        help="where protected snapshots are also written: a directory that all nodes share, or a URL that fsspec "
        "knows; empty: nowhere (default HOLDFAST_PERSIST or nowhere)",
    )
    parser.add_argument(
        "--persist-every",
        default=os.environ.get("HOLDFAST_PERSIST_EVERY", "30min"),
        metavar="TIME",
        help="how often, at most, such as 90s or 30min (default HOLDFAST_PERSIST_EVERY or 30min)",
    )
    parser.add_argument(
        "--persist-keep",
        default=os.environ.get("HOLDFAST_PERSIST_KEEP", "2"),
        metavar="N",
        help="how many persisted snapshots are kept (default HOLDFAST_PERSIST_KEEP or 2)",
    )
    parser.add_argument(
        "--persist-bandwidth",
        metavar="RATE",
        default=os.environ.get("HOLDFAST_PERSIST_BANDWIDTH", "0"),
        help="most bytes per second that are read from memory to be persisted; 0: no limit (default "
        "HOLDFAST_PERSIST_BANDWIDTH or 0)",
    )
    parser.add_argument(
        "--memory",
        default=os.environ.get("HOLDFAST_MEMORY", "0"),
        metavar="SIZE",
        help="memory for snapshots, such as 64GB: reserved at the start, and never more; a job that needs more is "
        "refused. 0: what the job needs, reserved at its first step (default HOLDFAST_MEMORY or 0)",
    )
    parser.add_argument(
        "--zero",
        action="store_true",
        default=os.environ.get("HOLDFAST_ZERO") == "1",
        help="overwrite snapshots that are given up with zeros, which takes a memset of each (default HOLDFAST_ZERO=1)",
    )
    parser.add_argument(
        "--deadlines",
        default=os.environ.get("HOLDFAST_DEADLINES", ""),
        metavar="PHASE=TIME,...",
        help="how long a trainer of this node may be quiet before it counts as hung: start, restore (15min each), copy "
        "(2min), step (60s, or factor (10) times the median step if longer); 0: for ever (default HOLDFAST_DEADLINES "
        "or these)",
    )
    parser.add_argument(
        "--on-hang",
        default=os.environ.get("HOLDFAST_ON_HANG", ""),
        metavar="COMMAND",
        help="shell command that is run once per hang of a trainer, with HOLDFAST_JOB, _NODE, _COORD, _PID, _PHASE and "
        "_STEP set, for at most a minute (default HOLDFAST_ON_HANG or none)",
    )
    parser.add_argument(
        "--grace",
        default=os.environ.get("HOLDFAST_GRACE", "25s"),
        metavar="TIME",
        help="longest time after SIGTERM to move this node's snapshots to other nodes before the SMP ends; 0: end at "
        "once (default HOLDFAST_GRACE or 25s: Kubernetes kills after 30)",
    )
    parser.add_argument(
        "--spares",
        default=os.environ.get("HOLDFAST_SPARES", ""),
        metavar="HOST:PORT,...",
        help="SMPs of this job on nodes without trainers, by their gRPC ports, that take over first what is "
        "moved after SIGTERM (default HOLDFAST_SPARES or none)",
    )
    parser.add_argument("--detach", action="store_true", help="serve in a session of its own and return")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen off loopback although nothing is encrypted or authenticated: no token, no certificates",
    )


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _detach() -> int:
    """Fork twice, so that the SMP survives its caller and the caller's session.

    Returns the file descriptor to report to. The original process waits for the report, prints it and exits.
    """
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        _pass_on(read_end)
    os.close(read_end)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    return write_end


def _pass_on(read_end: int) -> NoReturn:
    with os.fdopen(read_end) as report:
        text = report.read()
    sys.stdout.write(text)
    sys.stdout.flush()
    os._exit(0 if '"ready"' in text else 1)


def _say(out: int, message: dict[str, object]) -> None:
    """Write the report to `out`, then replace `out` by the null device, so that the reader sees end of file. A reader
    that was killed meanwhile misses the report, and nothing else: the next one finds the SMP."""
    try:
        os.write(out, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        log.info("the process that started this SMP has ended meanwhile")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, out)
    os.close(null)


def _log_backend(backend: str) -> None:
    from holdfast.ec import describe_auto

    name, reason = describe_auto() if backend == "auto" else (backend, "")
    if reason:
        log.warning("parity is computed by %s, slowly: %s", name, reason, extra=about(backend=name))
    else:
        log.info("parity is computed by %s", name, extra=about(backend=name))


_LET_IN = {
    "loopback": "only this user's processes on this machine",
    "token": "anyone with the token",
    "mTLS": "anyone with a certificate of the CA",
    "token and mTLS": "anyone with the token and a certificate of the CA",
}
"""Who may connect, by the result of `smp_daemon.shared.credentials.access_of`."""


def _log_access(access: str, hosts: Sequence[str]) -> None:
    if access == "insecure":
        text = "INSECURE: anyone who can reach %s can read and damage this job's snapshots: see SECURITY.md"
        log.warning(text, ", ".join(hosts))
    else:
        log.info("%s may connect", _LET_IN[access])


def _log_memory(smp: Smp) -> None:
    budget = smp.store.arena.budget
    if budget.limit:
        log.info("%d bytes of memory are reserved, %d in slots", budget.limit, budget.used)


def _log_bug(failed: threading.ExceptHookArgs) -> None:
    """Log the uncaught exception of a thread, since a detached process has no standard error."""
    name = failed.thread.name if failed.thread else "?"
    trace = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
    log.critical("thread %s ended by a bug: %s", name, failed.exc_value, extra=about(thread=name, trace=trace))
    threading.__excepthook__(failed)


if __name__ == "__main__":
    main()
