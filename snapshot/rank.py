"""One rank of a job: how far it is, and its connections to the others and to its SMP."""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Callable, Collection
from contextlib import ExitStack, closing
from pathlib import Path
from types import FrameType
from typing import Any

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable, failure_of
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.settings import LEAVE_ON
from holdfast.smp_daemon.shared.spawn import START_DEADLINE_S
from holdfast.smp_daemon.shared.starts import WELL, TrainerEnd, failure_text
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.snapshot.collective.agreement import default_agreement
from holdfast.snapshot.connect import connect, start_here, warn_of_stale_store
from holdfast.snapshot.copy.devices import DeviceEngines, numa_node
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.options import Options
from holdfast.snapshot.progress import RankProgress
from holdfast.snapshot.resume.arrange import parse_domains
from holdfast.snapshot.state.adapter import Adapter


class Rank:
    """Making one is a collective call. It blocks until this node's SMP answers, and starts it if that is allowed.

    Attributes:
        coord: its coordinate. domains: the failure domains of its node. progress: how far it is.
        agreement: collectives with the other ranks. Used by the training thread; any thread may call results of
            `minimum`.
        smp: this node's SMP. engine: copies between live tensors and slots. system: threads, clock, files, sockets.

    Raises:
        ConfigError, SmpUnavailable: see `parse_domains`, `OwnSmp`.
    """

    def __init__(self, adapter: Adapter, options: Options, system: System = MACHINE) -> None:
        self.system = system
        self.progress = RankProgress()
        with ExitStack() as undo:  # if anything fails, the other ranks must not wait for this one
            self.agreement = undo.enter_context(closing(default_agreement()))
            if self.agreement.rank == 0:
                warn_of_stale_store()
            self.coord = adapter.coordinate()
            self.domains = parse_domains(options.domains, self.coord)
            self.smp = OwnSmp(options.job_arena, options.job, self.coord, start=options.start, system=system)
            undo.callback(self.smp.close)
            devices = {item.tensor.device for item in adapter.tensors()}
            self.engine: CopyEngine = DeviceEngines(devices)
            self.client.near = numa_node(devices)
            self._notice = Notice(LEAVE_ON.value())
            undo.pop_all()

    @property
    def client(self) -> SmpClient:
        """The connection to the SMP that the training thread uses, and the copy thread while a copy runs."""
        return self.smp.client

    @property
    def leaves(self) -> bool:
        """Whether this process or its SMP was told that this node is to be taken away."""
        return self._notice.given or self.client.board.leaving

    def heartbeat(self) -> None:
        """Tell the SMP that this process is alive, and where it is."""
        self.client.heartbeat(self.progress.phase, self.progress.step)

    def close(self) -> None:
        """Release everything. No collective call; the SMP stays.

        Raises:
            DeadlineExceeded: a device still writes to a slot. The SMP is not told, as it would give the slot to others.
        """
        self._notice.withdraw()
        self.engine.close()
        self.smp.close()
        self.agreement.close()


log = get_log(__name__)


class Notice:
    """Hears signals that say that this node is to be taken away, until `withdraw`. One that comes a second time does
    what it did before.

    Attributes:
        given: whether one has come.

    Raises:
        ConfigError: there are signals to hear, and this is not the main thread, which alone may.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        if signals and threading.current_thread() is not threading.main_thread():
            raise ConfigError(f"{LEAVE_ON.variable} needs a hook that is entered in the main thread: enter it there")
        self.given = False
        self._before: dict[int, Any] = {number: signal.signal(number, self._hear) for number in signals}

    def _hear(self, number: int, frame: FrameType | None) -> None:
        self.given = True
        self._put_back(number)
        log.warning("%s: the job ends at a boundary, as this node is to be taken away", signal.Signals(number).name)

    def _put_back(self, number: int) -> None:
        if signal.getsignal(number) == self._hear:  # somebody may have set another one meanwhile
            signal.signal(number, self._before[number] or signal.SIG_DFL)

    def withdraw(self) -> None:
        """Hear nothing more. May be repeated, in the main thread only."""
        for number in self._before:
            self._put_back(number)


ATTACH_DEADLINE_S = 5.0
LEAST_PAUSE_S = 10.0
MOST_PAUSE_S = 600.0
"""How long the training thread waits before it asks an SMP again that did not answer, in seconds: doubled each time,
from the least to the most."""


class OwnSmp:
    """Two connections to one SMP.

    Args:
        start: whether to start an SMP if none runs.

    Attributes:
        client: used by the training thread, and by the copy thread while a copy runs. Through it the SMP watches the
            trainer.
        sealing: used by the sealing thread, which waits for digests.

    Raises:
        SmpUnavailable, ConfigError: see `connect`.
    """

    def __init__(self, arena: Path, job: str, coord: str, *, start: bool, system: System = MACHINE) -> None:
        self._arena, self._job, self._coord = arena, job, coord
        self._start = start
        self._pause_s = LEAST_PAUSE_S
        self._not_before_s = 0.0
        self._system = system
        with ExitStack() as undo:
            self.client = undo.enter_context(closing(connect(arena, job, start=start, coord=coord, system=system)))
            self.sealing = undo.enter_context(closing(SmpClient(arena, job, system=system)))
            held = self.client.inventory()
            undo.pop_all()
        # The job's layout names them, so the other SMPs look for a successor there, also if the arena is gone, in which
        # it would find them.
        self._ports = held.control_port, held.bulk_port

    def attach(self, epoch: int, idle: Callable[[], None]) -> None:
        """Make sure that the SMP answers, and is in this epoch.

        Called by the training thread: it waits at most `ATTACH_DEADLINE_S` for an SMP that does not answer, or that is
        being started, and then pauses before it asks again, longer each time.

        Args:
            idle: blocks until no other thread uses the connections. Called if the SMP went away.

        Raises:
            SmpUnavailable: it does not answer, or no other could be started.
        """
        if self._system.monotonic() < self._not_before_s:
            raise SmpUnavailable("the SMP of this node did not answer, and is asked again later")
        try:
            went_away = failure_of(lambda: self.client.join(epoch, deadline_s=ATTACH_DEADLINE_S), SmpUnavailable)
            if went_away is not None:
                idle()
                try:
                    self.attach_again(epoch, None, ATTACH_DEADLINE_S)
                except ConfigError as error:  # another job's, or of another version: training goes on without it
                    raise SmpUnavailable(str(error)) from error
        except DeadlineExceeded as error:
            pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, MOST_PAUSE_S)
            self._not_before_s = self._system.monotonic() + pause_s
            text = f"the SMP of this node does not answer, and is asked again in {pause_s:.0f} s: {error}"
            raise SmpUnavailable(text) from error
        self._pause_s = LEAST_PAUSE_S

    def attach_again(self, epoch: int, layout: Layout | None, deadline_s: float = math.inf) -> None:
        """Go on with the successor of an SMP that went away, or start one. Snapshots that the old one had not sealed
        are lost.

        No other thread may use the connections.

        Args:
            deadline_s: for all of it. Each call has one of its own, too, and so has the start of an SMP.

        Raises:
            SmpUnavailable: none answers, or could be started.
            DeadlineExceeded: an SMP runs, or was being started, and did not answer in time.
        """
        until_s = self._system.monotonic() + deadline_s
        self._find(until_s)
        self.sealing.reconnect(self._left(until_s))
        self.client.join(epoch, deadline_s=self._left(until_s))
        if layout is not None:
            self.client.configure(layout, wait=False)

    def _find(self, until_s: float = math.inf) -> None:
        try:
            self.client.reconnect(self._left(until_s))
            return
        except SmpUnavailable:
            if not self._start:
                raise
        start_s = self._left(until_s, START_DEADLINE_S)
        start_here(self._arena, self._job, ports=self._ports, deadline_s=start_s, system=self._system)
        self.client.reconnect(self._left(until_s))

    def _left(self, until_s: float, most_s: float = CALL_DEADLINE_S) -> float:
        """How long a call may take, in seconds. Raises `DeadlineExceeded` if the time is over."""
        left_s = until_s - self._system.monotonic()
        if left_s <= 0:
            raise DeadlineExceeded("the time is over")
        return min(left_s, most_s)

    def finish(self, epoch: int) -> None:
        """End the job on this node: the SMP exits and its memory is freed. Raises `HoldfastError`."""
        try:
            self.client.join(epoch)  # ranks that lost each other may be in different epochs
            self.client.finish(epoch)
        except SmpUnavailable as error:  # it was killed meanwhile: its successor cleans up
            log.info("the job is finished by another SMP: %s", error)
            self._find()
            self.client.join(epoch)
            self.client.finish(epoch)

    def say_end(self, step: int, error: BaseException | None) -> None:
        """Have the SMP record how the job ended here, for its next start. Never raises."""
        try:
            self.client.ended(self._coord, TrainerEnd(step, failure_text(error) if error is not None else WELL))
        except HoldfastError as problem:
            log.warning("could not tell this node's SMP how the job ended: %s", problem)

    def close(self) -> None:
        """Close both connections. The SMP stays."""
        self.sealing.close()
        self.client.close()
