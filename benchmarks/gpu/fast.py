"""Part B: speed. The works to compare take turns within one run; each ratio is the median over the turns."""

from __future__ import annotations

import mmap
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import psutil
import torch

from benchmarks.gpu.machine import Machine, arena, run_check, with_memory
from benchmarks.service_parts import Job
from holdfast import InMemorySnapshot
from holdfast.smp_daemon.shared.client import RecoveredShard
from holdfast.smp_daemon.shared.populate import populate
from holdfast.smp_daemon.shared.records import digest_units
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_driver import REGISTER_BYTES
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor, address_of
from holdfast.snapshot.resume.loading import load_checked
from holdfast.snapshot.resume.reserve import REST
from tests.proof.device.seam import SeamDevice

Figures = dict[str, Any]

ROUNDS = 5
UNIT_BYTES = 4 << 20

CYCLES, CYCLE, QUIET = 8, 8, 4
"""A snapshot is taken every so many steps, so many times, and some steps after it nothing of it is left to do."""

MOST_KERNELS, LONGER = 900, 3
"""How many kernels are queued beside a copy: as many as take three times as long, if a driver takes that many without
blocking."""

LEAST = {"200 tensors": 0.97, "3,000 as of a sharded 70B": 0.95, "20,000 of 64 KiB": 0.85, "channels last": 0.6}
"""Lower limits for the copy engine's rate, as fractions of the rate of one pinned copy. The ring's limit is `RING`."""

RING = 0.25


@contextmanager
def _on(machine: Machine) -> Iterator[tuple[SeamDevice, CopyEngine, CudaEngine]]:
    """The device, its composite engine, and the CUDA engine that copies."""
    device = machine.device
    with device.installed():
        engines = device.engines()
        [(engine, _)] = engines.parts([SlotTensor(torch.zeros(1, device=device.name), 0, 4)])
        assert isinstance(engine, CudaEngine)
        try:
            yield device, engines, engine
        finally:
            engines.close()


def rates(machine: Machine) -> Figures:
    """Copies to a slot's registered pages are as fast as copies to memory that CUDA allocated."""
    count = _bytes(machine, 8 << 30)
    with _on(machine) as (device, engines, engine), _slot(count) as slot:
        source = torch.zeros(count, dtype=torch.uint8, device=device.name)
        pinned = engine.runtime.pinned(count)
        engines.prepare([slot], nullcontext)
        there = runs.make_runs([(source.data_ptr(), pinned.data_ptr(), count)])
        back = runs.make_runs([(pinned.data_ptr(), source.data_ptr(), count)])
        to_slot = _to_slot(source, slot)
        took = _in_turns(
            device,
            lambda: engine.runtime.copy_runs(there),
            lambda: engine.runtime.copy_runs(to_slot),
            lambda: engine.runtime.copy_runs(back),
        )
    ratio = statistics.median(one / other for one, other, _ in took)
    to_host, _, to_device = (statistics.median(each) for each in zip(*took, strict=True))
    return {
        "slot_over_pinned": round(ratio, 3),
        "to_host_gbps": round(count / to_host / 1e9, 1),
        "to_device_gbps": round(count / to_device / 1e9, 1),
        "passes": machine.dry or ratio >= 0.98,
    }


def registration(machine: Machine) -> Figures:
    """The time that registering takes, and how long it delays kernel launches of another thread: whoever registers
    rests after each part, as beside a training."""
    count, busy = _bytes(machine, 8 << 30), 0.0

    @contextmanager
    def turn() -> Iterator[None]:
        nonlocal busy
        began = time.perf_counter()
        yield
        took = time.perf_counter() - began
        busy += took
        time.sleep(REST * took)

    with _on(machine) as (device, engines, _), _slot(count) as slot:
        work = torch.ones(64, device=device.name)
        work.add_(1)  # CUDA loads a kernel at its first launch
        stop, gaps = threading.Event(), [0.0]

        def launches() -> None:
            while not stop.is_set():
                began = time.perf_counter()
                work.add_(1)
                gaps.append(time.perf_counter() - began)
                stop.wait(0.0005)

        thread = threading.Thread(target=launches)
        thread.start()
        engines.prepare([slot], turn)
        stop.set()
        thread.join()
    longest = max(gaps)
    return {
        "s_per_gb": round(busy / count * 1e9, 3),
        "longest_launch_ms": round(1e3 * longest, 2),
        "launches": len(gaps),
        "over_2_ms": sum(gap > 2e-3 for gap in gaps),
        "passes": machine.dry or (busy / count * 1e9 <= 0.15 and longest <= 5e-3),
    }


def copies(machine: Machine) -> Figures:
    """The copy engine compared with one pinned copy of the same number of bytes."""
    found: Figures = {"passes": True}
    for name, tensors, ring in _kinds(machine):
        with _on(machine) as (device, engines, engine):
            live = [tensor.to(device.name) for tensor in tensors()]
            pieces, total = _placed(live)
            with _slot(total) as slot:
                if not ring:
                    engines.prepare([slot], nullcontext)
                flat = torch.zeros(total, dtype=torch.uint8, device=device.name)
                pinned = engine.runtime.pinned(total)
                one = runs.make_runs([(flat.data_ptr(), pinned.data_ptr(), total)])

                took = _in_turns(device, partial(engine.runtime.copy_runs, one), partial(_moved, engines, pieces, slot))
        ratio = statistics.median(pinned_s / ours_s for pinned_s, ours_s in took)
        found[name] = round(ratio, 3)
        found["passes"] &= machine.dry or ratio >= (RING if ring else LEAST[name])
    return found


def queueing(machine: Machine) -> Figures:
    """How long the copy thread takes to queue 3,000 tensors, per tensor; it may block other threads meanwhile."""
    with _on(machine) as (device, engines, _):
        live = [torch.zeros(1000, device=device.name) for _ in range(60 if machine.dry else 3000)]
        pieces, total = _placed(live)
        with _slot(total) as slot:
            engines.prepare([slot], nullcontext)
            took = []
            for _ in range(ROUNDS):
                transfer = engines.mark()
                began = time.perf_counter()
                transfer.copy(pieces, slot, lambda count: True)
                took.append(time.perf_counter() - began)
                transfer.finish()
    each = statistics.median(took[1:]) / len(live) * 1e6
    return {"us_a_tensor": round(each, 2), "passes": machine.dry or each <= 3}


def connections(machine: Machine) -> Figures:
    """`latency` with each number of queues to the device: one, as Megatron sets it, eight, and the default."""
    found: Figures = {"passes": True}
    for count in ("1", "8", ""):
        result = run_check("B5-one", machine, 35.0, {"CUDA_DEVICE_MAX_CONNECTIONS": count} if count else {})
        found["passes"] &= result.pop("passes")
        found[f"connections {count or 'default'}"] = result
    return found


def latency(machine: Machine) -> Figures:
    """How long the training thread waits for `item`, and for a kernel behind everything launched, during a snapshot;
    and how much this slows the copy down."""
    count = _bytes(machine, 8 << 30)
    with _on(machine) as (device, engines, _), _slot(count) as slot:
        engines.prepare([slot], nullcontext)
        pieces, _ = _placed(list(torch.split(torch.zeros(count, dtype=torch.uint8, device=device.name), count // 4)))
        small = torch.ones(1, device=device.name)
        _launched(device, small)  # CUDA loads a kernel at its first launch, and waits for the device meanwhile
        idle = statistics.median(_asked(small) for _ in range(20))
        [(alone,)] = _in_turns(device, lambda: _moved(engines, pieces, slot))[-1:]
        seen: list[float] = []
        kernels = [0.0]
        thread = MACHINE.Thread(target=_moved, args=(engines, pieces, slot))
        began = time.perf_counter()
        thread.start()
        while thread.is_alive() and not (machine.dry and len(seen) > 50):  # a lazy emulated device copies last
            seen.append(_asked(small))
            kernels.append(_launched(device, small))
        thread.join()
        took = time.perf_counter() - began
    longest = max(seen, default=0.0)
    return {
        "idle_ms": round(1e3 * idle, 3),
        "longest_ms": round(1e3 * longest, 3),
        "longest_kernel_ms": round(1e3 * max(kernels), 3),
        "rate": round(alone / took, 3),
        "passes": machine.dry or (longest <= 1.5e-3 and max(kernels) <= 1.5e-3 and alone / took >= 0.95),
    }


def beside_kernels(machine: Machine) -> Figures:
    """How fast a copy is while kernels fill the device: with ours between its parts, which have to wait for a place
    there, and without."""
    count, side = _bytes(machine, 8 << 30), 16 if machine.dry else 8192
    with _on(machine) as (device, engines, engine), _slot(count) as slot:
        engines.prepare([slot], nullcontext)
        pieces, _ = _placed(list(torch.split(torch.zeros(count, dtype=torch.uint8, device=device.name), count // 4)))
        factor = torch.ones(side, side, dtype=torch.bfloat16, device=device.name)

        def as_one(parts: Sequence[runs.Runs]) -> None:
            engine.runtime.copy_runs(np.concatenate(parts))

        def moved(kernels: int) -> float:
            device.synchronize()
            transfer = engines.mark()
            for _ in range(kernels):
                torch.mm(factor, factor)
            began = time.perf_counter()
            transfer.copy(pieces, slot, lambda count: True)
            transfer.finish()
            return time.perf_counter() - began

        [(of_20,)] = _in_turns(device, lambda: [torch.mm(factor, factor) for _ in range(20)])[-1:]
        [(alone,)] = _in_turns(device, lambda: moved(0))[-1:]
        kernels = min(MOST_KERNELS, round(20 * LONGER * alone / of_20))
        with_ours, without = [], []
        for _ in range(ROUNDS):
            with_ours.append(moved(kernels))
            with patch.object(engine.runtime, "copy_parts", as_one):
                without.append(moved(kernels))
        lasted = kernels * of_20 / 20
    slow, fast = statistics.median(with_ours), statistics.median(without)
    return {
        "rate": round(alone / slow, 3),
        "rate_without_ours": round(alone / fast, 3),
        "kernels_s": round(lasted, 3),
        "passes": machine.dry or (slow <= lasted and fast >= 0.8 * slow),
    }


def one_connection(machine: Machine) -> Figures:
    """`training` with one queue to the device for all streams, as Megatron requires."""
    return run_check("B6", machine, 105.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "1"})


def eight_connections(machine: Machine) -> Figures:
    """`training` with eight queues to the device."""
    return run_check("B6", machine, 105.0, {"CUDA_DEVICE_MAX_CONNECTIONS": "8"})


def training(machine: Machine) -> Figures:
    """A step whose beginning is copied beside it, and those in which the copy is sealed, compared with quiet steps of
    the same run: devices get slower as they warm up. And quiet steps compared with those before the hook and after."""
    cycles = 2 if machine.dry else CYCLES
    device = machine.device
    torch.set_float32_matmul_precision("high")
    with arena() as base, device.installed():
        model, optimizer, given = _job(machine, device, rows=32768)
        _steps(device, model, optimizer, given, range(2))
        alone = _steps(device, model, optimizer, given, range(CYCLE))
        before = _allocated(machine)
        hook = InMemorySnapshot(model, optimizer, job="fast", arena=base / "fast", every=CYCLE)
        with hook as snap:
            beside = _steps(device, model, optimizer, given, with_memory(snap, cycles * CYCLE), hook)
        added = _allocated(machine) - before
        alone += _steps(device, model, optimizer, given, range(CYCLE))
    copied = [i for i, step in enumerate(beside) if step.copies and i + CYCLE <= len(beside)]
    quiet_s = {i: statistics.median(step.seconds for step in beside[i + QUIET : i + CYCLE]) for i in copied}
    ratios = [[beside[i + n].seconds / quiet_s[i] for i in copied] for n in range(QUIET)]
    step, *sealing = (statistics.median(each) for each in ratios)
    stalls = [beside[i].stall_s / quiet_s[i] for i in copied]
    held_up = statistics.median(stalls)
    return {
        "step_ms": round(1e3 * statistics.median(quiet_s.values()), 1),
        "snapshots": len(copied),
        "step": round(step, 4),
        "sealing": round(statistics.median(sealing), 4),
        "first_six": round(max(max(each[:6]) for each in ratios), 3),
        "hooked": round(statistics.median(quiet_s.values()) / statistics.median(each.seconds for each in alone), 4),
        "held_up": round(held_up, 5),
        "held_up_at_most": round(max(stalls), 5),
        "device_memory_added_mb": round(added / 1e6, 1),
        "passes": machine.dry
        or (step <= 1.005 and held_up <= 0.002 and max(ratios[0][:6]) <= 1.2 and added <= 64 << 20),
    }


def crowded(machine: Machine) -> Figures:
    """With default options and steps shorter than the copy, snapshots get fewer, but steps do not get longer."""
    steps = 12 if machine.dry else 300
    device = machine.device
    with arena() as base, device.installed():
        model, optimizer, given = _job(machine, device, rows=64)
        alone = _steps(device, model, optimizer, given, range(steps // 4))
        hook = InMemorySnapshot(model, optimizer, job="crowded", arena=base / "crowded")
        with hook as snap:
            beside = _steps(device, model, optimizer, given, with_memory(snap, steps))
        again = _steps(device, model, optimizer, given, range(steps // 4))
    late, others = beside[-(steps // 2) :], [*alone, *again]
    ratio = statistics.mean(step.seconds for step in late) / statistics.mean(step.seconds for step in others)
    said = hook.statistics
    return {
        "step": round(ratio, 4),
        "interval": said.interval,
        "taken": said.taken,
        "failed": said.failed,
        "passes": machine.dry or (ratio <= 1.01 and said.failed == 0),
    }


def restoring(machine: Machine) -> Figures:
    """Loading a checked slot to the device, compared with one transfer of as many bytes from pinned memory."""
    count = _bytes(machine, 8 << 30)
    with _on(machine) as (device, engines, engine), _slot(count) as slot:
        live = list(torch.split(torch.zeros(count, dtype=torch.uint8, device=device.name), max(1, count // 300)))
        pieces, _ = _placed(live, aligned=1)
        pinned = engine.runtime.pinned(count)
        target = torch.zeros(count, dtype=torch.uint8, device=device.name)
        one = runs.make_runs([(pinned.data_ptr(), target.data_ptr(), count)])
        shard = RecoveredShard(slot, "held", 0, UNIT_BYTES, digest_units(slot, UNIT_BYTES))
        began = time.perf_counter()
        load_checked(engines, pieces, shard, lambda units: None)
        cold = time.perf_counter() - began
        took = _in_turns(
            device,
            lambda: engine.runtime.copy_runs(one),
            lambda: load_checked(engines, pieces, shard, lambda units: None),
        )
    raw = statistics.median(each for each, _ in took)
    warm = statistics.median(ours / alone for alone, ours in took)
    return {
        "warm": round(warm, 2),
        "cold": round(cold / raw, 2),
        "passes": machine.dry or (warm <= 1.2 and cold / raw <= 2),
    }


def sealing(machine: Machine) -> Figures:
    """The rate of digests, for one shard and for eight, and how much they slow down the copies of the next snapshot."""
    count = _bytes(machine, 2 << 30)
    with _on(machine) as (device, engines, engine), _slot(count) as slot, _slot(count) as sealed:
        source = torch.zeros(count, dtype=torch.uint8, device=device.name)
        engines.prepare([slot], nullcontext)
        one = _to_slot(source, slot)
        [(alone,)] = _in_turns(device, lambda: engine.runtime.copy_runs(one))[-1:]
        found: Figures = {"passes": True}
        for shards in (1, 8):
            length = count // shards
            parts = [sealed[i * length : (i + 1) * length] for i in range(shards)]
            with ThreadPoolExecutor(shards) as pool:
                began = time.perf_counter()
                sealing = [pool.submit(_sealed, part) for part in parts]
                took: list[float] = []
                while not took or not all(each.done() for each in sealing):
                    before = time.perf_counter()
                    engine.runtime.copy_runs(one)
                    device.synchronize()
                    took.append(time.perf_counter() - before)
                each_s = [each.result() - began for each in sealing]
            rate, copies = length / statistics.median(each_s) / 1e9, alone / statistics.median(took)
            found[f"{shards} shards"] = {"gbps_each": round(rate, 1), "copy_rate": round(copies, 3)}
            found["passes"] &= machine.dry or (rate >= 8 and copies >= 0.95)
    return found


def protecting(machine: Machine) -> Figures:
    """The rate at which two nodes protect each other over loopback, and the CPU time this takes."""
    length = _bytes(machine, 4 << 30)
    with arena() as base, ExitStack() as stack:
        job = Job(base, stack, [[length], [length]])
        job.start()
        job.take()
        before = _cpu_times(job)
        answers = [answer for _ in range(2 if machine.dry else 4) for answer in job.take()]
        after = _cpu_times(job)
        moved = length * len(answers) / 1e9
    protect_s = statistics.median(answer["seconds"][-1] for answer in answers)
    user, kernel = ((late - early) / moved for early, late in zip(before, after, strict=True))
    return {
        "protect_gbps": round(length / protect_s / 1e9, 2),
        "user_s_per_gb": round(user, 3),
        "kernel_s_per_gb": round(kernel, 3),
        "passes": not job.lost,
    }


CHECKS = {
    "B1": rates,
    "B2": registration,
    "B3": copies,
    "B4": queueing,
    "B5": connections,
    "B5b": beside_kernels,
    "B10": restoring,
    "B11": sealing,
    "B12": protecting,
}
STEPS = {"B6": training, "B6-1": one_connection, "B6-8": eight_connections, "B7": crowded}
PARTS_OF_CHECKS = {"B5-one": latency}


def _job(
    machine: Machine, device: SeamDevice, rows: int
) -> tuple[torch.nn.Module, torch.optim.Optimizer, torch.Tensor]:
    """A model of 0.5 billion weights, 6.4 GB with its optimizer, and the input of each step."""
    layers, width, rows = (1, 16, 2) if machine.dry else (16, 2048, rows)
    torch.manual_seed(1)
    parts = [torch.nn.Linear(*sizes) for _ in range(layers) for sizes in ((width, 4 * width), (4 * width, width))]
    model = torch.nn.Sequential(*parts).to(device.name)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    return model, optimizer, torch.randn(rows, width).to(device.name)


def _sealed(part: memoryview) -> float:
    """Compute all digests of a part; return the time (`time.perf_counter`) at which they are complete."""
    digest_units(part, UNIT_BYTES)
    return time.perf_counter()


def _cpu_times(job: Job) -> tuple[float, float]:
    """User and system CPU time of all SMPs so far, in seconds."""
    times = [psutil.Process(node.pid).cpu_times() for node in job.nodes]
    return sum(each.user for each in times), sum(each.system for each in times)


def _allocated(machine: Machine) -> int:
    """The peak of device memory that torch has allocated, in bytes."""
    return 0 if machine.dry else torch.cuda.max_memory_allocated()


def _moved(engines: CopyEngine, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
    engines.enter_thread()
    transfer = engines.mark()
    transfer.copy(pieces, slot, lambda count: True)
    transfer.finish()


def _launched(device: SeamDevice, small: torch.Tensor) -> float:
    """How long a kernel takes from its launch, in seconds, without a copy to the host."""
    began = time.perf_counter()
    small.add_(1)
    passed = device.event()
    while not passed.query():
        pass
    return time.perf_counter() - began


def _asked(small: torch.Tensor) -> float:
    began = time.perf_counter()
    small.item()
    return time.perf_counter() - began


class _Step(NamedTuple):
    """What a step took, in seconds, how long of that the hook held it up, and whether a snapshot was begun in it."""

    seconds: float
    stall_s: float
    copies: bool


def _steps(
    device: SeamDevice,
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    given: torch.Tensor,
    turns: Iterable[int],
    hook: InMemorySnapshot | None = None,
) -> list[_Step]:
    """Train."""
    took, taken = [], 0
    for _ in turns:
        stall_s, before = (hook.statistics.stall_s if hook else 0.0), taken
        taken = hook.statistics.taken if hook else 0
        began = time.perf_counter()
        model(given).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        device.synchronize()
        seconds = time.perf_counter() - began
        held_up_s = hook.statistics.stall_s - stall_s if hook else 0.0
        took.append(_Step(seconds, held_up_s, taken > before))
    return took


def _kinds(machine: Machine) -> Iterator[tuple[str, Callable[[], list[torch.Tensor]], bool]]:
    """Kinds of state: name, a function that makes the tensors, and whether they are copied through the ring."""
    small = machine.dry
    whole = _bytes(machine, 4 << 30) // 4

    def split(count: int) -> list[torch.Tensor]:
        return [torch.zeros(max(1, whole // count)) for _ in range(count)]

    def sharded() -> list[torch.Tensor]:
        sizes = (8192, 1024 * 1024, 3584 * 1024, 64) if not small else (8, 64, 100, 1)
        return [torch.zeros(sizes[i % 4]) for i in range(30 if small else 1200)]

    def turned() -> list[torch.Tensor]:
        shape = (4, 4, 3, 3) if small else (512, 512, 3, 3)
        count = 3 if small else whole // (512 * 512 * 9)
        return [torch.zeros(shape).contiguous(memory_format=torch.channels_last) for _ in range(count)]

    yield "200 tensors", lambda: split(8 if small else 200), False
    yield "3,000 as of a sharded 70B", sharded, False
    yield "20,000 of 64 KiB", lambda: [torch.zeros(16384) for _ in range(9 if small else 20_000)], False
    yield "channels last", turned, False
    yield "through the ring", lambda: split(8 if small else 200), True


def _bytes(machine: Machine, count: int) -> int:
    return 1 << 16 if machine.dry else count


def _placed(tensors: Sequence[torch.Tensor], aligned: int = 64) -> tuple[tuple[SlotTensor, ...], int]:
    """Place the tensors one after another in a slot; return them with the slot's length."""
    pieces, at = [], 0
    for tensor in tensors:
        pieces.append(SlotTensor(tensor, at, tensor.nbytes))
        at += -(-tensor.nbytes // aligned) * aligned
    return tuple(pieces), at


def _to_slot(source: torch.Tensor, slot: memoryview) -> runs.Runs:
    """A copy of all bytes of a tensor to a slot; CUDA takes no copy from one registered part into the next."""
    rows = runs.cut(runs.make_runs([(source.data_ptr(), 0, source.nbytes)]), 1, REGISTER_BYTES)
    return rows + np.array([0, address_of(slot), 0], np.uint64)


@contextmanager
def _slot(count: int) -> Iterator[memoryview]:
    """A slot as in an arena: a fully allocated and mapped tmpfs file."""
    path = Path(f"/dev/shm/holdfast-gpu-{os.getpid()}")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        path.unlink()
        os.posix_fallocate(fd, 0, count)
        mapped = mmap.mmap(fd, count)
    finally:
        os.close(fd)
    populate(mapped)
    yield memoryview(mapped)


def _in_turns(device: SeamDevice, *works: Callable[[], object]) -> list[tuple[float, ...]]:
    """Seconds that each work took until the device had finished it, per round, without the first round."""
    rounds = []
    for _ in range(ROUNDS + 1):
        took = []
        for work in works:
            device.synchronize()
            began = time.perf_counter()
            work()
            device.synchronize()
            took.append(time.perf_counter() - began)
        rounds.append(tuple(took))
    return rounds[1:]
