"""Recoveries as seen from this node: how long it took from the first loss to the first new step, and each part of it.

The SMP needs no reports for this: it learns how each trainer ends, whether it was killed or left by an exception, such
as one of gloo or NCCL, and since when a peer is silent; every epoch begins with `join`; trainers ask it for every shard
or unit that they restore; and their heartbeats count steps. An epoch in which nothing is restored, such as a job's
first, is not a recovery. A start that ends before its first step is a part of the recovery that it was to be.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from holdfast.smp_daemon.shared.layout import SnapshotId

KEPT = 4
"""Number of finished recoveries that are remembered."""

SPANS = (
    ("detect", "lost", "ended"),
    ("restart", "ended", "joined"),
    ("load", "joined", "restored"),
    ("first step", "restored", "stepped"),
)
"""(name, from, to): the parts of a recovery, each between two moments of `Recovery`."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """One recovery on one node. Moments are seconds of its monotonic clock; 0: not yet, or never seen.

    Attributes:
        epoch: the epoch that began with it. `step`: the step that it went back to; -1: nothing was restored yet.
        lost: when the first of this node's trainers ended, but for one that ended well; or when a node of the group was
            last heard of, if one was silent by then. 0 on a node that was not there, or lost no trainer.
        ended: when the last of this node's trainers ended. `coords`: the trainers that ended here.
        joined: when the trainers of the new epoch came.
        restored: when the last of this node's shards was available, or, later, in its trainer's memory.
        stepped: when the first of this node's trainers had finished a step.
        protected: when a snapshot of the new epoch was protected.
        how: how each coordinate's shard was recovered: see `smp_daemon.shared.messages.Recovered`, or
            ``resharded`` from units.
        bytes_fetched: bytes fetched from other nodes, for all shards.
    """

    epoch: int
    joined: float
    lost: float = 0.0
    ended: float = 0.0
    coords: tuple[str, ...] = ()
    step: int = -1
    restored: float = 0.0
    stepped: float = 0.0
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
        """The sum of `spans`: seconds from the first loss, if it was seen here, to the first new step."""
        return sum(seconds for _, seconds in self.spans)

    @property
    def protect_s(self) -> float | None:
        """Seconds from the first new step until a snapshot was protected; None: not yet."""
        return max(0.0, self.protected - self.stepped) if self.protected and self.stepped else None


class Recoveries:
    """The last `KEPT` recoveries of this node, and the current one. Thread-safe; no call blocks."""

    def __init__(self, monotonic: Callable[[], float], silent_s: Callable[[], float] = lambda: 0.0) -> None:
        """`silent_s`: for how long the peer of this node that is silent longest has been, in seconds; 0: none is."""
        self._monotonic = monotonic
        self._silent_s = silent_s
        # Guards all fields below. Connection threads and the watchdog's thread hold it for moments, some with the
        # store's lock held, and take no other lock while they hold it.
        self._lock = threading.Lock()
        self._ends: dict[str, float] = {}
        self._silent = 0.0  # since when a peer was silent as the first trainer ended; 0: none was
        self._done: deque[Recovery] = deque(maxlen=KEPT)
        self._now: Recovery | None = None

    def lost(self, coord: str) -> None:
        """Note that a trainer of the current epoch has ended otherwise than well. `silent_s` is called."""
        now, silent_s = self._monotonic(), self._silent_s()
        with self._lock:
            if not self._ends:
                self._silent = now - silent_s if silent_s else 0.0
            self._ends.setdefault(coord, now)

    def goes_on(self, coord: str) -> None:
        """Note that a trainer of the current epoch lives: only its connection had ended."""
        with self._lock:
            self._ends.pop(coord, None)

    def joined(self, epoch: int) -> None:
        """Note that a newer epoch has begun."""
        with self._lock:
            before = self._now
            moments = sorted(self._ends.values()) or [0.0]
            lost, coords = self._silent or moments[0], tuple(sorted(self._ends))
            found = Recovery(epoch, self._monotonic(), lost=lost, ended=moments[-1], coords=coords)
            if before is not None and before.stepped and before.restored:
                self._done.append(before)
            elif before is not None and not before.stepped and before.lost:  # what went on then goes on now
                coords = tuple(sorted({*before.coords, *found.coords}))
                found = replace(found, lost=before.lost, ended=before.ended, coords=coords)
            self._now, self._silent = found, 0.0
            self._ends.clear()

    def restored(self, epoch: int, snapshot: SnapshotId, coord: str, how: str, bytes_fetched: int) -> None:
        """Note that a shard, or a unit of one, is available for the trainers of `epoch`."""
        with self._lock:
            now = self._now
            if now is None or now.epoch > epoch:
                return
            self._now = replace(
                now,
                step=snapshot.step,
                restored=self._monotonic(),
                how=(*(each for each in now.how if each[0] != coord), (coord, how)),
                bytes_fetched=now.bytes_fetched + bytes_fetched,
            )

    def trains(self, step: int) -> None:
        """Note that a trainer has finished so many steps; as many as were restored, once it has loaded them."""
        with self._lock:
            if self._now is not None:
                self._trains(self._now, step)

    def sealed(self, snapshot: SnapshotId) -> None:
        """Note that all shards of this node are sealed, so a step was finished, whoever has seen it."""
        with self._lock:
            if self._now is not None and self._now.epoch == snapshot.epoch:
                self._trains(self._now, snapshot.step)

    def protected(self, snapshot: SnapshotId) -> None:
        """Note that this node's group has committed all parity of a snapshot."""
        with self._lock:
            if self._now is not None and self._now.epoch == snapshot.epoch and not self._now.protected:
                self._now = replace(self._now, protected=self._monotonic())

    def _trains(self, now: Recovery, step: int) -> None:
        if now.stepped or step < max(1, now.step):
            return
        loaded = step == now.step
        self._now = replace(now, restored=self._monotonic()) if loaded else replace(now, stepped=self._monotonic())

    def last(self) -> list[Recovery]:
        """The recoveries, newest first; the current one counts once a shard is restored."""
        with self._lock:
            now = [self._now] if self._now is not None and self._now.restored else []
            return [*now, *reversed(self._done)]


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
                "done": all(each.stepped for _, each in of),
                "protect_s": _longest([each.protect_s for _, each in of]),
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


def _longest(seconds: list[float | None]) -> float | None:
    """The longest of these, rounded; None if one is not known yet."""
    known = [each for each in seconds if each is not None]
    return round(max(known), 3) if len(known) == len(seconds) else None
