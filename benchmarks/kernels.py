"""Small concurrent kernels of holdfast under an independent scheduler: frontrun, a package on PyPI.

``pip install frontrun==0.7.0; frontrun python -m pytest benchmarks/kernels.py``. frontrun explores interleavings of
threads opcode by opcode: exhaustively with partial order reduction, and at random. Each kernel is explored unchanged,
where no violation may be found, and with a planted fault, which must be found.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import frontrun
import pytest
import torch

from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, _Episode
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot
from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor
from holdfast.snapshot.copy.pace import Pace
from holdfast.snapshot.step.capture import Staging
from holdfast.snapshot.step.copier import CopyJob

FORM = plan_slot("job", "dp0", [Leaf("x", "U8", (64,))], 64)


class Fence:
    """The training thread changes the state after the fence while the copy thread reads it."""

    def __init__(self) -> None:
        self.job = CopyJob(SnapshotId(1, 1), "dp0", (), None, FORM, (), 0, (), lambda inputs: b"", CpuEngine())
        self.changed = self.torn = False

    def train(self) -> None:
        self.job.fence(0.0, 5.0)
        self.changed = True

    def copy(self) -> None:
        try:
            self.job.read()
        except HoldfastError:
            return
        self.torn = self.changed
        self.job.free()

    def holds(self) -> bool:
        return not self.torn

    workers = (train, copy)
    fault = (CopyJob, "fence", lambda self, patience_s, deadline_s: True)


class GivenUp:
    """A snapshot is given up while the copy thread begins: all threads must agree on whether it was read."""

    def __init__(self) -> None:
        self.job = CopyJob(SnapshotId(1, 1), "dp0", (), None, FORM, (), 0, (), lambda inputs: b"", CpuEngine())
        self.read: bool | None = None

    def train(self) -> None:
        self.job.abort(HoldfastError("first"))

    def other(self) -> None:
        self.job.abort(HoldfastError("second"))

    def copy(self) -> None:
        try:
            self.job.read()
            self.read = True
        except HoldfastError:
            self.read = False

    def holds(self) -> bool:
        return self.job.error is not None and self.job.sure.is_set() and self.read is self.job.reading.is_set()

    workers = (train, other, copy)
    fault = (CopyJob, "read", lambda self: self.reading.set() or self.check())


class Gate:
    """The step begins and ends communication, then waits for the copy, which waits at the gate in the meantime."""

    def __init__(self) -> None:
        self.pace = Pace(clock=lambda: 0.0, wait=lambda event, seconds: event.wait(5.0))
        self.pace.begin(8)
        self.passed = False

    def train(self) -> None:
        self.pace.comm(True)
        self.pace.comm(False)
        self.pace.fence()

    def copy(self) -> None:
        self.pace.wait(8)
        self.passed = True

    def holds(self) -> bool:
        return self.passed and self.pace._quiet.is_set()

    workers = (train, copy)
    fault = (Pace, "fence", lambda self: self._quiet.clear())


class Log:
    """Two threads report the same failure and its end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        numbers = itertools.count()
        self.episodes = Episodes(self, lambda: float(next(numbers)))  # type: ignore[arg-type]

    def log(self, level: int, text: str, *arguments: Any, **more: Any) -> None:
        self.lines.append("began")

    def info(self, text: str, *arguments: Any, **more: Any) -> None:
        self.lines.append("ended")

    def fail_and_recover(self) -> None:
        self.episodes.begin("key", "failed")
        self.episodes.end("key", "works")

    def holds(self) -> bool:
        return self.lines.count("began") == self.lines.count("ended") and not self.episodes._going_on

    workers = (fail_and_recover, fail_and_recover)
    fault = (Episodes, "begin", lambda self, key, text: key in self._going_on or _begin(self, key, text))


class Staged:
    """Several threads take staging copies and give them back: no copy may be held by two threads at once."""

    def __init__(self) -> None:
        self.staging = Staging()
        self.live = (SlotTensor(torch.zeros(4), 0, 16, "x"),)
        self.held: list[int] = []
        self.twice = False

    def take(self) -> None:
        for _ in range(2):
            staged = self.staging.take(self.live)
            self.twice = self.twice or id(staged) in self.held
            self.held.append(id(staged))
            self.held.remove(id(staged))
            self.staging.give_back(staged)

    def holds(self) -> bool:
        return not self.twice and len(self.staging._free) >= 1

    workers = (take, take)
    fault = (Staging, "give_back", lambda self, staged: self._free.extend([staged, staged]))


def _begin(self: Episodes, key: str, text: str) -> None:
    """`Episodes.begin` without its guard against a concurrent begin."""
    self._going_on[key] = _Episode(0.0)
    self._log.log(0, text)


KERNELS = (Fence, GivenUp, Gate, Log, Staged)
SEARCHES: dict[str, dict[str, Any]] = {
    "dpor": {"strategy": "dpor"},
    "random": {"strategy": "random", "max_attempts": 300, "seed": 1},
}


def explore(kernel: Any, search: str) -> Any:
    """Run all workers of a kernel in the interleavings that the search chooses."""
    workers: list[Callable[[Any], None]] = list(kernel.workers)
    return frontrun.explore(
        setup=kernel, workers=workers, invariant=kernel.holds, trace_packages=["holdfast.*"], **SEARCHES[search]
    )


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_nothing_is_found(kernel: Any, search: str) -> None:
    result = explore(kernel, search)
    print(f"\n{kernel.__name__}, {search}: {result.num_explored} interleavings")
    result.assert_holds()


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kernel", KERNELS)
def test_a_planted_fault_is_found(kernel: Any, search: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*kernel.fault)
    result = explore(kernel, search)
    print(f"\n{kernel.__name__}, {search}: found after {result.num_explored} interleavings")
    assert result.property_holds is False
