"""This node's SMP, as one trainer has it: reached, reached again once it has died, and let go."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from smp_daemon.client import SmpClient
from smp_daemon.errors import HoldfastError, SmpUnavailable
from smp_daemon.layout import Layout
from smp_daemon.logs import get_log
from smp_daemon.starts import WELL, End, failure_text
from snapshot.connect import connect, start_here

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

    def __init__(self, arena: Path, job: str, coord: str, *, start: bool) -> None:
        self._arena, self._job, self._coord = arena, job, coord
        self._start = start
        self.client = connect(arena, job, start=start, coord=coord)
        self.sealing = SmpClient(arena, job)

    def another(self) -> SmpClient:
        """One more connection, for whoever must not wait for these."""
        return SmpClient(self._arena, self._job)

    def attach(self, epoch: int, idle: Callable[[], None]) -> None:
        """See that it is there, and in this epoch.

        Args:
            idle: blocks until no other thread uses the connections. Called if it went away.

        Raises:
            SmpUnavailable: it is not, and no other could be started.
        """
        try:
            self.client.join(epoch)
        except SmpUnavailable:
            idle()
            self.attach_again(epoch, None)

    def attach_again(self, epoch: int, layout: Layout | None) -> None:
        """It went away, and with it what it had not sealed. Go on with its successor, or start one.

        No other thread uses the connections. Raises `SmpUnavailable`.
        """
        self._find()
        self.sealing.reconnect()
        self.client.join(epoch)
        if layout is not None:
            self.client.configure(layout)

    def _find(self) -> None:
        try:
            self.client.reconnect()
        except SmpUnavailable:
            if not self._start:
                raise
            start_here(self._arena, self._job)
            self.client.reconnect()

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
            self.client.ended(self._coord, End(step, failure_text(error) if error is not None else WELL))
        except HoldfastError as problem:
            log.warning("the SMP of this node does not hear how the job ends: %s", problem)

    def close(self) -> None:
        """Close both connections. The SMP stays."""
        self.sealing.close()
        self.client.close()
