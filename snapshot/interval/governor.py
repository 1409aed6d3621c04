"""How often snapshots may be taken so that training loses no more than a budget of its time to them. Pure: no clock.

As in CheckFreq (Mohan et al., FAST 2021), the interval between snapshots is tuned to a bound on measured overhead.

The typical baseline step gives `base`, the time of a step without a snapshot. The extra time of a snapshot's overlapped
steps is its cost; see `snapshot.interval.overlap`. So ``overhead = cost / (interval * base)``, and the shortest
interval within the budget is ``cost / (budget * base)``. If snapshots follow each other so closely that there is no
baseline step, the governor asks for a longer interval for a while: a *probe*.

Each rank has one `Governor`. All ranks `agree` on the maximum of what each `wanted`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import fmean

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.overlap import STALE_STEPS, OverlapLog, Overlapped, check_budget
from holdfast.snapshot.interval.samples import EVIDENCE, typical

WINDOW = 64
"""Number of newest snapshots, and of newest baseline steps, that count."""

PROBE_FACTOR = 16
"""How far a probe may stretch the interval. If it still finds no baseline step it is given up, and the next begins
`STALE_STEPS` steps later."""

_ERRORS = 2.0
"""Number of standard errors that a difference must exceed to count before the windows are full."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """One snapshot: how many steps it overlapped; their time beyond `base`, and the stall, as multiples of `base`."""

    steps: float
    excess: float
    stall: float


@dataclass(frozen=True, slots=True)
class _Measurement:
    """The cost of a snapshot and its standard error, as multiples of `base`; whether the windows were full."""

    cost: float
    error: float
    full: bool


class Governor:
    """Asks for the interval between snapshots, in steps, that keeps their overhead within a budget.

    Not thread-safe; nothing blocks.

    Args:
        budget: largest fraction of training time that snapshots may take, such as 0.01; None: always use `every`.
        every: the interval the user wants, and the shortest.
        longest: the longest interval, unless `every` is longer.
        protect_every: one of this many snapshots is encoded.

    Raises:
        ConfigError: the budget is not between 0 and 1, or an interval is below 1.
    """

    def __init__(self, budget: float | None, every: int, longest: int = 1000, protect_every: int = 1) -> None:
        if every < 1 or longest < 1:
            raise ConfigError(f"snapshots every {every} steps, at most {longest}: intervals are 1 or more steps")
        self._budget = check_budget(budget)
        self._every = every
        self._longest = max(every, longest)
        self._interval = every
        self._home: int | None = None  # during a probe: the interval before it
        self._next_probe = 0
        self._steps = 0
        self._log = OverlapLog(protect_every)  # counts baseline steps since `_forget`
        self._baseline: deque[float] = deque(maxlen=WINDOW)
        self._snapshots: deque[_Snapshot] = deque(maxlen=WINDOW)
        self._measured: _Measurement | None = None  # at this interval
        self._newest: _Measurement | None = None  # at any interval

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, as the ranks agreed."""
        return self._interval

    @property
    def overhead(self) -> float | None:
        """Fraction of training time that snapshots take at this interval; None as long as it is unknown.

        If there is no baseline step, it follows from the cost that the last probe measured.
        """
        return self._newest.cost / self._interval if self._newest else None

    def takes(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        return step % self.interval == 0

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished training step; see `OverlapLog.observe`."""
        self._steps += 1
        if not overlapped:
            self._baseline.append(step_s)
        snapshot = self._log.observe(step_s, stall_s, overlapped, self._interval)
        if snapshot is not None:
            self._compare(snapshot)
        if self._log.in_a_row == STALE_STEPS:
            self._forget()

    def wanted(self) -> int:
        """The interval this rank asks for, at least `every`. Depends only on what was observed, and changes nothing."""
        verdict = self._verdict()
        if verdict is not None:
            return verdict
        if not self._log.starved(self._interval):
            return self._interval
        if self._home is None:
            return min(self._interval + 1, self._longest) if self._steps >= self._next_probe else self._interval
        if 2 * self._interval > min(PROBE_FACTOR * self._home, self._longest):
            return self._home
        return 2 * self._interval

    def agree(self, interval: int) -> None:
        """All ranks use `interval` from now on: the maximum of what they `wanted`.

        Called after every agreement, even on the same interval, and before the next `wanted`: a wish from before a
        change would undo the change.

        Raises:
            ValueError: the interval is below 1.
        """
        if interval < 1:
            raise ValueError(f"an interval of {interval} steps")
        if self._home is not None:
            if interval <= max(self._home, self._verdict() or 0):
                self._home = None
                self._next_probe = self._steps + STALE_STEPS
        elif interval > self._interval and self._log.starved(self._interval):
            self._home = self._interval
            self._baseline.clear()
        if interval != self._interval:
            self._interval = interval
            self._forget()

    def _verdict(self) -> int | None:
        """The interval that the measurements call for; None while they do not suffice."""
        if self._budget is None:
            return self._every
        if self._measured is None:
            return None
        ideal = self._measured.cost / self._budget
        slack = 0.0 if self._measured.full else _ERRORS * self._measured.error / self._budget
        shortest = max(self._every, math.ceil(ideal - 1e-9))
        now = self._home or self._interval
        if ideal - slack > now:
            return min(shortest, 2 * self._interval, self._longest)
        if ideal + slack < now / 2:
            return max(shortest, math.ceil(now / 2))
        if slack == 0 or (ideal + slack <= now and (ideal - slack >= now / 2 or now == self._every)):
            return now
        return None

    def _compare(self, snapshot: Overlapped) -> None:
        """Compare a snapshot with the baseline steps just before it, as steps may become slower or faster over time."""
        base, _ = typical(list(self._baseline)[-EVIDENCE:]) if self._baseline else (0.0, 0.0)
        if base > 0:
            steps, excess_s = snapshot.steps, snapshot.took_s - snapshot.steps * base
            self._snapshots.append(_Snapshot(steps, excess_s / base, snapshot.stall_s / base))
            self._measure(base)

    def _measure(self, base: float) -> None:
        if min(len(self._snapshots), self._log.baseline) < EVIDENCE:
            return
        _, base_error = typical(self._baseline)
        excess, excess_error = typical([snapshot.excess for snapshot in self._snapshots])
        stall, _ = typical([snapshot.stall for snapshot in self._snapshots])
        error = math.hypot(excess_error, base_error / base * fmean(snapshot.steps for snapshot in self._snapshots))
        full = len(self._snapshots) == len(self._baseline) == WINDOW
        self._measured = self._newest = _Measurement(max(excess, stall), error, full)

    def _forget(self) -> None:
        """Discard the observations so far: they do not apply to what comes."""
        self._snapshots.clear()
        self._log.baseline = 0
        self._log.restart()
        self._measured = None
