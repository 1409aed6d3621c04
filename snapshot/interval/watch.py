"""A thread that times how long copying, sealing and encoding snapshots takes, and tells the SMP what operators should
know.

It waits on its own connection to the SMP, so that neither the training loop nor the copy threads have to wait.
"""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Callable

from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.interval.samples import Timing
from holdfast.snapshot.step.copier import CopyJob

AWAIT_DEADLINE_S = 60.0
"""How long the thread waits for a snapshot to become protected. A snapshot that takes longer is not timed."""

SLICE_S = 0.5
"""How long the thread waits before it checks whether it should end."""

log = get_log(__name__)


class Watch:
    """Times snapshots. `sealed` and `say` may be called from any thread, all else by the training thread only."""

    def __init__(self, connect: Callable[[], SmpClient], system: System = MACHINE) -> None:
        """`connect`: opens a connection to this node's SMP; called in the watching thread, again if the SMP goes
        away."""
        self._connect = connect
        self._monotonic = system.monotonic
        self._client: SmpClient | None = None  # used by the watching thread only
        self._hurry = system.Event()
        self._jobs: queue.SimpleQueue[CopyJob | str | None] = system.SimpleQueue()
        self._timings: deque[Timing] = deque()  # the watching thread adds, the training thread takes; no lock needed
        self._thread = system.Thread(target=self._run, name="holdfast-watch", daemon=True)
        self._thread.start()

    def sealed(self, job: CopyJob) -> None:
        """A snapshot is sealed, or was given up. Returns at once. Only sealed snapshots that are encoded are timed."""
        if job.error is None and job.encode:
            self._jobs.put(job)

    def say(self, text: str) -> None:
        """Have the SMP show this text to operators. Returns at once."""
        self._jobs.put(text)

    def take(self) -> list[Timing]:
        """The timings since the last call. Never blocks."""
        return [self._timings.popleft() for _ in range(len(self._timings))]

    def close(self, deadline_s: float, *, wait: bool) -> None:
        """End the thread; blocks. With `wait`, snapshots still to be timed are timed first. Raises
        `DeadlineExceeded`."""
        if not wait:
            self._hurry.set()
        self._jobs.put(None)
        self._thread.join(deadline_s)
        if self._thread.is_alive():
            raise DeadlineExceeded(f"the thread {self._thread.name} did not end within {deadline_s:.0f} s")

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                if self._client is None:
                    self._client = self._connect()
                if isinstance(job, str):
                    self._client.say(job)
                else:
                    self._time(self._client, job)
            except HoldfastError as error:
                log.info("%s: %s", "not said" if isinstance(job, str) else f"{job.snapshot} is not timed", error)
                self._hang_up()
        self._hang_up()

    def _time(self, client: SmpClient, job: CopyJob) -> None:
        limit_s = self._monotonic() + AWAIT_DEADLINE_S
        outcome, over_s = SnapshotOutcome.PENDING, 0.0
        while outcome is SnapshotOutcome.PENDING and over_s < limit_s and not self._hurry.is_set():
            outcome = client.await_outcome(job.snapshot, SLICE_S)
            over_s = self._monotonic()
        if outcome is not SnapshotOutcome.PROTECTED:
            return
        self._timings.append(
            Timing(
                job.snapshot.step,
                job.filled_s - job.begun_s,
                job.sealed_s - job.filled_s,
                max(0.0, over_s - job.sealed_s),
            )
        )

    def _hang_up(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None
