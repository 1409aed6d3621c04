"""The machine under test: one with a CUDA device, or any machine with an emulated device."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from holdfast import InMemorySnapshot
from holdfast.leftovers import Leftover, find_arenas, remove
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from tests.proof.device.driver import Driver
from tests.proof.device.queues import EAGER, LAZY
from tests.proof.device.seam import Cpu, Emulated, Real, SeamDevice
from tests.proof.device.standin import EmulatedCuda

ROOT = Path(__file__).parent.parent.parent

OF_CHECKS = "GPU_CHECKS"
"""Variable in the environment of all processes of a check: its directory, after those of the checks that it is part of,
separated by colons."""

SHOWN = 5
"""How many failed tests are named."""

BESIDE_OTHERS = 6
"""How many times as long as on a machine with a GPU, which does nothing else, work may take in a dry run."""

MOST_STEPS = 1_000_000

ENDS_S = 10.0
"""How long processes of a check may take to end once they are killed: one may be within the device's driver."""


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine under test. `dry`: the device is emulated and sizes are tiny, to test only that the program runs."""

    dry: bool

    def limit_s(self, seconds: float) -> float:
        """How long something may take here that may take `seconds` on a machine that does nothing else."""
        return seconds * BESIDE_OTHERS if self.dry else seconds

    @property
    def device(self) -> SeamDevice:
        """The device that training runs on."""
        return self.device_with()

    def device_with(self, late_copies: bool = False) -> SeamDevice:
        """The device, if it is to copy late."""
        if not self.dry:
            return Real(late_copies=late_copies)
        connections = int(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "8"))
        try:
            driver = Driver(LAZY, connections=connections)
        except RuntimeError:  # no driver can stand in here: the emulated device has an order of its own
            return Emulated(EmulatedCuda(LAZY if late_copies else EAGER))
        return Emulated(EmulatedCuda(driver=driver), late_copies=late_copies)

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
    """A directory in shared memory. At the end all SMPs in it are killed, and it is removed."""
    with Scratch("bench") as scratch:
        try:
            yield scratch.path
        finally:
            for found in arenas_in(scratch.path):
                remove(found)


def arenas_in(base: Path) -> list[Leftover]:
    """The arenas at any depth below `base`: a check may make directories of its own."""
    return [found for path in base.glob("**/smp.json") for found in find_arenas(path.parent)]


def run_check(
    name: str, machine: Machine, deadline_s: float, environment: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """Run a check in its own process and return its result; `environment` extends this process's variables. Whatever
    becomes of the check, nothing of it is left in memory: no process, no SMP, no arena."""
    command = [sys.executable, "-m", "benchmarks.gpu", "--check", name, *["--dry"] * machine.dry]
    with arena() as base:
        checks = os.pathsep.join(filter(None, [os.environ.get(OF_CHECKS), str(base)]))
        variables = {**os.environ, ARENA_ENV: str(base), OF_CHECKS: checks, **(environment or {})}
        limit_s, pipe = machine.limit_s(deadline_s), subprocess.PIPE
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=variables) as process:
            try:
                out, err = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return {"passes": False, "failure": f"it took over {limit_s:.0f} s"}
            finally:
                end_all(base)
    lines = out.strip().splitlines()
    found = json.loads(lines[-1]) if process.returncode == 0 and lines else None
    return found or {"passes": False, "failure": (err or out)[-600:]}


def end_all(base: Path) -> None:
    """Kill all processes of the check that has this directory, until there are none: one may start another meanwhile,
    and those that it started, such as SMPs, are not its children any more once it has ended."""
    limit = time.monotonic() + ENDS_S
    while (left := [each for each in psutil.process_iter() if _is_of(each, base)]) and time.monotonic() < limit:
        for each in left:
            with suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(left, timeout=0.1)


def _is_of(process: psutil.Process, base: Path) -> bool:
    try:
        return str(base) in process.environ().get(OF_CHECKS, "").split(os.pathsep)
    except psutil.Error:
        return False  # it has ended, or is another user's


def tests(*arguments: str, deadline_s: float = 100.0, environment: Mapping[str, str] | None = None) -> tuple[bool, str]:
    """Run tests; return whether they pass, and what pytest says of them: the line at the end, and those that failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    variables = {**os.environ, **(environment or {})}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=deadline_s, env=variables, check=False
    )
    lines = done.stdout.strip().splitlines() or [done.stderr[-300:]]
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return done.returncode == 0, "; ".join([lines[-1], *failed[:SHOWN]])


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


def with_memory(snap: InMemorySnapshot, count: int) -> Iterator[int]:
    """Yield steps until memory for snapshots is reserved, and `count` steps after that."""
    for step in snap.steps(MOST_STEPS):
        if step > 1 and not snap._session.protecting.layouts.is_reserving:
            count -= 1
        yield step
        if not count:
            return
