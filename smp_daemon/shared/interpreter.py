"""How a Python process of ours is started: so that it runs holdfast's code, and none that lies in the caller's folder.

A trainer runs wherever its user likes. There, and beside its script, anybody's files may be called like the modules
that we import: ``queue.py``, ``xxhash.py``. By default Python would run them in our processes.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

HOME = Path(__file__).absolute().parents[3]
"""The folder that this process imports ``holdfast`` from. The links in ``holdfast/`` are not followed."""

FOLDERS = ("PYTHONHOME", "PYTHONPYCACHEPREFIX", "PYTHONUSERBASE")
"""Variables that each name one folder from which Python takes code."""


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
    here = Path.cwd()
    entries = environment.pop("PYTHONPATH", "").split(os.pathsep)
    stay = [entry for entry in entries if Path(entry).is_absolute() and Path(entry).resolve() != here]
    if HOME.resolve() in (here, *(Path(entry).resolve() for entry in (*sys.path[:1], *entries))):
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
