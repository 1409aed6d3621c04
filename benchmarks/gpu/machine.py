"""The machine under test: one with a CUDA device, or any machine with an emulated device."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.proof.device.queues import LAZY
from tests.proof.device.seam import SHOWN_BY, Cpu, Emulated, Real, SeamDevice
from tests.proof.device.standin import EmulatedCuda

ROOT = Path(__file__).parent.parent.parent


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine under test. `dry`: the device is emulated and sizes are tiny, to test only that the program runs."""

    dry: bool

    @property
    def device(self) -> SeamDevice:
        """The device that training runs on."""
        return self.device_that_shows("")

    def device_that_shows(self, fault: str) -> SeamDevice:
        """A device on which a given fault of `FAULTS` becomes visible."""
        return Emulated(EmulatedCuda(SHOWN_BY.get(fault, LAZY))) if self.dry else Real()

    @property
    def beside(self) -> SeamDevice:
        """A device that runs the same training to the same bits, waiting at each boundary."""
        return Cpu() if self.dry else Real()

    def facts(self) -> dict[str, Any]:
        """The hardware and software that the figures were measured on."""
        found: dict[str, Any] = {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "kernel": platform.release(),
            "cores": len(os.sched_getaffinity(0)),
            "shared_memory_gb": round(shutil.disk_usage("/dev/shm").total / 1e9, 1),
            "huge_pages": _said(Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")),
            "numa_nodes": len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))),
            "device": "none: a dry run",
        }
        if not self.dry:
            properties = torch.cuda.get_device_properties(0)
            found |= {
                "device": properties.name,
                "device_memory_gb": round(properties.total_memory / 1e9, 1),
                "cuda": torch.version.cuda,
                "driver": _driver(),
            }
        return found


@contextmanager
def arena() -> Iterator[Path]:
    """A directory in shared memory for one check; removed at the end."""
    base = Path(tempfile.mkdtemp(prefix="holdfast-gpu-", dir="/dev/shm"))
    try:
        yield base
    finally:
        shutil.rmtree(base)


def run_check(
    name: str, machine: Machine, deadline_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a check in its own process and return its result; `environment` extends this process's variables."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--check", name, *["--dry"] * machine.dry]
    variables = {**os.environ, **(environment or {})}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=deadline_s, env=variables, check=False)
    except subprocess.TimeoutExpired:
        return {"passes": False, "failure": f"it took over {deadline_s:.0f} s"}
    lines = done.stdout.strip().splitlines()
    found = json.loads(lines[-1]) if done.returncode == 0 and lines else None
    return found or {"passes": False, "failure": (done.stderr or done.stdout)[-600:]}


def tests(*arguments: str, deadline_s: float = 100.0) -> tuple[bool, str]:
    """Run tests; return whether they pass, and the last line that they print."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s, check=False)
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    return done.returncode == 0, lines[-1]


def _driver() -> str:
    done = subprocess.run(
        ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    return done.stdout.strip() or "unknown"


def _said(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return "unknown"
