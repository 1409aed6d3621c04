"""What a forked process does in place of the interpreter: it dies with its parent, and ends as a script does."""

from __future__ import annotations

import atexit
import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import NoReturn

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
