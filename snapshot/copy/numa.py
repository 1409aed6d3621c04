"""Which processors are near a device."""

from __future__ import annotations

import os
from pathlib import Path

from holdfast.snapshot.copy.cuda_runtime import Runtime

SYS = Path("/sys")


def numa_node(runtime: Runtime, root: Path = SYS) -> int:
    """The NUMA node that the device is attached to; -1 where that is unknown. `root`: where sysfs is mounted."""
    try:
        return int((root / "bus/pci/devices" / runtime.pci_bus_id() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def pin_to_node(node: int, root: Path = SYS) -> bool:
    """Keep the calling thread, and those it starts, on CPUs of a NUMA node that it may use; False if it has none."""
    try:
        allowed = parse_cpus((root / f"devices/system/node/node{node}/cpulist").read_text()) & os.sched_getaffinity(0)
    except OSError:
        return False
    if allowed:
        os.sched_setaffinity(0, allowed)
    return bool(allowed)


def parse_cpus(text: str) -> set[int]:
    """The CPUs of a list as the kernel writes it, such as ``0-3,8``."""
    spans = [span.partition("-") for span in text.strip().split(",") if span]
    return {cpu for first, _, last in spans for cpu in range(int(first), int(last or first) + 1)}
