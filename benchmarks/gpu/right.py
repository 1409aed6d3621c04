"""Part A: correctness. Each check runs in its own process and returns figures, and whether they pass."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import torch

from benchmarks.gpu.job import POINTS
from benchmarks.gpu.machine import ROOT, Machine, arena, run_check, tests, with_memory
from holdfast import InMemorySnapshot
from holdfast.snapshot.copy import pages
from holdfast.snapshot.state import rng
from tests.proof.device.seam import DRAIN_S, FAULTS, SeamLoop, missed, observe, twin
from tests.proof.matrix import cells as matrix

Figures = dict[str, Any]

SEED = 1234

SLOT_BYTES = 48 << 30
"""How much of /dev/shm must be free for the largest checks."""

GROWTH = 1.01
"""Upper limit for resources held after many snapshots, relative to those held after a few."""


NO_GPU = {"CUDA_VISIBLE_DEVICES": ""}
"""For tests that emulate one."""


def facts(machine: Machine) -> Figures:
    """The hardware and software that the figures were measured on, and whether there is enough memory for slots."""
    found = {**machine.facts(), "passes": machine.dry or torch.cuda.is_available()}
    if not machine.dry and shutil.disk_usage("/dev/shm").free < SLOT_BYTES:
        found |= {"passes": False, "failure": f"B needs {SLOT_BYTES >> 30} GiB: mount -o remount,size=100G /dev/shm"}
    return found


def parts(machine: Machine) -> Figures:
    """The copy engine's own tests pass on the device and on the emulated one."""
    ends_s = time.monotonic() + machine.limit_s(105.0)
    on_device, said = tests("tests/proof/test_cuda_gpu.py", "-m", "gpu", deadline_s=machine.limit_s(60.0))
    choice = ["-k", "order or capture"] if machine.dry else []
    left_s = ends_s - time.monotonic()
    beside, said_beside = tests("tests/proof/test_cuda.py", *choice, deadline_s=left_s, environment=NO_GPU)
    return {"passes": on_device and beside, "on_device": said, "imagined": said_beside}


def seam(machine: Machine) -> Figures:
    """Every slot written in 30 steps equals the state of a twin that synchronises."""
    steps = 9 if machine.dry else 30
    found: Figures = {"passes": True}
    for ring in (False, True):
        for own_stream in (False, True):
            loop = SeamLoop(steps=steps, own_stream=own_stream)
            name = f"{'ring' if ring else 'registered'}, {'own' if own_stream else 'default'} stream"
            refuse = _refusing() if ring else nullcontext()
            with arena() as base, refuse:
                outcome = observe(machine.device, loop, twin(machine.beside, loop), base / "seam", "seam")
            found[name] = f"{len(outcome.taken)} slots, {len(outcome.wrong)} wrong, {outcome.given_up} given up"
            found["passes"] &= outcome.exact
            if outcome.failure:
                found[f"{name}: failure"] = outcome.failure[:300]
    return found


def seam_one_connection(machine: Machine) -> Figures:
    """The same as `seam`, with one queue to the device for all streams, as Megatron requires. B5 shows its speed."""
    return run_check("A2", machine, 100.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def faults(machine: Machine) -> Figures:
    """Faults planted in holdfast are found in the comparison of A2, each by its own sign."""
    found: Figures = {"passes": True}
    for name, fault in FAULTS.items():
        with arena() as base:
            problem = missed(fault, machine.device_with, machine.beside, base)
        found[name] = f"NOT found: {problem[:300]}" if problem else "found"
        found["passes"] &= not problem
    return found


def kills(machine: Machine) -> Figures:
    """A process killed at any of the points ends, after its restart, with the same bits as an undisturbed one."""
    with arena() as base:
        whole = _job(machine, base / "whole", None)
        found: Figures = {"passes": whole.get("digest") is not None}
        for point in POINTS:
            home, notes = base / point, base / f"{point}.notes"
            first, _ = _run(machine, notes, home, "--die", point)
            second, said = _run(machine, notes, home)
            same = _read(notes) == whole
            found[point] = "the same bits" if same else f"other bits (statuses {first}, {second}): {said[-300:]}"
            found["passes"] &= same and first == -signal.SIGKILL and second == 0
    return found


def graphs(machine: Machine) -> Figures:
    """Snapshots are exact when the optimizer is replayed from a CUDA graph, and its graph capture does not fail."""
    found: Figures = {"passes": True}
    for turns in ("", "steps", "data"):
        loop = SeamLoop(steps=9 if machine.dry else 30, captured=5, turns=turns)
        with arena() as base:
            outcome = observe(machine.device, loop, twin(machine.beside, loop), base / "seam", "seam")
        found[f"declared by {turns}" if turns else "by hooks"] = (
            f"{len(outcome.taken)} slots, {len(outcome.wrong)} wrong"
        )
        found["passes"] &= outcome.exact
        if outcome.failure:
            found["failure"] = outcome.failure[:300]
    return found


def moved(machine: Machine) -> Figures:
    """State that moves to the device after the hook was entered is captured from the device."""
    device = machine.device
    with arena() as base, device.installed():
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        hook = InMemorySnapshot(model, optimizer, job="moved", arena=base / "moved", strict=True, every=1)
        with hook as snap:
            for step in snap.steps(8):
                snap.drain(DRAIN_S)
                if step == 3:
                    model.to(device.name)
                    for state in optimizer.state.values():
                        state["momentum_buffer"] = state["momentum_buffer"].to(device.name)
                where = next(model.parameters()).device
                model(torch.ones(4, 64).to(where)).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
            protected = snap.protected_step
    return {"protected": protected, "passes": protected is not None and protected > 4}


def generators(machine: Machine) -> Figures:
    """After a restore, random generators produce the same numbers again."""
    device = machine.device
    with device.installed():
        torch.zeros(1).to(device.name)  # a job enters its hook with state on the device
        state = rng.capture()
        drawn = [torch.nn.functional.dropout(torch.ones(1000, device=device.name), 0.5).cpu() for _ in range(3)]
        rng.restore(state)
        again = [torch.nn.functional.dropout(torch.ones(1000, device=device.name), 0.5).cpu() for _ in range(3)]
    same = all(torch.equal(a, b) for a, b in zip(drawn, again, strict=True))
    return {"captured": ", ".join(state), "passes": same and "cuda" in state}


def leaks(machine: Machine) -> Figures:
    """Memory, threads and file descriptors do not grow with the number of snapshots."""
    count = 30 if machine.dry else 2000
    device = machine.device
    with arena() as base, device.installed():
        size = 100 if machine.dry else 25_000_000
        model = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(size))]).to(device.name)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        early: Figures = {}
        with InMemorySnapshot(model, optimizer, job="leaks", arena=base / "leaks", every=1) as snap:
            for turn, _ in enumerate(with_memory(snap, count)):
                model[0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
                if turn % 3 == 0:
                    snap.drain(DRAIN_S)
                if snap.statistics.protected >= count // 20 and not early:
                    early = _held(machine)
            late = _held(machine)
            protected = snap.statistics.protected
    growth = {name: round(late[name] / max(1, early[name]), 3) for name in early}
    slack = 1.2 if machine.dry else GROWTH
    return {"snapshots": protected, **growth, "passes": protected > count // 5 and max(growth.values()) <= slack}


def parallel(machine: Machine) -> Figures:
    """FSDP2, also with parameters on the host, and DDP on one GPU are killed and restarted."""
    return _cells(
        machine,
        matrix.Cell("FSDP2", "tests.proof.jobs.plain:Shards", 1, drain=True),
        matrix.Cell("FSDP2, offloaded", "tests.proof.jobs.plain:Offloaded", 1, drain=True),
        matrix.Cell("DDP, two ranks on one GPU", "tests.proof.jobs.plain:Replicas", 2, drain=True),
    )


def megatron(machine: Machine) -> Figures:
    """Megatron with its distributed optimizer and overlap is killed and restarted."""
    return _cells(
        machine,
        *(
            matrix.Cell(dtype, matrix.GPT, 1, {"tensor": 1, "overlap": True, "dtype": dtype})
            for dtype in ("bf16", "fp16")
        ),
    )


def demo(machine: Machine) -> Figures:
    """``holdfast demo`` with two nodes of one rank, which share the GPU."""
    nodes, device = ("4", "cpu") if machine.dry else ("2", "cuda")
    options = ["--nodes", nodes, "--ranks", "1", "--steps", "10", "--device", device, "--json", "-"]
    command = [str(Path(sys.executable).parent / "holdfast"), "demo", *options]
    limit_s = machine.limit_s(100.0)
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit_s, check=False)
    if not done.stdout.startswith("{"):
        return {"failure": done.stderr[-300:], "passes": False}
    found = json.loads(done.stdout)
    if "error" in found:
        return {"failure": found["error"]["message"][-300:], "passes": False}
    lost = [recovery["lost_steps"] for recovery in found["recoveries"]]
    shown = {name: found[name] for name in ("identical", "difference", "leaks")}
    return {**shown, "lost_steps": lost, "passes": found["identical"] and len(lost) == 2 and done.returncode == 0}


CHECKS = {
    "A0": facts,
    "A1": parts,
    "A2": seam,
    "A2b": seam_one_connection,
    "A3": faults,
    "A4": kills,
    "A5": graphs,
    "A6": moved,
    "A7": generators,
}
JOBS = {"A8": parallel, "A9": megatron, "A10": leaks, "A11": demo}


def _cells(machine: Machine, *cells: matrix.Cell) -> Figures:
    """Run cells of the matrix; return for each whether its result is the same to the last bit."""
    verdicts = matrix.run(cells, SEED, lambda verdict: None, "cpu" if machine.dry else "cuda")
    found: Figures = {verdict.cell.name: verdict.difference or "the same bits" for verdict in verdicts}
    return {**found, "passes": not any(verdict.difference for verdict in verdicts)}


def _refusing() -> Any:
    """Keep slots from being registered with CUDA, so that copies go through the ring."""
    return patch.object(pages.Pages, "prepare", lambda known, runtime, slots, turn: None)


def _job(machine: Machine, notes: Path, home: Path | None) -> Figures:
    _run(machine, notes, home)
    return _read(notes)


def _run(machine: Machine, notes: Path, home: Path | None, *options: str) -> tuple[int, str]:
    """Run the job once; return its exit status, and what it said."""
    command = [sys.executable, "-m", "benchmarks.gpu.job", "--notes", str(notes), *["--dry"] * machine.dry]
    command += [f"--arena={home}"] if home is not None else []
    environment = {**os.environ, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
    limit_s = machine.limit_s(90.0)
    done = subprocess.run(
        [*command, *options], timeout=limit_s, env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def _read(notes: Path) -> Figures:
    """The last computed loss of each step, and the digest of the final state."""
    found: Figures = {}
    for line in notes.read_text().splitlines() if notes.exists() else []:
        said = json.loads(line)
        found |= {str(said["step"]): said["loss"]} if "step" in said else said
    return found


def _held(machine: Machine) -> dict[str, float]:
    process = psutil.Process()
    found: dict[str, float] = {
        "memory": process.memory_info().rss,
        "threads": process.num_threads(),
        "descriptors": process.num_fds(),
    }
    if not machine.dry:
        found["device_memory"] = torch.cuda.memory_reserved()
    return found
