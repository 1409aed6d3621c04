"""When a copy may go on: bytes are sent to the slot no earlier than they need to be.

A copy takes memory bandwidth from the step that runs beside it. If the copy is spread out, the step hardly notices. It
is spread over the first half of the *window*, the time from a boundary to the next fence; the other half is spare, so
that the copy is also done in a step that is shorter than most. A copy that is slow anyway falls behind that plan, and
is not delayed further. After half of the window, and once anybody waits for the copy, nothing delays it.

Copies from a GPU are not paced: they are only queued here, long before they are done, and this process does not see how
long a step takes on the device. Where it has one queue, they are not all queued before anybody waits for them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.system import MACHINE, Threads

SPREAD = 0.5
"""The fraction of the window that a copy is spread over."""

SLACK = 4.0
"""A window must be this many times as long as the unpaced copy, so that spreading the copy is safe."""

REMEMBERED = 16
"""How many of the newest windows and copies are remembered."""

EVIDENCE = 4
"""Least number of windows from which one is predicted: the first steps of a run are longer than later ones."""


def plan(window_s: float | None, copy_s: float | None) -> float:
    """How many seconds from the boundary to spread a copy over; 0: let it run as fast as it can.

    Args:
        window_s: the expected time from the boundary to the next fence; None: unknown.
        copy_s: how long the copy takes when nothing delays it; None: unknown.
    """
    if window_s is None or copy_s is None or window_s < SLACK * copy_s:
        return 0.0
    return SPREAD * window_s


@dataclass(slots=True)
class _Copy:
    """The current copy, in seconds and bytes.

    Attributes:
        boundary_s, spread_s: when its window began, and how long it is spread over.
        released: bytes released so far. The last batch of them may still be in progress.
        measured, took_s: bytes known to be copied, and how long that took.
        since_s: when the last batch was released.
    """

    total: int
    boundary_s: float
    spread_s: float
    released: int = 0
    measured: int = 0
    took_s: float = 0.0
    since_s: float = 0.0

    def due_s(self) -> float:
        """When the next batch may be released."""
        return self.boundary_s + self.spread_s * min(1.0, self.released / max(1, self.total))

    def measure(self, now_s: float) -> None:
        """The last batch is over."""
        if self.released > self.measured:
            self.took_s += now_s - self.since_s
            self.measured = self.released

    def release(self, count: int, now_s: float) -> None:
        """A batch of `count` bytes is released."""
        self.released += count
        self.since_s = now_s


class Pace:
    """Spreads copies over the steps they run beside.

    `begin` and `wait` are called by the copy thread, all other methods by the training thread. Only `wait` blocks, each
    time at most for `SPREAD` of a window.

    Args:
        system: gives the clock, by which the times that callers give are, too, and events to wait for.
    """

    def __init__(self, system: Threads = MACHINE) -> None:
        self._clock = system.monotonic
        self._needed = system.Event()  # somebody waits for the copy
        self._quiet = system.Event()  # the step does not communicate
        self._quiet.set()
        # The training thread writes `_comm_until_s`, `_boundary_s` and `_window_s`, and the copy thread reads them:
        # single references, which need no lock.
        self._comm_until_s = 0.0
        self._boundary_s = 0.0
        self._window_open = False
        self._windows: deque[float] = deque(maxlen=REMEMBERED)
        self._window_s: float | None = None
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # seconds per byte; used by the copy thread only
        self._copy = _Copy(0, 0.0, 0.0)

    def boundary(self, now_s: float) -> None:
        """The state of a boundary was captured: a window begins. Call it before the copy is handed over."""
        self._boundary_s = now_s
        self._window_open = True
        if len(self._windows) >= EVIDENCE:
            self._window_s = _quartile(self._windows)
        self._needed.clear()

    def fenced(self, now_s: float) -> None:
        """The next ``optim.step()`` is about to change what is copied: the window ends. Implies `fence`."""
        if self._window_open:
            self._windows.append(now_s - self._boundary_s)
            self._window_open = False
        self.fence()

    def fence(self) -> None:
        """Somebody waits for the copy: nothing delays it any more, until the next `boundary`."""
        self._needed.set()
        self._quiet.set()

    def comm(self, active: bool) -> None:
        """Whether the step is communicating; if so, a copy waits until it stops, for at most `MAX_PAUSE_S`."""
        if not active:
            self._quiet.set()
        elif self._quiet.is_set() and not self._needed.is_set():
            self._comm_until_s = self._clock() + MAX_PAUSE_S
            self._quiet.clear()

    def begin(self, total_bytes: int) -> None:
        """A copy of `total_bytes` bytes begins, in the window of the last `boundary`."""
        if self._copy.measured:
            self._costs.append(self._copy.took_s / self._copy.measured)
        slow = -_quartile(-cost for cost in self._costs) if self._costs else None  # the upper quartile
        copy_s = None if slow is None else slow * total_bytes
        self._copy = _Copy(total_bytes, self._boundary_s, plan(self._window_s, copy_s))

    def wait(self, count: int) -> bool:
        """Block until the next batch, of `count` bytes, may be copied; 0: not at all. Returns whether somebody waits
        for the copy."""
        if not count:
            return self._needed.is_set()
        copy = self._copy
        copy.measure(self._clock())
        self._hold(self._needed, copy.due_s())
        self._hold(self._quiet, min(self._comm_until_s, copy.boundary_s + copy.spread_s))
        copy.release(count, self._clock())
        return self._needed.is_set()

    def _hold(self, event: threading.Event, until_s: float) -> None:
        left_s = until_s - self._clock()
        if left_s > 0 and not event.is_set():
            event.wait(left_s)


def _quartile(samples: Iterable[float]) -> float:
    """The lower quartile, which a few outliers do not move; the least of 4 samples or fewer."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]
