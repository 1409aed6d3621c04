"""Recoveries as seen from this node: when its trainers were lost, and how long each part of the recovery took.

The SMP needs no reports from trainers: it learns at once that a trainer's process has ended, every epoch begins with
`join`, trainers ask it for every shard or unit that they restore, and the first protected snapshot ends the recovery.
An epoch in which nothing is restored, such as a job's first, is not a recovery.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.smp_daemon.shared.layout import SnapshotId

KEPT = 4
"""Number of finished recoveries that are remembered."""

SPANS = (
    ("restart", "lost", "joined"),
    ("restore", "joined", "restored"),
    ("first snapshot", "restored", "sealed"),
    ("protect", "sealed", "protected"),
)
"""(name, from, to): the parts of a recovery, each between two moments of `Recovery`."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery on one node. Moments are seconds since 1970 by this node's clock; 0: not yet, or never seen.

    Attributes:
        epoch: the epoch that began with it. `step`: the step that it went back to; -1: nothing was restored yet.
        lost: when the first of this node's trainers was lost; 0 on a node that was not there, or lost no trainer.
        coords: the trainers lost here, as far as this SMP saw.
        joined: when the trainers of the new epoch came.
        restored: when the last of this node's shards was available.
        sealed, protected: when the first snapshot of the new epoch was sealed, and protected.
        how: how each coordinate's shard was recovered: see `smp_daemon.recovery.rebuild.RecoveredSlot`, or
            ``resharded`` from units.
        bytes_fetched: bytes fetched from other nodes, for all shards.
    """

    epoch: int
    joined: float
    lost: float = 0.0
    coords: tuple[str, ...] = ()
    step: int = -1
    restored: float = 0.0
    sealed: float = 0.0
    protected: float = 0.0
    how: tuple[tuple[str, str], ...] = ()
    bytes_fetched: int = 0

    @property
    def spans(self) -> list[tuple[str, float]]:
        """The parts finished so far, and how many seconds each took."""
        found = []
        for name, start, end in SPANS:
            began, ended = getattr(self, start), getattr(self, end)
            if began and ended:
                found.append((name, max(0.0, ended - began)))
        return found

    @property
    def seconds(self) -> float:
        """The sum of `spans`: seconds from the loss, if it was seen here, to the latest moment."""
        return sum(seconds for _, seconds in self.spans)


class Recoveries:
    """The last `KEPT` recoveries of this node, and the current one. Thread-safe; no call blocks."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        # Guards all fields below. Connection threads and the watchdog's thread hold it for moments, some with the
        # store's lock held, and take no other lock while they hold it.
        self._lock = threading.Lock()
        self._lost: dict[str, float] = {}
        self._done: deque[Recovery] = deque(maxlen=KEPT)
        self._now: Recovery | None = None

    def lost(self, coord: str) -> None:
        """Note that a trainer has died."""
        with self._lock:
            self._lost.setdefault(coord, self._clock())

    def joined(self, epoch: int) -> None:
        """Note that a newer epoch has begun."""
        with self._lock:
            self._keep()
            first = min(self._lost.values(), default=0.0)
            self._now = Recovery(epoch, self._clock(), lost=first, coords=tuple(sorted(self._lost)))
            self._lost.clear()

    def restored(self, epoch: int, snapshot: SnapshotId, coord: str, how: str, bytes_fetched: int) -> None:
        """Note that a shard, or a unit of one, is available for the trainers of `epoch`."""
        with self._lock:
            now = self._now
            if now is None or now.epoch > epoch:
                return
            self._now = replace(
                now,
                step=snapshot.step,
                restored=self._clock(),
                how=(*(each for each in now.how if each[0] != coord), (coord, how)),
                bytes_fetched=now.bytes_fetched + bytes_fetched,
            )

    def sealed(self, snapshot: SnapshotId) -> None:
        """Note that all shards of this node are sealed."""
        with self._lock:
            if self._now is not None and self._now.epoch == snapshot.epoch and not self._now.sealed:
                self._now = replace(self._now, sealed=self._clock())

    def protected(self, snapshot: SnapshotId) -> None:
        """Note that this node's group has committed all parity of a snapshot."""
        with self._lock:
            if self._now is not None and self._now.epoch == snapshot.epoch and not self._now.protected:
                self._now = replace(self._now, protected=self._clock())

    def last(self) -> list[Recovery]:
        """The recoveries, newest first; the current one counts once a shard is restored."""
        with self._lock:
            now = [self._now] if self._now is not None and self._now.restored else []
            return [*now, *reversed(self._done)]

    def _keep(self) -> None:
        if self._now is not None and self._now.restored:
            self._done.append(self._now)


def summarise(recoveries: dict[str, list[Recovery]], most: int = KEPT, nodes: int = 8) -> list[dict[str, Any]]:
    """The newest `most` recoveries of a whole job, by epoch, newest first, summarised from those of its nodes.

    Each summary lists the `nodes` nodes that took longest, and says how many others there were.
    """
    epochs = sorted({each.epoch for found in recoveries.values() for each in found}, reverse=True)[:most]
    summary = []
    for epoch in epochs:
        of = [(node, each) for node, found in sorted(recoveries.items()) for each in found if each.epoch == epoch]
        # Sorted by the rounded values that are shown; otherwise the page could show a longer time below a shorter one.
        of.sort(key=lambda pair: -sum(round(seconds, 3) for _, seconds in pair[1].spans))
        summary.append(
            {
                "epoch": epoch,
                "step": max(each.step for _, each in of),
                "seconds": round(of[0][1].seconds, 3),
                "done": all(each.protected for _, each in of),
                "bytes_fetched": sum(each.bytes_fetched for _, each in of),
                "others": max(0, len(of) - nodes),
                "nodes": [
                    {
                        "node": node,
                        "lost": each.coords,
                        "how": sorted({how for _, how in each.how}),
                        "bytes_fetched": each.bytes_fetched,
                        "spans": [[name, round(seconds, 3)] for name, seconds in each.spans],
                    }
                    for node, each in of[:nodes]
                ],
            }
        )
    return summary
