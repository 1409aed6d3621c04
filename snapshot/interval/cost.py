"""What a snapshot costs this rank, measured on the job. Pure: no clock.

Steps during which no snapshot was worked on are *baseline* steps; all others are *overlapped*. A snapshot costs the
time of its overlapped steps beyond that of as many baseline steps, which is stall and interference, whether copying,
sealing or encoding cause it; and at least the time it held up the loop.
"""

from __future__ import annotations

from collections import deque
from statistics import median

WINDOW = 16
"""Number of newest samples that count. Of these the median does, so half of them may be outliers, and a lasting change
is followed after eight."""

EVIDENCE = 4
"""Minimum number of samples for a conclusion."""


class SnapshotCost:
    """Compares overlapped steps with baseline steps. Not thread-safe; nothing blocks.

    Attributes:
        step_s: duration of a baseline step in seconds; None as long as it is unknown.
        cost_s: training time that a snapshot takes, in seconds; None as long as it is unknown.
    """

    def __init__(self) -> None:
        self.step_s: float | None = None
        self.cost_s: float | None = None
        self._baseline: deque[float] = deque(maxlen=WINDOW)
        self._excess: deque[float] = deque(maxlen=WINDOW)
        self._stalls: deque[float] = deque(maxlen=WINDOW)
        self._clear()

    def begun(self, encodes: bool) -> None:
        """A snapshot begins. If it is to be encoded, those before it are a sample: their cost is shared out equally, as
        otherwise that of encoding one in several would be taken for an outlier."""
        if encodes:
            if self._steps and self._snapshots and self._baseline:
                self._excess.append((self._took_s - self._steps * median(self._baseline)) / self._snapshots)
                self._stalls.append(self._stalled_s / self._snapshots)
            if len(self._excess) >= EVIDENCE:
                self.cost_s = max(0.0, median(self._excess), median(self._stalls))
            self._clear()
        self._snapshots += 1

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step.

        Args:
            step_s: from boundary to boundary, stall included.
            stall_s: how long the loop was held up during the step.
            overlapped: a snapshot was taken at its start, or was copied, sealed or encoded at some time during it.
        """
        if overlapped:
            self._steps += 1
            self._took_s += step_s
            self._stalled_s += stall_s
        else:
            self._baseline.append(step_s)
            if len(self._baseline) >= EVIDENCE:
                self.step_s = median(self._baseline)

    def _clear(self) -> None:
        self._snapshots = self._steps = 0
        self._took_s = self._stalled_s = 0.0
