"""How much memory this process may use."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import psutil

CGROUPS = Path("/sys/fs/cgroup")
UNLIMITED_BYTES = 1 << 60
"""A control group without a limit reports this much or more."""


def available_bytes() -> int:
    """Memory of this machine that processes can get without making others lose theirs."""
    return int(psutil.virtual_memory().available)


def memory_bytes() -> int:
    """The memory of this machine, or of this process's control group if that is less."""
    limit, _ = cgroup_memory(text_of(Path("/proc/self/cgroup")))
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(machine, limit or machine)


def cgroup_memory(groups: str, root: Path = CGROUPS) -> tuple[int | None, int]:
    """Memory limit and use of a process in bytes, from the text of its ``/proc/<pid>/cgroup`` (cgroup v1 and v2).

    The limit is the tightest one of the group and its parents; None: there is none.
    """
    tightest: tuple[int | None, int] = (None, 0)
    for line in groups.splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = root / "memory", ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        here = base / path.strip("/")
        for group in (here, *here.parents):
            limit, used = (text_of(group / name) for name in names)
            if limit.isdigit() and int(limit) < (tightest[0] or UNLIMITED_BYTES):
                tightest = (int(limit), int(used or 0))
            if group == base:
                break
    return tightest


def text_of(path: Path) -> str:
    """The text of a small file, without space around it; empty if it is not there or may not be read.

    Raises `OSError` if reading fails for another reason.
    """
    try:
        return path.read_text().strip()
    except OSError as error:
        if error.errno not in (errno.ENOENT, errno.ENOTDIR, errno.EACCES, errno.EPERM, errno.EINVAL):
            raise
        return ""
