"""Simulates a job from failure to failure, with a heap of events in virtual time, and accounts for every second.

A job trains until something fails. Then it is *detecting*, *waiting* if a place has no machine, *recovering* (new
processes on all nodes, then loading), and trains again from the newest step that can be restored. A failure during
these phases starts them again. A failure at a place without a machine has no effect, and processes cannot die while
none run.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum

from benchmarks.fleet.copies import Copies
from benchmarks.fleet.failures import Failure
from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.progress import Timeline
from benchmarks.fleet.strategies import Design
from holdfast.smp_daemon.shared.errors import ConfigError


class JobPhase(Enum):
    """What a job is doing at a moment."""

    TRAINING = "training"
    DETECTING = "detecting"
    WAITING = "waiting"
    RECOVERING = "recovering"


@dataclass(slots=True)
class FleetOutcome:
    """The result of a run. The five times from `useful_s` to `waiting_s` add up to `wall_s`.

    Attributes:
        steps: number of steps done at the end, without lost ones.
        useful_s: time in steps that were kept.
        save_s: time in saves.
        lost_s: time in steps that were lost, or not finished.
        recovery_s: time to detect failures, start processes and load.
        waiting_s: time spent waiting for machines.
        lost_steps: number of steps that had to be done again.
        failures: number of failures that had an effect, by kind.
        restores: number of restores, by what was loaded: ``sealed``, ``protected``, ``persisted`` or the ``start``.
        beyond: how often all copies in memory were lost.
        longest_s: the longest time without training.
    """

    wall_s: float
    steps: int = 0
    useful_s: float = 0.0
    save_s: float = 0.0
    lost_s: float = 0.0
    recovery_s: float = 0.0
    waiting_s: float = 0.0
    lost_steps: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    restores: Counter[str] = field(default_factory=Counter)
    beyond: int = 0
    longest_s: float = 0.0

    @property
    def ettr(self) -> float:
        """Effective training time ratio: useful time over all time."""
        return self.useful_s / self.wall_s


class Machines:
    """The machines at the job's places, and the spares. A repaired machine takes the place that has waited longest for
    one, or becomes a spare.

    Attributes:
        empty: places without a machine.
        spares: number of spare machines.
    """

    def __init__(self, spares: int) -> None:
        self.empty: set[int] = set()
        self.spares = spares
        self._waiting: deque[int] = deque()

    def breaks(self, place: int) -> bool:
        """Record that the machine at `place` is gone. Returns whether a spare replaces it; if not, the place waits."""
        self.empty.add(place)
        if self.spares:
            self.spares -= 1
            return True
        self._waiting.append(place)
        return False

    def repaired(self) -> int | None:
        """Record that a machine is repaired. Returns the place that it takes; None if no place waits."""
        if self._waiting:
            return self._waiting.popleft()
        self.spares += 1
        return None

    def arrives(self, place: int) -> None:
        """Record that `place` has a machine again."""
        self.empty.remove(place)


def simulate(job: FleetJob, site: Site, design: Design, failures: Iterable[Failure], seconds: float) -> FleetOutcome:
    """Run a job for `seconds` of virtual time.

    Args:
        failures: the failures, ordered by time.

    Raises:
        ConfigError: there is no time to simulate, or a failure hits a node that the job does not have.
    """
    if not 0 < seconds < math.inf:
        raise ConfigError(f"{seconds} s to simulate: use more than 0")
    return _Course(job, site, design, seconds).to_the_end(failures)


class _Course:
    def __init__(self, job: FleetJob, site: Site, design: Design, seconds: float) -> None:
        self.job, self.site, self.design = job, site, design
        self.pace = Timeline(job.step_s, design.saves)
        self.copies = Copies(design.groups)
        self.machines = Machines(site.spares)
        self.outcome = FleetOutcome(seconds)
        self.events: list[tuple[float, int, str, tuple[int, ...]]] = []
        self.order = 0
        self.phase = JobPhase.TRAINING
        self.since_s = self.stopped_s = 0.0
        self.first = self.step = 0
        self.attempt = 0
        self.moved = False
        self.loading = ("start", 0)
        self.on: dict[str, Callable[..., None]] = {
            "detected": self._on_detected,
            "arrived": self._on_arrived,
            "repaired": self._on_repaired,
            "missing": self._on_missing,
            "whole": self._on_protected,
            "restored": self._on_restored,
        }

    def to_the_end(self, failures: Iterable[Failure]) -> FleetOutcome:
        wall_s = self.outcome.wall_s
        for failure in failures:
            if failure.at_s >= wall_s:
                break
            if not all(0 <= node < self.job.nodes for node in failure.nodes):
                raise ConfigError(f"{failure} hits a node that does not exist: the job has {self.job.nodes} nodes")
            self._until(failure.at_s)
            self._fail(failure)
        self._until(wall_s)
        if self.phase is JobPhase.TRAINING:
            self._stop(wall_s)
        else:
            self._enter(self.phase, wall_s)
            self.outcome.longest_s = max(self.outcome.longest_s, wall_s - self.stopped_s)
            self._roll_back(self.copies.best()[1])
        self.outcome.steps, self.outcome.beyond = self.step, self.copies.beyond
        return self.outcome

    def _until(self, limit_s: float) -> None:
        while self.events and self.events[0][0] <= limit_s:
            now_s, _, event, about = heapq.heappop(self.events)
            self.on[event](now_s, *about)

    def _at(self, when_s: float, event: str, *about: int) -> None:
        if when_s < math.inf:
            self.order += 1
            heapq.heappush(self.events, (when_s, self.order, event, about))

    def _fail(self, failure: Failure) -> None:
        now_s = failure.at_s
        nodes = [node for node in failure.nodes if node not in self.machines.empty]
        if not nodes or (failure.kind == "process" and self.phase is JobPhase.WAITING):
            return
        self.outcome.failures[failure.kind] += 1
        if self.phase is JobPhase.TRAINING:
            self._stop(now_s)
            self.stopped_s = now_s
        self._enter(JobPhase.DETECTING, now_s)
        self.attempt += 1
        detected_s = now_s + self.job.detect_s
        self._at(detected_s, "detected", self.attempt)
        if failure.kind in ("memory", "shock"):
            self.copies.lose(nodes, now_s)
        if failure.kind != "process":
            for node in nodes:
                if self.machines.breaks(node):
                    self._at(detected_s + self.site.replace_s, "arrived", node)
                self._at(now_s + self.site.repair_s, "repaired")

    def _stop(self, now_s: float) -> None:
        """End a stretch of training, and account for its time."""
        elapsed = now_s - self.since_s
        spent = self.pace.spent(self.first, elapsed)
        self.copies.trained(self.pace, self.first, self.since_s, now_s)
        self.step = self.first + spent.steps
        self.outcome.useful_s += spent.steps * self.job.step_s
        self.outcome.save_s += spent.stall_s
        self.outcome.lost_s += spent.unfinished_s
        self.since_s = now_s

    def _enter(self, phase: JobPhase, now_s: float) -> None:
        """Enter `phase`, and account for the time of the phase that ends, unless it was training."""
        passed = now_s - self.since_s
        if self.phase is JobPhase.WAITING:
            self.outcome.waiting_s += passed
        elif self.phase is not JobPhase.TRAINING:
            self.outcome.recovery_s += passed
        self.phase, self.since_s = phase, now_s

    def _roll_back(self, step: int) -> None:
        lost = self.step - step
        self.outcome.lost_steps += lost
        self.outcome.useful_s -= lost * self.job.step_s
        self.outcome.lost_s += lost * self.job.step_s
        self.step = step

    def _recover(self, now_s: float) -> None:
        self._enter(JobPhase.RECOVERING, now_s)
        self.loading = self.copies.best()
        source = "protected" if self.loading[0] == "sealed" and self.moved else self.loading[0]
        self._at(now_s + self.job.restart_s + self.design.load_s[source], "restored", self.attempt)

    def _on_detected(self, now_s: float, attempt: int) -> None:
        if attempt != self.attempt:
            return
        if not self.machines.empty:
            self._recover(now_s)
            return
        self._enter(JobPhase.WAITING, now_s)
        for node, ticket in self.copies.degraded.items():
            self._at(now_s + self.design.regroup_after_s, "missing", node, ticket)

    def _on_arrived(self, now_s: float, node: int) -> None:
        self.machines.arrives(node)
        self.moved = True
        if self.phase is JobPhase.WAITING and not self.machines.empty:
            self._recover(now_s)

    def _on_repaired(self, now_s: float) -> None:
        place = self.machines.repaired()
        if place is not None:
            self._at(now_s + self.site.replace_s, "arrived", place)

    def _on_missing(self, now_s: float, node: int, ticket: int) -> None:
        """The other nodes have waited long enough for this one: they regroup without it."""
        if self.phase is JobPhase.WAITING and self.copies.is_open(node, ticket):
            self._at(now_s + self.design.regroup_s, "whole", node, ticket)

    def _on_protected(self, now_s: float, node: int, ticket: int) -> None:
        self.copies.repaired(node, ticket)

    def _on_restored(self, now_s: float, attempt: int) -> None:
        if attempt != self.attempt:
            return
        self._enter(JobPhase.TRAINING, now_s)
        source, step = self.loading
        self.outcome.restores[source] += 1
        self.outcome.longest_s = max(self.outcome.longest_s, now_s - self.stopped_s)
        self._roll_back(step)
        self.copies.restored(source, step)
        self.first, self.moved = step, False
        for node, ticket in self.copies.degraded.items():
            self._at(now_s + self.design.group_repair_s, "whole", node, ticket)
