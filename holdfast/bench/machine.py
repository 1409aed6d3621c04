"""The machine that a benchmark ran on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import psutil


def machine() -> dict[str, Any]:
    """Facts about this machine, to report beside the figures."""
    return {
        "cpu_model": cpu_model(Path("/proc/cpuinfo").read_text()) or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": psutil.virtual_memory().total,
        "kernel": platform.release(),
    }


def describe(computer: dict[str, Any]) -> str:
    """The facts from `machine` as text."""
    return (
        f"{computer['cpu_model']}, {computer['cores']} cores, {computer['memory_bytes']:,} bytes of memory, "
        f"Linux {computer['kernel']}"
    )


def cpu_model(cpuinfo: str) -> str:
    """The processor's name from the text of ``/proc/cpuinfo``; empty if there is none, as on ARM."""
    for line in cpuinfo.splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name":
            return value.strip()
    return ""


def rounded(value: float) -> float:
    """`value` rounded to four significant digits."""
    return float(f"{value:.4g}")
