"""Makes a `Measured` profile from every rank's recording of its steps and snapshots. Pure.

Snapshots alternate with steps in which none is worked on: one is taken after every baseline step. So both kinds of
steps come from the same minutes, and anything that slows the machine slows both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, stdev

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.interval.measured import Measured
from holdfast.snapshot.interval.samples import Timing

WARM_STEPS = 4
"""Number of first steps that are not recorded: they take longer than later ones."""

LEAST = 4
"""Minimum number of baseline steps, and so of snapshots. If each snapshot overlaps many steps, more steps are recorded
than were requested."""


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


class Alternation:
    """Takes a snapshot after each baseline step, and records the times of steps. Not thread-safe; nothing blocks.

    Every slot is written once before anything is recorded, as memory that was never touched is slow.
    """

    def __init__(self, slots: int) -> None:
        self._warm_snapshots = slots + 1
        self._was_baseline = True
        self._step = 0
        self._taken: list[int] = []
        self.baseline: list[float] = []
        self.overlapped: list[float] = []
        self.stalls: dict[int, float] = {}

    interval = 2
    """Steps between snapshots, if each is protected within a step."""

    overhead: float | None = None

    def takes(self, step: int) -> bool:
        """Whether a snapshot is taken after this step: if it was a baseline step."""
        self._step = step
        if self._was_baseline:
            self._taken.append(step)
        return self._was_baseline

    def observe(self, step_s: float, stall_s: float, overlapped: bool) -> None:
        """Take note of a finished step; see `snapshot.interval.overlap.OverlapLog.observe`."""
        self._was_baseline = not overlapped
        if len(self._taken) <= self._warm_snapshots or self._step < WARM_STEPS:
            return
        if overlapped:
            self.overlapped.append(step_s)
            self.stalls[self._taken[-1]] = self.stalls.get(self._taken[-1], 0.0) + stall_s
        elif self.overlapped:
            self.baseline.append(step_s)

    def wanted(self) -> int:
        """The interval is fixed."""
        return self.interval

    def agree(self, interval: int) -> None:
        """Does nothing: the interval is fixed."""

    def recorded(self) -> int:
        """Number of recorded steps; 0 while a snapshot is in progress, or fewer than `LEAST` were baseline steps."""
        return len(self.baseline) + len(self.overlapped) if self._was_baseline and len(self.baseline) >= LEAST else 0


def merge(parts: Sequence[RankRecording]) -> Measured:
    """The profile of a job: step times are means over the ranks, a snapshot's phases are those of the slowest rank.

    Raises:
        ConfigError: too little was recorded: too few steps, or no snapshot became protected on all ranks.
    """
    first = parts[0].place
    timings = [{timing.step: timing for timing in part.timings} for part in parts]
    common = sorted(
        set.intersection(*(set(part) & set(seen.stalls) for part, seen in zip(timings, parts, strict=True)))
    )
    baseline = [fmean(steps) for steps in zip(*(part.baseline for part in parts), strict=True)]
    overlapped = [fmean(steps) for steps in zip(*(part.overlapped for part in parts), strict=True)]
    if len(baseline) < 2 or len(overlapped) < 2 or not common:
        raise ConfigError(
            f"{len(baseline)} baseline steps, {len(overlapped)} overlapped ones and {len(common)} protected snapshots "
            "were recorded: at least 2, 2 and 1 make a profile; let it run for more steps"
        )

    def slowest(name: str) -> float:
        return fmean(max(getattr(seen[step], name) for seen in timings) for step in common)

    state: dict[str, int] = {}
    for part in parts:
        state[part.place.node] = state.get(part.place.node, 0) + part.place.shard_bytes
    snapshots = len(parts[0].stalls)
    return Measured(
        step_s=fmean(baseline),
        snapshot_step_s=fmean(overlapped),
        stall_s=fmean(max(part.stalls[step] for part in parts) for step in parts[0].stalls),
        copy_s=slowest("copy_s"),
        seal_s=slowest("seal_s"),
        encode_s=slowest("encode_s") if first.parity else 0.0,
        state_bytes=max(state.values()),
        slots=first.slots,
        parity=first.parity,
        data=first.data,
        interval_steps=math.ceil((len(baseline) + len(overlapped)) / snapshots),
        quiet_steps=len(baseline),
        busy_steps=len(overlapped),
        snapshots=snapshots,
        nodes=len(state),
        step_sd_s=stdev(baseline),
        snapshot_step_sd_s=stdev(overlapped),
    )
