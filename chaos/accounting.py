"""The kernel's account of the bytes that a process wrote to block devices. Reads and tmpfs do not count."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.processes import await_end

ACCESS_TIMES_BYTES = 16 * 4096


def disk_bytes_written(pid: int | str = "self") -> int:
    """Bytes written by a process and by the children it has waited for. Works on a zombie until it is reaped.

    Raises:
        ConfigError: this kernel does not account for written bytes.
    """
    try:
        for line in Path(f"/proc/{pid}/io").read_text().splitlines():
            name, value = line.split(": ")
            if name == "write_bytes":
                return int(value)
    except OSError as error:
        raise ConfigError(f"cannot read from /proc/<pid>/io how much process {pid} wrote to disk: {error}") from error
    raise ConfigError("the kernel does not account for bytes written: /proc/<pid>/io has no write_bytes")


def beyond_access_times(written: int) -> int:
    """`written`, the bytes that several processes wrote; or 0 if they may all be access times of files that were read.

    The first read of a file in a day updates its access time, and the kernel counts a page for that. Which files a
    process reads late differs between machines. A snapshot that went to disk would far exceed the allowance.
    """
    return written if written > ACCESS_TIMES_BYTES else 0


def wait_until_dead(pid: int, deadline_s: float) -> None:
    """Block until a child has ended, without reaping it. Raises `DeadlineExceeded` after `deadline_s`."""
    pidfd = os.pidfd_open(pid)
    try:
        if not await_end(pidfd, deadline_s):
            raise DeadlineExceeded(f"process {pid} did not end within {deadline_s:.0f} s")
    finally:
        os.close(pidfd)
