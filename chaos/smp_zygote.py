"""Forks SMPs from a process that has imported all that one needs, where so many are started that importing counts.

What runs in each is `smp_daemon.__main__.main`, as ``python -m holdfast.smp_daemon`` runs it.
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

DEADLINE_S = 60.0
MAX_ORDER_BYTES = 1 << 17


class Zygote:
    """The process that forks. Thread-safe; `close` ends it, and not what it forked."""

    def __init__(self) -> None:
        self._channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._channel.settimeout(DEADLINE_S)
        self._lock = threading.Lock()  # an order and its answer belong together; no other lock is taken under it
        self._process = subprocess.Popen(
            [sys.executable, "-m", "holdfast.chaos.smp_zygote", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
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
        """The exit status of one that is ending; blocks until it has."""
        with self._lock:
            self._channel.sendall(json.dumps({"wait": pid}).encode())
            return int(self._channel.recv(64))

    def close(self) -> None:
        """End it."""
        self._channel.close()
        self._process.wait(DEADLINE_S)


class Forked:
    """One SMP; as much of `subprocess.Popen` as tests use."""

    def __init__(self, zygote: Zygote, pid: int, stdout: IO[str]) -> None:
        self.pid = pid
        self.stdout = stdout
        self._zygote = zygote
        self._status: int | None = None

    @property
    def returncode(self) -> int | None:
        """Its exit status, once `wait` has told it."""
        return self._status

    def poll(self) -> int | None:
        """The same, if it has ended by now; else None."""
        try:
            return self.wait(0)
        except subprocess.TimeoutExpired:
            return None

    def send_signal(self, number: int) -> None:
        """Send it a signal, if it has not been waited for."""
        if self._status is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL it, if it has not been waited for."""
        self.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int:
        """Its exit status, once it has ended. Raises `TimeoutExpired`."""
        if self._status is None:
            pidfd = os.pidfd_open(self.pid)  # it stays a zombie until it is waited for
            try:
                if not select.select([pidfd], [], [], timeout)[0]:
                    raise subprocess.TimeoutExpired("an SMP", timeout or 0.0)
            finally:
                os.close(pidfd)
            self._status = self._zygote.wait(self.pid)
        return self._status


def _serve(channel: socket.socket) -> None:
    # Half a second of a processor, here instead of in every fork. No import starts a thread, which a fork would lack:
    # NumPy's are turned off above.
    for part in ("service", "coding.drain", "ops.web", "persist.options", "__main__"):
        importlib.import_module(f"holdfast.smp_daemon.{part}")
    gc.collect()
    gc.freeze()  # or a collection in an SMP walks over, and so copies, every page of what was imported
    while True:
        try:
            data, descriptors, _, _ = socket.recv_fds(channel, MAX_ORDER_BYTES, 1)
        except ConnectionResetError:
            return  # who gave orders is gone
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
