"""Which steps of a running job were slowed by which snapshot. Pure: no clock.

Steps during which no snapshot was worked on are *baseline* steps; all others are *overlapped*. A snapshot costs the
extra time of its overlapped steps over as many baseline steps, and at least the time it held up the loop.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.samples import EVIDENCE

STALE_STEPS = 1000
"""Number of steps without a baseline step after which the cost of a snapshot is measured again."""


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The steps that a snapshot overlapped: how many, how long they took, and how long it held up the loop. If not all
    snapshots are encoded, the mean over several snapshots."""

    steps: float
    took_s: float
    stall_s: float


class OverlapLog:
    """Groups overlapped steps by snapshot, and counts steps. Not thread-safe; nothing blocks.

    Attributes:
        in_a_row: number of overlapped steps since the last baseline step.
        baseline: number of baseline steps since the owner last set this to 0.
    """

    def __init__(self, protect_every: int = 1) -> None:
        """`protect_every`: one of this many snapshots is encoded, and costs more than the others. They are reported
        together, or most of its cost would be taken for an outlier."""
        self._together = protect_every
        self._closed: list[tuple[int, float, float]] = []
        self.in_a_row = 0
        self.baseline = 0
        self._open: list[tuple[float, float]] | None = None  # a snapshot's steps; None: its start is unknown

    def observe(self, step_s: float, stall_s: float, overlapped: bool, interval: int) -> Overlapped | None:
        """Take note of a finished step.

        Args:
            step_s: from boundary to boundary, stall included.
            stall_s: how long the loop was held up during the step.
            overlapped: a snapshot was taken at its start, or was copied, sealed or encoded at some time during it.
            interval: steps from one snapshot to the next.

        Returns:
            The steps of a snapshot, or the mean of several reported together, if they are complete now: the next
            snapshot begins, or a baseline step has come.
        """
        if not overlapped:
            self.in_a_row = 0
            self.baseline += 1
            return self._complete()
        self.in_a_row += 1
        if self._open is None:
            return None
        self._open.append((step_s, stall_s))
        return self._complete() if len(self._open) == interval else None

    def starved(self, interval: int) -> bool:
        """Whether there was no baseline step for so long that none will come at this interval: time for a *probe*, a
        longer interval for a while."""
        return self.in_a_row >= max(EVIDENCE, 2 * interval)

    def restart(self) -> None:
        """Snapshots are taken at another interval from now on."""
        self.in_a_row = 0
        self._open = None
        self._closed = []

    def _complete(self) -> Overlapped | None:
        steps, self._open = self._open, []
        if not steps:
            return None
        took_s, stall_s = (sum(column) for column in zip(*steps, strict=True))
        self._closed.append((len(steps), took_s, stall_s))
        if len(self._closed) < self._together:
            return None
        closed, self._closed = self._closed, []
        return Overlapped(*(sum(column) / len(closed) for column in zip(*closed, strict=True)))


def check_budget(budget: float | None) -> float | None:
    """`budget`, a fraction of training time, or None. Raises `ConfigError` if it is not between 0 and 1."""
    if budget is not None and not 0 < budget < 1:
        raise ConfigError(f"overhead budget {budget}: give a fraction between 0 and 1, such as 0.01, or None")
    return budget
