"""Forks SMPs from a process that has imported all their modules, for callers that start so many that imports matter.

Each fork runs `smp_daemon.__main__.main`, like ``python -m holdfast.smp_daemon``.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.smp_daemon.shared.processes import own_command, own_environment

DEADLINE_S = 60.0
MAX_ORDER_BYTES = 1 << 17


def quiet(job: str, node: str) -> dict[str, str]:
    """Variables for a small job of one node: a snapshot at every step, and nothing that goes on beside it."""
    return {
        "HOLDFAST_HTTP": "off",
        "HOLDFAST_SCRUB": "0",
        "HOLDFAST_REGROUP_AFTER": "0",
        "HOLDFAST_EVERY": "1",
        "HOLDFAST_MAX_REPEATS": "0",
        "HOLDFAST_JOB": job,
        "HOLDFAST_NODE": node,
        "OMP_NUM_THREADS": "1",
    }


class Zygote:
    """A handle on the process that forks. Thread-safe, except `close`, which ends that process, but not its forks."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(DEADLINE_S)
        self._lock = threading.Lock()  # held from an order to its answer; no other lock is taken under it
        self._process = subprocess.Popen(
            own_command("tests.smp_zygote", str(theirs.fileno())),
            pass_fds=[theirs.fileno()],
            env=own_environment() | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # keeps Ctrl-C from it
        )
        theirs.close()

    def start(self, command: Sequence[str], environment: Mapping[str, str], errors: Path) -> Forked:
        """Run ``python -m holdfast.smp_daemon`` with these arguments."""
        read_end, write_end = os.pipe()
        order = {"arguments": list(command), "environment": dict(environment), "errors": str(errors)}
        with self._lock:
            socket.send_fds(self._channel, [json.dumps(order).encode()], [write_end])
            os.close(write_end)
            pid = int(self._channel.recv(64))
        return Forked(self, pid, os.fdopen(read_end))

    def wait(self, pid: int) -> int:
        """Reap a forked SMP and return its exit status. Blocks until it has ended, and holds the lock meanwhile."""
        with self._lock:
            self._channel.sendall(json.dumps({"wait": pid}).encode())
            return int(self._channel.recv(64))

    def close(self) -> None:
        """End the process that forks."""
        self._channel.close()
        self._process.wait(DEADLINE_S)


class Forked:
    """One forked SMP, with the part of the interface of `subprocess.Popen` that callers use."""

    def __init__(self, zygote: Zygote, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._zygote = zygote
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        """The exit status; None until `wait` or `poll` has seen it."""
        return self._status

    def poll(self) -> int | None:
        """The exit status if the SMP has ended by now; else None."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send a signal, unless the SMP has been waited for."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Send SIGKILL, unless the SMP has been waited for."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Block until the SMP has ended, and return its exit status. Raises `TimeoutExpired`."""
        if self._status is None:
            pidfd = os.pidfd_open(self.pid)  # the SMP stays a zombie until the zygote waits for it
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("an SMP", timeout or 0.0)
            finally:
                os.close(pidfd)
            self._status = self._zygote.wait(self.pid)
        return self._status


def _serve(channel: socket.socket) -> None:
    # Takes half a second of CPU time, here instead of in every fork. No import starts a thread, which forks would lack:
    # OPENBLAS_NUM_THREADS=1 turns off NumPy's.
    for part in ("service", "coding.moving", "ops.web", "persist.persister", "__main__"):
        importlib.import_module(f"holdfast.smp_daemon.{part}")
    gc.collect()
    gc.freeze()  # otherwise a collection in an SMP would touch, and so copy, every page of the imported modules
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
        except ConnectionResetError:
            return  # the parent process is gone
        if not data:
            return
        order: dict[str, Any] = json.loads(data)
        if "wait" in order:
            answer = os.waitstatus_to_exitcode(os.waitpid(order["wait"], 0)[1])
        else:
            answer = os.fork()
            if answer == 0:
                channel.close()
                _become(order, descriptors[0])
            os.close(descriptors[0])
        try:
            channel.sendall(str(answer).encode())
        except BrokenPipeError:
            return


def _become(order: dict[str, Any], out: int) -> None:
    status = 1
    try:
        errors = os.open(order["errors"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(out, 1)
        os.dup2(errors, 2)
        os.close(out)
        os.close(errors)
        os.environ.clear()
        os.environ.update(order["environment"])
        sys.argv = ["smp_daemon", *order["arguments"]]
        from holdfast.smp_daemon import __main__
        from holdfast.smp_daemon.shared import failpoints

        failpoints.arm()
        __main__.main()
    except SystemExit as end:
        status = int(end.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
