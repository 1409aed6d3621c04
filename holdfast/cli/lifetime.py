"""How every command ends: by itself, or by Ctrl-C, SIGTERM or a closed terminal, with nothing left of what it started.

A signal becomes an exception in the main thread, which unwinds the command like any error. An exception can arrive
between two instructions that belong together, such as starting a process and noting that it was started. So what is
left after the unwinding is looked for by marks that need no bookkeeping: every process that a command starts, and all
that these start, in whatever session, have its token in their environment; and its folders are `shared.scratch`'s.
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

from holdfast.cli.output import EndedBySignal
from holdfast.smp_daemon.shared import scratch

COMMAND_ENV = "HOLDFAST_COMMAND"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
END_DEADLINE_S = 20.0


def run_to_the_end(work: Callable[[], int], failed: Callable[[BaseException], int]) -> int:
    """Run a command; its exit status, or what `failed` makes of the exception that ended it, when all that the command
    had started is ended.

    Signals whose caller ignores them, as ``nohup`` does, stay ignored. In another thread than the main one they are not
    ours.
    """
    before = os.environ.get(COMMAND_ENV)
    token = f"{os.getpid()}-{time.monotonic_ns()}"
    os.environ[COMMAND_ENV] = token if before is None else f"{before},{token}"
    handlers = _handle_signals()
    try:
        return work()
    except SystemExit:
        raise
    except BaseException as error:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # whoever presses Ctrl-C twice must not stop this
        end_all(token)
        scratch.remove_ours()
        return failed(error)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        if before is None:
            os.environ.pop(COMMAND_ENV, None)
        else:
            os.environ[COMMAND_ENV] = before


def _handle_signals() -> dict[signal.Signals, Any]:
    """From now on signals raise `EndedBySignal`; their handlers until now."""
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
    """SIGKILL every process with the token in its environment, until none is found twice: one may be about to begin."""
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
        with suppress(psutil.Error):  # it has ended, or is another user's
            others = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
            if others and token in process.environ().get(COMMAND_ENV, "").split(","):
                found.append(process)
    return found
