"""How every command ends, by itself or by Ctrl-C, SIGTERM or a closed terminal: nothing that it started is left.

A signal becomes an exception in the main thread, which unwinds the command like any error. The exception can arrive
between two instructions that belong together, such as starting a process and recording it. So leftovers are found after
the unwinding by marks that need no bookkeeping: every process that a command starts, and all descendants of that
process in any session, have the command's token in their environment; and its folders are those of `holdfast.scratch`.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from types import FrameType
from typing import Any

import psutil

from holdfast import scratch
from holdfast.cli.output import EndedBySignal
from holdfast.smp_daemon.shared.settings import COMMAND

COMMAND_ENV = COMMAND.variable
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_DEADLINE_S = 20.0


def run_to_the_end(work: Callable[[], int], failed: Callable[[BaseException], int]) -> int:
    """Run a command and return its exit status. If an exception ends it, kill everything that the command started, then
    return what `failed` makes of the exception.

    Signals that the caller ignores, as ``nohup`` does, stay ignored. Outside the main thread, signals are left alone.
    """
    before, there = os.environ.get(COMMAND_ENV), scratch.ours()
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[COMMAND_ENV] = token if before is None else f"{before},{token}"
    handlers = _handle_signals()
    try:
        return work()
    except SystemExit:
        raise
    except BaseException as error:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not stop the clean-up
        end_all(token)
        scratch.remove_ours(there)
        return failed(error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if before is None:
            os.environ.pop(COMMAND_ENV, None)
        else:
            os.environ[COMMAND_ENV] = before


def _handle_signals() -> dict[signal.Signals, Any]:
    """Make signals raise `EndedBySignal`; return their previous handlers."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    found = {number: signal.getsignal(number) for number in SIGNALS}
    ours = {number: handler for number, handler in found.items() if handler not in (signal.SIG_IGN, None)}
    for number in ours:
        signal.signal(number, _interrupt)
    return ours


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise EndedBySignal(number)


def end_all(token: str) -> None:
    """SIGKILL every process with the token in its environment, until two scans in a row find none, for at most
    `END_DEADLINE_S`. Two scans, because a process may be just starting."""
    limit, quiet = time.monotonic() + END_DEADLINE_S, 0
    while quiet < 2 and time.monotonic() < limit:
        left = _marked(token)
        quiet = 0 if left else quiet + 1
        for process in left:
            with suppress(psutil.Error):
                process.kill()
        psutil.wait_procs(left, 1.0)


def _marked(token: str) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # the process has ended, or belongs to another user
            others = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if others and token in process.environ().get(COMMAND_ENV, "").split(","):
                found.append(process)
    return found
