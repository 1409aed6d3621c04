"""``python -m smp_daemon``: run one SMP, in the foreground or detached.

Says one line of JSON on standard output once it serves, ``{"ready": {...}}``, or ``{"error": ..., "message": ...}``.
"""

from __future__ import annotations

import argparse
import ipaddress
import json
import logging
import logging.handlers
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from smp_daemon.errors import ConfigError, HoldfastError


def main() -> None:
    """Parse arguments, detach if asked to, serve until the job has finished."""
    arguments = _parser().parse_args()
    out = sys.stdout.fileno()
    if arguments.detach:
        out = _detach()
    sys.exit(_serve(arguments, out))


def _serve(arguments: argparse.Namespace, out: int) -> int:
    if arguments.priority == "idle":
        _be_idle()  # before the first thread is made: threads inherit it, the process has no say

    from smp_daemon.service import Smp, watch  # NumPy makes threads when it is imported

    try:
        _check_host(arguments.host, arguments.insecure)
        smp = Smp(
            arguments.job,
            arguments.node,
            arguments.arena,
            arguments.host,
            arguments.port,
            arguments.bulk_port,
        )
    except HoldfastError as error:
        _say(out, {"error": type(error).__name__, "message": str(error)})
        return 1
    _log_to(arguments.arena / "smp.log", arguments)
    _say(out, {"ready": asdict(smp.owner)})
    watch(smp, arguments.owner_pid)
    smp.close()
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m smp_daemon", description="Run a snapshot management process.")
    parser.add_argument("--job", required=True, help="id of the training run")
    parser.add_argument("--node", required=True, help="name of this node, unique in the job")
    parser.add_argument("--arena", required=True, type=_absolute, help="directory on tmpfs that this SMP owns")
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on for other SMPs")
    parser.add_argument("--port", default=0, type=int, help="gRPC port; 0: the one before, or any")
    parser.add_argument("--bulk-port", default=0, type=int, help="port for raw bytes; 0: the one before, or any")
    parser.add_argument("--owner-pid", type=int, help="finish when this process is gone")
    parser.add_argument(
        "--priority",
        choices=["normal", "idle"],
        default=os.environ.get("HOLDFAST_PRIORITY", "normal"),
        help="idle: run only when nobody else wants a core; needs cores to spare (default HOLDFAST_PRIORITY or normal)",
    )
    parser.add_argument("--detach", action="store_true", help="serve in a session of its own and return")
    parser.add_argument(
        "--insecure",
        action="store_true",
        help="listen off loopback although nothing is encrypted or authenticated",
    )
    return parser


def _absolute(text: str) -> Path:
    return Path(text).absolute()


def _check_host(host: str, insecure: bool) -> None:
    try:
        address = ipaddress.ip_address(host)
    except ValueError as error:
        raise ConfigError(f"--host takes an IP address, not {host!r}") from error
    if not address.is_loopback and not insecure:
        raise ConfigError(
            f"{host} is not a loopback address, and traffic between SMPs is neither encrypted nor authenticated: "
            "say --insecure on a network that only this job's nodes can reach"
        )


def _be_idle() -> None:
    """Run only when nobody else wants the processor: the training step must not notice this process."""
    try:
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    except OSError:  # not everywhere may a process choose; the lowest nice value comes closest
        os.nice(19)


def _detach() -> int:
    """Fork twice, so that neither the caller's death nor its session's reaches us. Returns where to report.

    The first process waits for the report, passes it on and exits.
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
    """Report, and leave nothing but the null device behind: whoever reads the report sees its end."""
    os.write(out, json.dumps(message).encode() + b"\n")
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, out)
    os.close(null)


def _log_to(path: Path, arguments: argparse.Namespace) -> None:
    handler = logging.handlers.RotatingFileHandler(path, maxBytes=256 << 10, backupCount=1)
    logging.basicConfig(
        level=logging.INFO,
        handlers=[handler],
        format=f"%(asctime)s %(levelname)s job={arguments.job} node={arguments.node} %(name)s: %(message)s",
    )


if __name__ == "__main__":
    main()
