"""When a copy may go on: bytes leave for the slot no earlier than they need to.

A copy takes memory bandwidth from the step that runs beside it. Spread out, it takes that in small sips, which the
step hardly notices, and not in one gulp. It is spread over the first half of the *window*, the time from a boundary to
the next fence; the other half stays spare for noise, so that a step that is shorter than most still finds its copy
done. A copy that is slow by itself falls behind that plan, and is not delayed further. After half of the window, and
once anybody waits for the copy, nothing holds it up.

Copies from a GPU are not paced: they are only queued here, long before they are done, and the step's own time is not
that of this process.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.system import MACHINE, System

SPREAD = 0.5
"""The part of the window that a copy is spread over."""

SLACK = 4.0
"""How many times the unpaced copy a window must be long, so that spreading it is without risk."""

REMEMBERED = 16
"""Of so many windows and copies the newest are known."""

EVIDENCE = 4
"""With fewer windows none is expected: the first steps of a run are longer than those to come."""


def plan(window_s: float | None, copy_s: float | None) -> float:
    """Over how many seconds from the boundary to spread a copy; 0: let it run as fast as it can.

    Args:
        window_s: the expected time from the boundary to the next fence; None: unknown.
        copy_s: how long the copy takes when nothing delays it; None: unknown.
    """
    if window_s is None or copy_s is None or window_s < SLACK * copy_s:
        return 0.0
    return SPREAD * window_s


@dataclass(slots=True)
class _Copy:
    """The copy at hand, in seconds and bytes.

    Attributes:
        boundary_s, spread_s: when its window began; over how long it is spread.
        released: what was let go so far. The last batch of it may still be on its way.
        measured, took_s: what was seen to be copied, and how long that took.
        since_s: when the last batch was let go.
    """

    total: int
    boundary_s: float
    spread_s: float
    released: int = 0
    measured: int = 0
    took_s: float = 0.0
    since_s: float = 0.0

    def due_s(self) -> float:
        """When the next batch may go."""
        return self.boundary_s + self.spread_s * min(1.0, self.released / max(1, self.total))

    def measure(self, now_s: float) -> None:
        """The last batch is over."""
        if self.released > self.measured:
            self.took_s += now_s - self.since_s
            self.measured = self.released

    def release(self, count: int, now_s: float) -> None:
        """A batch of `count` bytes goes."""
        self.released += count
        self.since_s = now_s


class Pace:
    """Spreads copies over the steps they run beside.

    `begin` and `wait` are the copy thread's, everything else the training thread's. Only `wait` blocks, and each time
    no longer than `SPREAD` of a window.

    Args:
        clock: seconds; the times that callers give are by the same clock.
        wait: waits for an event, at most so many seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] | None = None,
        wait: Callable[[threading.Event, float], bool] | None = None,
        system: System = MACHINE,
    ) -> None:
        self._clock = clock or system.monotonic
        self._wait = wait or system.Event.wait
        self._needed = system.Event()  # somebody waits for the copy
        self._quiet = system.Event()  # the step does not communicate
        self._quiet.set()
        self._comm_until_s = 0.0
        self._boundary_s = 0.0
        self._window_open = False
        self._windows: deque[float] = deque(maxlen=REMEMBERED)
        self._window_s: float | None = None
        self._costs: deque[float] = deque(maxlen=REMEMBERED)  # seconds per byte; the copy thread's
        self._copy = _Copy(0, 0.0, 0.0)

    def boundary(self, now_s: float) -> None:
        """``optim.step()`` has returned: a window begins. Call it before the copy is handed over."""
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
        """Somebody waits for the copy: nothing holds it up any more, until the next `boundary`."""
        self._needed.set()
        self._quiet.set()

    def comm(self, active: bool) -> None:
        """Whether the step communicates just now; a copy waits for the end of that, up to `MAX_PAUSE_S`."""
        if not active:
            self._quiet.set()
        elif self._quiet.is_set() and not self._needed.is_set():
            self._comm_until_s = self._clock() + MAX_PAUSE_S
            self._quiet.clear()

    def begin(self, total_bytes: int) -> None:
        """A copy of so many bytes begins, in the window of the last `boundary`."""
        if self._copy.measured:
            self._costs.append(self._copy.took_s / self._copy.measured)
        slow = -_quartile(-cost for cost in self._costs) if self._costs else None  # the upper quartile
        copy_s = None if slow is None else slow * total_bytes
        self._copy = _Copy(total_bytes, self._boundary_s, plan(self._window_s, copy_s))

    def wait(self, count: int) -> None:
        """Block until the next batch, of `count` bytes, may go."""
        copy = self._copy
        copy.measure(self._clock())
        self._hold(self._needed, copy.due_s())
        self._hold(self._quiet, min(self._comm_until_s, copy.boundary_s + copy.spread_s))
        copy.release(count, self._clock())

    def _hold(self, event: threading.Event, until_s: float) -> None:
        left_s = until_s - self._clock()
        if left_s > 0 and not event.is_set():
            self._wait(event, left_s)


def _quartile(samples: Iterable[float]) -> float:
    """The lower quartile, which a few outliers do not move; of 4 samples or fewer, the least."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]
