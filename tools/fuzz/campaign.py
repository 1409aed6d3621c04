"""Runs inputs against all targets under limits of time and memory; records failures, and the worst time and memory."""

from __future__ import annotations

import resource
import signal
import time
import traceback
import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType
from typing import Any

from tools.fuzz.mutation import mutate
from tools.fuzz.targets import Target, targets, try_one

CORPUS = Path(__file__).parent / "corpus"
HANG_S = 1.0
"""CPU time limit for one input. Not wall time, as parsers never wait and other processes may be using the CPU."""
ROOM_BYTES = 512 << 20
"""Limit for the address space that all inputs together may add to that of the process."""

BUDGET_BYTES = 1 << 20
BUDGET_PER_BYTE = 256
"""Limit for the memory that one input may have allocated at a time: `BUDGET_BYTES`, and this per byte of input."""

SAMPLE = 64
"""Memory is measured for one input in this many."""


class Hang(BaseException):
    """An input takes too long. A `BaseException`, so that no parser catches it."""


@dataclass
class Found:
    """Results of a campaign, or of one of its shards."""

    inputs: int = 0
    seconds: float = 0.0
    crashes: list[dict[str, Any]] = field(default_factory=list)
    slowest_s: float = 0.0
    slowest: str = ""
    peak_bytes: int = 0
    peak: str = ""
    measured: int = 0
    by_target: dict[str, int] = field(default_factory=dict)

    def add(self, other: Found) -> None:
        """Add the results of another shard."""
        if other.slowest_s > self.slowest_s:
            self.slowest_s, self.slowest = other.slowest_s, other.slowest
        if other.peak_bytes > self.peak_bytes:
            self.peak_bytes, self.peak = other.peak_bytes, other.peak
        self.inputs += other.inputs
        self.seconds = max(self.seconds, other.seconds)
        self.measured += other.measured
        self.crashes += other.crashes
        for name, count in other.by_target.items():
            self.by_target[name] = self.by_target.get(name, 0) + count


def kept(name: str) -> list[Path]:
    """The corpus files of a target."""
    return sorted((CORPUS / name).glob("*")) if (CORPUS / name).is_dir() else []


def run(inputs: int, seed: str, names: list[str] | None = None) -> Found:
    """Run `inputs`, divided equally among all targets. Main thread only, as it uses a signal."""
    found, random = Found(), Random(seed)
    chosen = {name: targets()[name] for name in names or targets()}
    seeds = {name: [*target.seeds, *(path.read_bytes() for path in kept(name))] for name, target in chosen.items()}
    began = time.monotonic()
    with limited():
        for number in range(inputs):
            name = list(chosen)[number % len(chosen)]
            target = chosen[name]
            data = mutate(random, seeds[name], target.text)
            one(found, name, target, data, measured=number % SAMPLE == 0)
    found.seconds = time.monotonic() - began
    return found


def one(found: Found, name: str, target: Target, data: bytes, *, measured: bool) -> None:
    """Run one input, and record the result."""
    found.inputs += 1
    found.by_target[name] = found.by_target.get(name, 0) + 1
    if measured:
        tracemalloc.start()
    signal.setitimer(signal.ITIMER_PROF, HANG_S)
    began = time.process_time()
    try:
        try_one(target, data)
    except (Exception, Hang):
        found.crashes.append({"target": name, "input": data.hex(), "trace": traceback.format_exc()[-2000:]})
    finally:
        seconds = time.process_time() - began
        signal.setitimer(signal.ITIMER_PROF, 0)
    if measured:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        found.measured += 1
        if peak > found.peak_bytes:
            found.peak_bytes, found.peak = peak, name
        if peak > BUDGET_BYTES + BUDGET_PER_BYTE * len(data):
            found.crashes.append({"target": name, "input": data.hex(), "trace": f"{peak} bytes for {len(data)}"})
    elif seconds > found.slowest_s:
        found.slowest_s, found.slowest = seconds, name


@contextmanager
def limited() -> Iterator[None]:
    """Limit the address space to `ROOM_BYTES` more than now, and end inputs that hang by a signal."""

    def alarm(number: int, frame: FrameType | None) -> None:
        raise Hang(f"more than {HANG_S} s")

    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    before, handler = resource.getrlimit(resource.RLIMIT_AS), signal.signal(signal.SIGPROF, alarm)
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)
        signal.signal(signal.SIGPROF, handler)
