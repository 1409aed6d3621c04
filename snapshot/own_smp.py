"""This node's SMP, as one trainer has it: reached, reached again once it has died, and let go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.starts import WELL, TrainerEnd, failure_text
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.connect import connect, start_here

ATTACH_DEADLINE_S = 5.0
LEAST_PAUSE_S = 10.0
MOST_PAUSE_S = 600.0
"""After how long an SMP that did not answer is asked again by the training thread: each time twice as long."""

log = get_log(__name__)


class OwnSmp:
    """Two connections to one SMP.

    Args:
        start: whether one is started where none runs.

    Attributes:
        client: the training thread's, and while a copy is under way the copying thread's. The SMP watches over it.
        sealing: the sealing thread's, which waits for digests.

    Raises:
        SmpUnavailable, ConfigError: see `connect`.
    """

    def __init__(
        self,
        arena: Path,
        job: str,
        coord: str,
        *,
        start: bool,
        now: Callable[[], float] | None = None,
        system: System = MACHINE,
    ) -> None:
        self._arena, self._job, self._coord = arena, job, coord
        self._start = start
        self._now = now or system.monotonic
        self._pause_s = LEAST_PAUSE_S
        self._not_before_s = 0.0
        self._system = system
        self.client = connect(arena, job, start=start, coord=coord, system=system)
        self.sealing = SmpClient(arena, job, system=system)

    def another(self) -> SmpClient:
        """One more connection, for whoever must not wait for these."""
        return SmpClient(self._arena, self._job, system=self._system)

    def attach(self, epoch: int, idle: Callable[[], None]) -> None:
        """See that it is there, and in this epoch.

        The training thread calls this: it waits for one that does not answer but `ATTACH_DEADLINE_S`, and does not ask
        it again for a while, which grows.

        Args:
            idle: blocks until no other thread uses the connections. Called if it went away.

        Raises:
            SmpUnavailable: it is not, and no other could be started.
        """
        if self._now() < self._not_before_s:
            raise SmpUnavailable("the SMP of this node did not answer, and is asked again later")
        try:
            self.client.join(epoch, deadline_s=ATTACH_DEADLINE_S)
        except SmpUnavailable:
            idle()
            try:
                self.attach_again(epoch, None, ATTACH_DEADLINE_S)
            except DeadlineExceeded as error:
                raise self._put_off(error) from error
            except ConfigError as error:  # another's, or of another version: training goes on without it
                raise SmpUnavailable(str(error)) from error
        except DeadlineExceeded as error:
            raise self._put_off(error) from error
        self._pause_s = LEAST_PAUSE_S

    def _put_off(self, error: DeadlineExceeded) -> SmpUnavailable:
        pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MOST_PAUSE_S)
        self._not_before_s = self._now() + pause_s
        return SmpUnavailable(f"the SMP of this node does not answer, and is asked again in {pause_s:.0f} s: {error}")

    def attach_again(self, epoch: int, layout: Layout | None, deadline_s: float = CALL_DEADLINE_S) -> None:
        """It went away, and with it what it had not sealed. Go on with its successor, or start one.

        No other thread uses the connections. Raises `SmpUnavailable`; and `DeadlineExceeded` if one is there and does
        not answer in `deadline_s`.
        """
        self._find(deadline_s)
        self.sealing.reconnect(deadline_s)
        self.client.join(epoch, deadline_s=deadline_s)
        if layout is not None:
            self.client.configure(layout, wait=False)

    def _find(self, deadline_s: float = CALL_DEADLINE_S) -> None:
        try:
            self.client.reconnect(deadline_s)
        except SmpUnavailable:
            if not self._start:
                raise
            start_here(self._arena, self._job)
            self.client.reconnect(deadline_s)

    def finish(self, epoch: int) -> None:
        """The job is done: it ends, and its memory is free. Raises `HoldfastError`."""
        try:
            self.client.join(epoch)  # ranks that lost each other may be in different ones
            self.client.finish(epoch)
        except SmpUnavailable as error:  # it was killed meanwhile: its successor cleans up
            log.info("the job is finished by another SMP: %s", error)
            self._find()
            self.client.join(epoch)
            self.client.finish(epoch)

    def say_end(self, step: int, error: BaseException | None) -> None:
        """Have it keep how the job ended here, for its next start. Never raises."""
        try:
            self.client.ended(self._coord, TrainerEnd(step, failure_text(error) if error is not None else WELL))
        except HoldfastError as problem:
            log.warning("could not tell this node's SMP how the job ended: %s", problem)

    def close(self) -> None:
        """Close both connections. The SMP stays."""
        self.sealing.close()
        self.client.close()
