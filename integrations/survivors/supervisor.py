"""The process that the launcher started: it has imported everything, and forks the trainer, and one in its place if
that is killed.

It runs no operation of torch, and its only threads are the main one, which waits for signals, and the one that forks.
That one must live as long as its children, which the kernel kills at its end, and be none that ever ran an operation on
several threads: the child inherits OpenMP's note of threads that it does not have, and would wait for them.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from holdfast.integrations.survivors.attempts import JobAttempt, parse_lines, to_line
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.logs import get_log

ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
"""Signals after which a trainer is not replaced."""

PASSED_ON = (*ENDING, signal.SIGUSR1, signal.SIGUSR2)

GRACE_S = 10.0
"""How long a trainer may take to leave an attempt that is over; then it is replaced, too. What it does in that attempt
is rolled back in any case. It may hang, as in a connection to a store that is closed."""

log = get_log(__name__)


@dataclass(slots=True)
class _Child:
    """The trainer, which runs.

    Attributes:
        attempt: the number of the attempt that it took last.
        channel: the trainer hears of attempts, and says which it takes. Closed: no other attempt will follow.
        due: when it has to have taken the newest attempt, on the monotonic clock; None if it has.
    """

    pid: int
    pidfd: int
    attempt: int
    channel: socket.socket
    due: float | None = None

    def taken(self) -> int:
        """The attempt that it took last, by what it has said until now."""
        with suppress(
            BlockingIOError, ConnectionResetError
        ):  # no more, or it has ended without reading what it was told
            while data := self.channel.recv(4096, socket.MSG_DONTWAIT):
                for message in parse_lines(data)[0]:
                    self.attempt = message["taken"]
        return self.attempt


class Supervisor:
    """Keeps a trainer running until all ranks have finished, or no other attempt follows.

    Args:
        connection: see `rendezvous.join`.
        train: what the trainer does, in a process of its own: its first attempt, and a channel. On it lines tell of
            later attempts, and ``{"taken": number}`` says that the trainer has begun one.
    """

    def __init__(self, connection: socket.socket, train: Callable[[JobAttempt, socket.socket], object]) -> None:
        self._connection: socket.socket | None = connection
        self._train = train
        self._attempt: JobAttempt | None = None
        self._child: _Child | None = None
        self._code: int | None = None
        """How the trainer ended; None before that."""
        self._ends = False
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._woken, self._wake = os.pipe()
        self._handlers: dict[int, Any] = {}
        self._shares_terminal = _is_in_foreground()

    def run(self) -> int:
        """Supervise, to the end. Returns this process's exit code; negative: the signal to end by. Blocks.

        Call it in the main thread.
        """
        os.set_blocking(self._wake, False)
        signal.set_wakeup_fd(self._wake, warn_on_full_buffer=False)
        for number in PASSED_ON:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as after nohup
                self._handlers[number] = signal.signal(number, _noted)
        result: list[int] = []
        thread = threading.Thread(target=lambda: result.append(self._supervise()), name="holdfast-supervisor")
        thread.start()
        thread.join()
        return result[0] if result else 1  # else it has raised, and threading has printed that

    def _supervise(self) -> int:
        assert self._connection is not None
        self._selector.register(self._woken, selectors.EVENT_READ, self._pass_on)
        self._selector.register(self._connection, selectors.EVENT_READ, self._hear)
        while True:
            due = None if self._child is None else self._child.due
            for key, _ in self._selector.select(None if due is None else max(0.0, due - time.monotonic())):
                key.data()
                if (code := self._result()) is not None:
                    if self._connection is not None:  # else a standby would take its place as the launcher starts anew
                        with suppress(OSError):  # rank 0's is gone, too
                            self._connection.sendall(to_line({"leaves": True}))
                    return code
            self._hurry()

    def _hurry(self) -> None:
        """Kill a trainer that has not left an attempt that is over."""
        child = self._child
        if child is None or child.due is None or time.monotonic() < child.due:
            return
        child.due = None
        if self._attempt is not None and child.taken() < self._attempt.number:
            log.warning("process %d does not leave an attempt that is over, and is replaced", child.pid)
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)

    def _result(self) -> int | None:
        """The exit code once there is nothing to wait for, else None."""
        if self._child is not None or self._code is None:
            return None
        if self._code > 0 or self._ends or self._connection is None:
            return self._code
        return None

    def _pass_on(self) -> None:
        for number in os.read(self._woken, 64):
            if number not in PASSED_ON:
                continue
            self._ends = self._ends or number in ENDING
            if self._child is None:
                self._code = -number if number in ENDING else self._code
            elif not (self._shares_terminal and number in (signal.SIGINT, signal.SIGQUIT)):
                signal.pidfd_send_signal(self._child.pidfd, number)

    def _hear(self) -> None:
        assert self._connection is not None
        try:
            data = self._connection.recv(4096)
            messages, self._buffer = parse_lines(self._buffer + data)
        except (OSError, ProtocolError) as error:
            log.warning("rank 0's supervisor is lost: %s", error)
            data, messages = b"", []
        for message in messages:
            if "attempt" in message:
                self._begin(JobAttempt(*message["attempt"]))
            elif "end" in message or "over" in message:
                data = b""
        if not data:
            self._part()

    def _part(self) -> None:
        """No other attempt follows: the trainer goes on, or ends, as without a supervisor."""
        if self._connection is None:
            return
        self._selector.unregister(self._connection)
        self._connection.close()
        self._connection = None
        if self._child is not None:
            self._child.channel.close()
            self._child.due = None
        elif self._code is None:
            log.error("rank 0's supervisor has left, or was started by another launcher, before training began")
            self._code = 1

    def _begin(self, attempt: JobAttempt) -> None:
        self._attempt = attempt
        if self._ends:
            return
        if self._child is None:
            self._fork(attempt)
            return
        with suppress(OSError):  # it has ended, which its pidfd says; another is then forked
            self._child.channel.sendall(to_line({"attempt": attempt}))
            self._child.due = time.monotonic() + GRACE_S

    def _fork(self, attempt: JobAttempt) -> None:
        ours, theirs = socket.socketpair()
        sys.stdout.flush()
        sys.stderr.flush()
        parent = os.getpid()
        pid = os.fork()
        if pid == 0:
            ours.close()
            self._become_trainer(parent, attempt, theirs)
        theirs.close()
        self._code = None
        self._child = _Child(pid, os.pidfd_open(pid), attempt.number, ours)
        self._selector.register(self._child.pidfd, selectors.EVENT_READ, self._reap)

    def _become_trainer(self, parent: int, attempt: JobAttempt, channel: socket.socket) -> NoReturn:
        def train() -> None:
            die_with(parent)
            if not self._shares_terminal:
                os.setpgid(0, 0)  # or it would get what is sent to the group twice
            signal.set_wakeup_fd(-1)
            for number, handler in self._handlers.items():
                signal.signal(number, handler)
            if self._connection is not None:
                self._connection.close()
            self._selector.close()
            os.close(self._woken)
            os.close(self._wake)
            self._train(attempt, channel)

        run_as_script(train)

    def _reap(self) -> None:
        child = self._child
        assert child is not None and self._attempt is not None
        _, status = os.waitpid(child.pid, 0)
        self._selector.unregister(child.pidfd)
        os.close(child.pidfd)
        self._child = None
        self._code = os.waitstatus_to_exitcode(status)
        if self._code < 0 and not self._shares_terminal:
            with suppress(ProcessLookupError):  # what it has left, as a loader's workers; an SMP has its own group
                os.killpg(child.pid, signal.SIGKILL)
        if self._connection is None:
            return
        taken = child.taken()
        child.channel.close()
        if self._code > 0 or self._ends:
            return
        if taken != self._attempt.number:  # it had not heard of the attempt that the others are in
            self._fork(self._attempt)
            return
        try:
            self._connection.sendall(to_line({"lost" if self._code else "done": taken}))
        except OSError:
            self._part()


def _noted(number: int, frame: FrameType | None) -> None:
    """A signal's number is in the wake-up pipe already."""


def _is_in_foreground() -> bool:
    """Whether a terminal sends its signals to this process's group."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return False


PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Have the kernel kill this process when the thread that forked it ends. `parent`: that thread's process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the call
        os._exit(1)


def run_as_script(function: Callable[[], object]) -> NoReturn:
    """Call `function` and end this process as the interpreter would if it were the whole script: with the same output
    and exit code, after threads that are no daemons, and ``atexit``. For a process that was forked within a thread,
    whose stack has no interpreter below it."""
    code = 0
    try:
        function()
    except SystemExit as error:
        if isinstance(error.code, int):
            code = error.code & 0xFF
        elif error.code is not None:
            print(error.code, file=sys.stderr)
            code = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        code = -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    ctypes.CDLL(None).fflush(None)  # what extensions have printed
    leave(code)


def leave(code: int) -> NoReturn:
    """End this process at once with an exit code, or, if it is negative, by that signal."""
    if code < 0:
        if -code != signal.SIGKILL:  # whose handler may not even be reset
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        signal.pause()  # the signal may be delivered to another thread a moment later
    os._exit(code)
