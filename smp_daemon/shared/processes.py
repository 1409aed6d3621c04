"""How a Python process of ours is started, so that it runs holdfast's code, and none that lies in the caller's folder;
and of any process, which need not be a child: which one is meant, waiting for its end, and whether it still runs.

A trainer runs wherever its user likes. There, and beside its script, anybody's files may be called like the modules
that we import: ``queue.py``, ``xxhash.py``. By default Python would run them in our processes.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = Path(__file__).absolute().parents[3]
"""The folder that this process imports ``holdfast`` from. The links in ``holdfast/`` are not followed."""

FOLDERS = ("PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE")
"""Variables that each name one folder from which Python takes code."""

NOT_RUNNING = "TZXx"
"""States in ``/proc`` of a process that does not run: stopped by a signal, zombie, dead."""

PF_EXITING = 0x4


def open_standard_streams() -> None:
    """Open those of the three standard streams that the caller has closed, on the null device. Otherwise the next file
    that is opened takes the place of one, and all that is printed, here or by a child, goes into that file.

    To be called by a process of ours before it does anything else.
    """
    for fd in range(3):
        try:
            os.fstat(fd)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free: this one
            os.set_inheritable(fd, True)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def own_command(module: str, *arguments: str) -> list[str]:
    """The command line that runs a module of holdfast. To be started with `own_environment`."""
    return [sys.executable, "-P", "-m", module, *arguments]


def own_environment(given: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment variables for a process of ours: `given`, by default this process's, without what makes Python
    look for code in the current directory.

    Of ``PYTHONPATH``, absolute entries other than the current directory stay. So does `HOME`, made absolute, if this
    process found holdfast through an entry that goes, or in the current directory, or beside its script.
    """
    environment = dict(os.environ if given is None else given)
    for name in FOLDERS:
        if not Path(environment.get(name, "/")).is_absolute():
            del environment[name]
    here = Path("/proc/self/cwd").resolve()  # also once somebody has removed it
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    stay = [entry for entry in entries if Path(entry).is_absolute() and Path(entry).resolve() != here]
    if HOME.resolve() in (here, *((here / entry).resolve() for entry in (*sys.path[:1], *entries))):
        stay = list(dict.fromkeys([*stay, str(HOME)]))
    return environment | ({"PYTHONPATH": os.pathsep.join(stay)} if stay else {})


def run(command: Sequence[str], deadline_s: float) -> tuple[str, str]:
    """Run a command from `own_command` to its end. Returns its output and its errors.

    Raises:
        TimeoutError: it did not end in time, and was killed.
        OSError: it cannot be run.
    """
    try:
        done = subprocess.run(
            command,
            env=own_environment(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=deadline_s,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(str(error)) from error
    return done.stdout, done.stderr


def await_end(pidfd: int, deadline_s: float) -> bool:
    """Block until the process of `pidfd` has ended, or until the deadline. Returns whether it has ended.

    Uses ``poll``: ``select`` takes no descriptor above 1,023, and a trainer may have more.
    """
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(max(0.0, deadline_s) * 1000))


def start_ticks(pid: int) -> int:
    """When a process started, in clock ticks since the machine's boot.

    With the pid this identifies a process, since pids are reused. Times of day would not: they change when the clock is
    set. Arenas are on tmpfs, so no file in one is older than the boot.

    Raises:
        ProcessLookupError: there is no such process.
    """
    try:
        return int(_fields(pid)[19])
    except FileNotFoundError as error:
        raise ProcessLookupError(f"there is no process {pid}") from error


def ran_s(pid: int) -> float:
    """For how many seconds a process has run. Raises as `start_ticks`."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks(pid) / os.sysconf("SC_CLK_TCK")


def _fields(pid: int) -> list[str]:
    """The fields of ``/proc/<pid>/stat`` after the name, see ``proc_pid_stat(5)``. The first is the state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def is_running(pid: int, pidfd: int) -> bool:
    """Whether a process is not stopped, has not ended, and is not ending.

    A killed process may take seconds to give its memory back.
    """
    try:
        signal.pidfd_send_signal(pidfd, 0)
        after_name = _fields(pid)
        pending = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line[3:6] == "Pnd"]
    except OSError:
        return False
    killed = any(int(line.split()[1], 16) >> (signal.SIGKILL - 1) & 1 for line in pending)
    return not (after_name[0] in NOT_RUNNING or int(after_name[6]) & PF_EXITING or killed)
