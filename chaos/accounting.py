"""What the kernel says of a process: bytes it sent to block devices. tmpfs does not count, reading does not count."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.pidfds import await_end

ACCESS_TIMES_BYTES = 16 * 4096


def disk_bytes_written(pid: int | str = "self") -> int:
    """Bytes written by a process and by the children it has waited for. Works on a zombie, until it is reaped.

    Raises:
        ConfigError: this kernel does not tell.
    """
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            name, value = line.split(": ")
            if name == "write_bytes":
                return int(value)
    except OSError as error:
        raise ConfigError(f"the kernel does not say what process {pid} wrote (/proc/<pid>/io): {error}") from error
    raise ConfigError("the kernel does not account for bytes written: /proc/<pid>/io has no write_bytes")


def beyond_access_times(written: int) -> int:
    """`written` bytes of several processes, or 0 if they may all be access times of files that were only read.

    The first read of a file in a day updates its access time, and the kernel counts a page for that. What is read late
    in a process differs from machine to machine; a snapshot that went to disk would be far more than the allowance.
    """
    return written if written > ACCESS_TIMES_BYTES else 0


def wait_until_dead(pid: int, deadline_s: float) -> None:
    """Block until a child has ended, without reaping it. Raises `DeadlineExceeded`."""
    pidfd = os.pidfd_open(pid)
    try:
        if not await_end(pidfd, deadline_s):
            raise DeadlineExceeded(f"process {pid} did not end within {deadline_s:.0f} s")
    finally:
        os.close(pidfd)
