"""How fast this machine reserves and gives back memory on tmpfs, in GB/s: ``python -m benchmarks.kernel_memory``.

The rates of docs/size.md that `holdfast bench node` does not measure. Takes a file of `--bytes` on shared memory.
"""

from __future__ import annotations

import argparse
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.smp_daemon.shared.budget import wipe
from holdfast.smp_daemon.shared.populate import populate, slices


def main() -> None:
    """Measure and print one line for each operation."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--bytes", type=int, default=1 << 30)
    parser.add_argument("--rounds", type=int, default=5)
    parsed = parser.parse_args()
    rates: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-", dir="/dev/shm") as folder:
        for _ in range(parsed.rounds):
            for name, seconds in measure(Path(folder) / "file", parsed.bytes).items():
                rates.setdefault(name, []).append(parsed.bytes / seconds / 1e9)
    for name, found in rates.items():
        print(f"{name:28} {statistics.median(found):6.2f} GB/s ({min(found):.2f} to {max(found):.2f})")


def measure(path: Path, length: int) -> dict[str, float]:
    """Seconds for each operation on a file of `length` bytes."""
    seconds = {}

    def timed(name: str, work: Callable[[], object]) -> None:
        began = time.perf_counter()
        work()
        seconds[name] = time.perf_counter() - began

    def allocate() -> None:
        for start, count in slices(length):
            os.posix_fallocate(fd, start, count)

    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    timed("reserve (posix_fallocate)", allocate)
    mapped = mmap.mmap(fd, length)
    os.close(fd)
    timed("touch (populate)", lambda: populate(mapped))
    timed("overwrite with zeros", lambda: wipe(memoryview(mapped)))
    timed("unmap", mapped.close)
    timed("give back (unlink)", path.unlink)
    return seconds


if __name__ == "__main__":
    main()
