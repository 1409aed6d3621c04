"""Commands that run in a session of their own, ended with all that they started in it."""

from __future__ import annotations

import os
import signal
import subprocess


def end(process: subprocess.Popen[bytes]) -> None:
    """End what is left of a process that leads its session, and of the session; what left it, as SMPs do, stays."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass  # nothing is left
    process.wait()
