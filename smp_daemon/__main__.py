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
from typing import TYPE_CHECKING

from holdfast.smp_daemon.shared import settings
from holdfast.smp_daemon.shared.credentials import access_of, check_certificates, current
from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.logs import about, chosen_format, get_log, log_later, log_to
from holdfast.smp_daemon.shared.priority import make_idle, make_session_nice, take_normal_turns
from holdfast.smp_daemon.shared.processes import open_standard_streams

if TYPE_CHECKING:
    from holdfast.smp_daemon.service import Smp

log = get_log("holdfast.smp_daemon")


def main() -> None:
    """Parse arguments, detach if asked to, and serve until the SMP is stopped."""
    open_standard_streams()
    os.umask(os.umask(0o077) & 0o077)  # one that masks the owner's bits would lock the SMP out of its own arena
    arguments = _parser().parse_args()
    out = sys.stdout.fileno()
    if arguments.detach:
        out = _detach()
    sys.exit(_serve(arguments, out))


def _serve(arguments: argparse.Namespace, out: int) -> int:
    environment = os.environ | settings.given(arguments, settings.SMP_OPTIONS)
    take_normal_turns()  # before the first thread starts: the policy is per thread, and new threads inherit it
    if settings.PRIORITY.text(environment) == "idle":
        if arguments.detach:
            make_session_nice()  # without --detach the session is the caller's
        make_idle()

    from holdfast.smp_daemon.coding.moving import leave_on_signals
    from holdfast.smp_daemon.ops.web import show
    from holdfast.smp_daemon.service import Smp, finish_after, watch  # late: importing NumPy starts threads
    from holdfast.smp_daemon.shared.spawn import sweep

    log_later()  # what the SMP finds in its arena is logged there, once it knows that the arena is its own
    try:
        chosen_format()
        http = settings.HTTP.value(environment)
        hosts = settings.HOST.value(environment)
        credentials = current()
        access = access_of(hosts, settings.INSECURE.value(environment), credentials)
        if credentials.tls is not None:
            log.info("the certificate is valid until %s", check_certificates(credentials.tls))
        spares = settings.SPARES.value(environment)
        grace_s = settings.GRACE.value(environment)
        smp = Smp(
            arguments.job,
            arguments.node,
            arguments.arena,
            settings.HOST.text(environment),
            arguments.port,
            arguments.bulk_port,
            environment,
            access,
        )
        log_to(
            arguments.arena / "smp.log",
            job=arguments.job,
            node=arguments.node,
            epoch=lambda: epoch_text(smp.store.state.epoch),
        )
        threading.excepthook = _log_bug
        sys.excepthook = lambda *failed: _log_bug(threading.ExceptHookArgs((*failed, threading.main_thread())))
        if arguments.owner_pid is not None:
            finish_after(smp, arguments.owner_pid)
        web = show(smp, http)
    except HoldfastError as error:
        _say(out, {"error": type(error).__name__, "message": str(error)})
        print(f"holdfast: {error}", file=sys.stderr)  # in the foreground: it ends as commands do
        return 2 if isinstance(error, ConfigError) else 1
    except Exception as error:  # a limit of this process, or a bug: whoever started it sees nothing else of it
        trace = "" if isinstance(error, OSError) else f"\n{traceback.format_exc()}"
        _say(out, {"error": HoldfastError.__name__, "message": f"the SMP cannot start: {error}{trace}"})
        raise
    _log_start(smp, hosts)
    smp.watchdog.start()
    ended_by: list[int] = []
    leave_on_signals(lambda: smp.drainer.run(grace_s, spares, wait=True), smp.stop, grace_s, ended_by.append)
    _say(out, {"ready": asdict(smp.owner)})
    sweep(arguments.arena.parent, zero=settings.ZERO.value(environment))
    watch(smp)
    if web is not None:
        web.close()
    smp.close()
    return 128 + signal.SIGINT if signal.SIGINT in ended_by else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m holdfast.smp_daemon", description="Run a snapshot management process."
    )
    parser.add_argument("--job", required=True, help="id of the training run")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument(
        "--arena", required=True, type=lambda text: Path(text).absolute(), help="directory on tmpfs that this SMP owns"
    )
    parser.add_argument("--owner-pid", type=int, help="finish when this process is gone")
    add_options(parser)
    return parser


def _port(text: str) -> int:
    try:
        return settings.whole(0, 65535).read(text)  # gRPC would take any number, and serve on another port
    except HoldfastError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the settings of an SMP, its ports and ``--detach``, as `holdfast smp start` has them too."""
    settings.add_options(parser, settings.SMP_OPTIONS)
    parser.add_argument("--port", default=0, type=_port, help="gRPC port; 0: the one before, or any")
    parser.add_argument(
        "--bulk-port",
        default=0,
        type=_port,
        help="TCP port for raw bytes on every address of --host; where it is taken, the addresses after the first use "
        "another. 0: the predecessor's port, or any free one",
    )
    parser.add_argument("--detach", action="store_true", help="serve in a session of its own and return")


def _detach() -> int:
    """Fork twice, so that the SMP survives its caller and the caller's session.

    Returns the file descriptor to report to. The original process waits for the report, prints it and exits.
    """
    read_end, write_end = os.pipe()
    if os.fork():
        os.close(write_end)
        with os.fdopen(read_end) as report:
            text = report.read()
        sys.stdout.write(text)
        sys.stdout.flush()
        os._exit(0 if '"ready"' in text else 1)
    os.close(read_end)
    os.setsid()
    if os.fork():
        os._exit(0)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.chdir("/")
    return write_end


def _say(out: int, message: dict[str, object]) -> None:
    """Write the report to `out`, then replace `out` by the null device, so that the reader sees end of file. A reader
    that was killed meanwhile misses the report, and nothing else: the next one finds the SMP."""
    null = os.open(os.devnull, os.O_WRONLY)  # first: an SMP that has said it is ready does not end for want of a file
    try:
        os.write(out, json.dumps(message).encode() + b"\n")
    except BrokenPipeError:
        log.info("the process that started this SMP has ended meanwhile")
    os.dup2(null, out)
    os.close(null)


_LET_IN = {
    "loopback": "only this user's processes on this machine",
    "token": "anyone with the token",
    "mTLS": "anyone with a certificate of the CA",
    "token and mTLS": "anyone with the token and a certificate of the CA",
}
"""Who may connect, by the result of `smp_daemon.shared.credentials.access_of`."""


def _log_start(smp: Smp, hosts: Sequence[str]) -> None:
    from holdfast.ec import describe_auto

    name, reason = describe_auto() if smp.store.backend == "auto" else (smp.store.backend, "")
    if reason:
        log.warning("parity is computed by %s, slowly: %s", name, reason, extra=about(backend=name))
    else:
        log.info("parity is computed by %s", name, extra=about(backend=name))
    if smp.access == "insecure":
        text = "INSECURE: anyone who can reach %s can read and damage this job's snapshots: see SECURITY.md"
        log.warning(text, ", ".join(hosts))
    else:
        log.info("%s may connect", _LET_IN[smp.access])
    budget = smp.arena.budget
    if budget.limit:
        log.info("memory is limited to %d bytes: %d in slots, %d in reserve", budget.limit, budget.used, budget.held)


def _log_bug(failed: threading.ExceptHookArgs) -> None:
    """Log the uncaught exception of a thread, since a detached process has no standard error."""
    name = failed.thread.name if failed.thread else "?"
    trace = "".join(traceback.format_exception(failed.exc_type, failed.exc_value, failed.exc_traceback))
    log.critical("thread %s ended by a bug: %s", name, failed.exc_value, extra=about(thread=name, trace=trace))
    threading.__excepthook__(failed)


if __name__ == "__main__":
    main()
