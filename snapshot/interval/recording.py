"""The training process's part in ``holdfast profile``: records what snapshots cost, and ends the job with status 0.

It is requested through the environment; see `holdfast.cli.profile` for the other part. `IntervalRule` then takes a
snapshot after each baseline step, so that both kinds of steps come from the same minutes.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import encode_json
from holdfast.smp_daemon.shared.settings import PROFILE

if TYPE_CHECKING:
    from holdfast.snapshot.collective.agreement import Agreement
    from holdfast.snapshot.step.orders import SnapshotCopy


WARM_STEPS = 4
"""Number of first steps that are not recorded: they take longer than later ones."""

LEAST = 4
"""Minimum number of baseline steps, and so of snapshots. If each snapshot overlaps many steps, more steps are recorded
than were requested."""

PROTECTED_S = 60.0
"""How long to wait for a snapshot to become protected. One that takes longer is not timed."""

LOOK_S = 0.002
"""How often to look whether a snapshot is protected, in seconds."""


@dataclass(frozen=True, slots=True)
class RecordingOrders:
    """What to record.

    Attributes:
        file: where rank 0 writes what all ranks recorded.
        steps: how many steps to record, after the warm-up steps.
    """

    file: str
    steps: int

    def to_environment(self) -> dict[str, str]:
        """The environment variables that make a hook follow these orders."""
        return {PROFILE.variable: json.dumps(asdict(self))}


@dataclass(frozen=True, slots=True)
class Timing:
    """How long the phases of one snapshot took, one after the other, in seconds.

    Attributes:
        step: the snapshot's step.
        copy_s: from the boundary until the whole snapshot is in the slot, including delays by the pace.
        seal_s: from there until it is sealed.
        encode_s: from there until this node knows that it is protected.
    """

    step: int
    copy_s: float
    seal_s: float
    encode_s: float


@dataclass(frozen=True, slots=True)
class Location:
    """Where a rank's snapshots are kept.

    Attributes:
        shard_bytes: size of this rank's shard.
        data, parity: k and m of the node's group; 0 parity: nothing is encoded.
    """

    node: str
    shard_bytes: int
    slots: int
    data: int
    parity: int


@dataclass(slots=True)
class RankRecording:
    """One rank's recording.

    Attributes:
        baseline, overlapped: durations of steps in seconds, in order; the same steps on every rank.
        stalls: by the step of a snapshot, how long it held up the loop.
        timings: timings of the snapshots that became protected.
    """

    place: Location
    baseline: list[float] = field(default_factory=list)
    overlapped: list[float] = field(default_factory=list)
    stalls: dict[int, float] = field(default_factory=dict)
    timings: list[Timing] = field(default_factory=list)


def recording_from_environment(slots: int, outcome: Callable[[SnapshotId], SnapshotOutcome]) -> Recording | None:
    """The recording that was requested, if any. Raises `ConfigError` if the orders are malformed."""
    text = PROFILE.text()
    if not text:
        return None
    try:
        return Recording(RecordingOrders(**json.loads(text)), slots, outcome)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{PROFILE.variable}={text!r} is not what `holdfast profile` sets: {error}") from None


class Recording:
    """Follows the orders on one rank. Called by the hook, in the training thread, except `sealed`.

    Every slot is written once before anything is recorded, as memory that was never touched is slow.
    """

    def __init__(
        self,
        orders: RecordingOrders,
        slots: int,
        outcome: Callable[[SnapshotId], SnapshotOutcome],
    ) -> None:
        """`outcome`: what became of a snapshot, as far as this node knows. Called by a thread of its own."""
        self._orders = orders
        self._warm_snapshots = slots + 1
        self._outcome = outcome
        self._steps = 0
        self._taken: list[int] = []
        self._was_baseline = True
        self.baseline: list[float] = []
        self.overlapped: list[float] = []
        self.stalls: dict[int, float] = {}
        self.timings: list[Timing] = []  # written by the thread until it has ended, read after that
        self._sealed: queue.SimpleQueue[SnapshotCopy | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._time, name="holdfast-profile", daemon=True)
        self._thread.start()

    @property
    def over(self) -> bool:
        """Whether enough was recorded. The same on every rank, since all count the same steps."""
        recorded = len(self.baseline) + len(self.overlapped)
        return self._was_baseline and len(self.baseline) >= LEAST and recorded >= self._orders.steps

    def begun(self, step: int) -> None:
        """A snapshot is taken after this step."""
        self._taken.append(step)

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step; see `SnapshotCost.observe`."""
        self._steps += 1
        self._was_baseline = not overlapped
        if len(self._taken) <= self._warm_snapshots or self._steps < WARM_STEPS:
            return
        if overlapped:
            self.overlapped.append(step_s)
            self.stalls[self._taken[-1]] = self.stalls.get(self._taken[-1], 0.0) + stall_s
        elif self.overlapped:
            self.baseline.append(step_s)

    def sealed(self, copy: SnapshotCopy) -> None:
        """A snapshot is sealed, or was given up. May be called from any thread; returns at once."""
        if copy.error is None and copy.order.due.encode:
            self._sealed.put(copy)

    def close(self, deadline_s: float) -> None:
        """End the thread, after it has timed what is sealed. Blocks. Raises `DeadlineExceeded`."""
        self._sealed.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the thread {self._thread.name} did not end within {deadline_s:.0f} s")

    def write(self, layout: Layout, node: str, coord: str, agreement: Agreement) -> None:
        """Gather what all ranks recorded, and have rank 0 write it. A collective call; blocks.

        Raises:
            ConfigError: the file cannot be written.
        """
        data, parity = layout.code(layout.place(node)[0])
        mine = next(shard.bytes for shard in layout.node(node).shards if shard.coord == coord)
        place = Location(node, mine, layout.slots, data if parity else 0, parity)
        part = RankRecording(place, self.baseline, self.overlapped, self.stalls, self.timings)
        parts = agreement.gather(encode_json(part))
        if agreement.rank == 0:
            try:
                Path(self._orders.file).write_bytes(b"[" + b",".join(parts) + b"]")
            except OSError as error:
                raise ConfigError(f"the profile {self._orders.file} cannot be written: {error}") from error

    def _time(self) -> None:
        while (copy := self._sealed.get()) is not None:
            limit_s = time.monotonic() + PROTECTED_S
            while (outcome := self._outcome(copy.snapshot)) is SnapshotOutcome.PENDING and time.monotonic() < limit_s:
                time.sleep(LOOK_S)
            if outcome is SnapshotOutcome.PROTECTED:
                copy_s, seal_s = copy.filled_s - copy.begun_s, copy.sealed_s - copy.filled_s
                encode_s = max(0.0, time.monotonic() - copy.sealed_s)
                self.timings.append(Timing(copy.snapshot.step, copy_s, seal_s, encode_s))


def leave() -> None:
    """End this process with status 0. Nothing after the script's training loop runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
