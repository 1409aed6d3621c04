"""Memory for snapshots, laid out by all ranks together."""

from __future__ import annotations

import fcntl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    SmpUnavailable,
    StaleEpoch,
    failure_of,
)
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.limits import is_at_once, move_deadline
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.arrange import Protection, RankInfo, arrange, shortfalls
from holdfast.snapshot.step.ledger import ProtectEvery

TURN_DEADLINE_S = 10.0
"""Each of what takes turns takes a tenth of a second."""

TURN_POLL_S = 2e-3

REFUSED, AWAY = -2, -1
"""What a rank says instead of how many slots it may use."""

log = get_log(__name__)


def raise_together(worst: int, problem: HoldfastError | None) -> None:
    """Raise on every rank, with the same meaning, if something failed on any.

    Args:
        worst: the least `standing_of` of any rank. `problem`: what failed here, if anything did.
    """
    if worst == AWAY:
        if problem is None or standing_of(problem) != AWAY:
            raise SmpUnavailable("the SMP of another rank's node is away") from problem
        raise SmpUnavailable(str(problem)) from problem
    if worst == REFUSED:
        if problem is None or standing_of(problem) == AWAY:
            raise ConfigError("another rank's SMP could not reserve its memory; see that rank's error") from problem
        raise problem


def standing_of(problem: HoldfastError) -> int:
    """What other ranks are told of a problem: `AWAY`, and it can be tried again, or `REFUSED`."""
    return AWAY if isinstance(problem, SmpUnavailable | DeadlineExceeded) else REFUSED


def _together(agreement: Agreement, work: Callable[[], None]) -> None:
    """Do `work` on every rank; raises on every rank, with the same meaning, if it failed on any. A collective call."""
    problem = failure_of(work, HoldfastError)
    [worst] = agreement.minimum([0 if problem is None else standing_of(problem)])()
    raise_together(worst, problem)


def lay_out(
    client: SmpClient,
    agreement: Agreement,
    job: str,
    epoch: int,
    coord: str,
    slot_bytes: int,
    protection: Protection,
    slots: int,
    domains: Sequence[str] = (),
    *,
    parity_slots: int | None = None,
    protect_every: ProtectEvery = 1,
) -> tuple[Layout, int]:
    """Agree on the layout of `epoch`, in which the caller is `coord` and needs slots of `slot_bytes`, and have every
    SMP begin to reserve its memory. A collective call; waits for nothing that takes long.

    Args:
        parity_slots: see `Layout`. protect_every: which snapshots are protected; the same on every rank.

    Returns:
        The layout, and how many slots of every shard, and of parity, are there on this node.

    Raises:
        SmpUnavailable: an SMP is away; so on every rank.
        HoldfastError: it cannot be reserved, here or for another rank; so on every rank.
    """
    mine: list[RankInfo] = []

    def ask() -> None:
        client.join(epoch)
        mine.append(RankInfo.of(coord, client.inventory(), slot_bytes, tuple(domains), protect_every))

    _together(agreement, ask)
    everyone = [decode_json(RankInfo, t, "a rank's description") for t in agreement.gather(encode_json(mine[0]))]
    layout = arrange(job, epoch, everyone, protection, slots, parity_slots)
    speaker = layout.node(client.node).shards[0].coord  # the layout goes to each SMP once
    there = 0

    def begin() -> None:
        nonlocal there
        if speaker == coord:
            there = client.configure(layout, wait=False)

    _together(agreement, begin)
    if layout.coords[0] == coord:
        for shortfall in shortfalls(layout):
            log.warning("%s", shortfall)
    told = agreement.gather(str(there).encode())
    return layout, int(told[next(rank for rank, info in enumerate(everyone) if info.coord == speaker)])


def await_slots(
    client: SmpClient,
    agreement: Agreement,
    layout: Layout,
    coord: str,
    there: int,
    prepare: Callable[[list[memoryview]], None],
) -> None:
    """Wait until all memory of a layout is reserved, and the caller's slots are mapped and prepared. A collective call.

    Args:
        there: how many slots of every shard were there, as `lay_out` has returned.
        prepare: called with the caller's slots.

    Raises:
        HoldfastError: as `lay_out`.
    """

    def wait() -> None:
        count, limit = there, client.system.monotonic() + move_deadline(layout.node(client.node).state_bytes)
        while count < layout.slots:
            count = client.await_reserved(layout, layout.slots)
            if count < layout.slots and client.system.monotonic() > limit:
                raise DeadlineExceeded(f"the memory of {client.arena} is not reserved in time")

    _together(agreement, wait)
    _together(agreement, lambda: prepare(client.slots(layout.epoch, coord)))


class Reserving:
    """The caller's slots of one layout, which become usable one by one: reserved by the SMP, mapped and prepared.

    `work` may be called at once, or be left to a thread (`start`), beside which training goes on.

    Attributes:
        is_small: whether all is there from the start, and to map and prepare it takes a moment only.
        failure: why no more become usable; None: nothing has failed.
    """

    def __init__(
        self,
        client: SmpClient,
        connect: Callable[[], SmpClient],
        layout: Layout,
        coord: str,
        there: int,
        prepare: Callable[[list[memoryview]], None],
    ) -> None:
        """
        Args:
            connect: makes another connection to the SMP, on which the thread waits.
            there: how many slots are reserved already.
            prepare: called with slots that are mapped, which may be used meanwhile, and again.
        """
        # `_there`, `_usable` and `failure` are written by the one thread that runs `work`. The training thread reads
        # them through `standing`; each is one reference, so it sees a value from before or after, and needs no lock.
        self.is_small = there >= layout.slots and is_at_once(layout.slots * layout.shard_bytes(coord))
        self.failure: HoldfastError | None = None
        self._client = client
        self._connect = connect
        self._layout = layout
        self._coord = coord
        self._there = there
        self._prepare = prepare
        self._usable = 0
        self._closed = client.system.Event()
        self._thread: threading.Thread | None = None

    @property
    def standing(self) -> int:
        """How many slots may be used; or `AWAY` or `REFUSED`. Any thread's."""
        return self._usable if self.failure is None else standing_of(self.failure)

    def start(self) -> None:
        """Do `work` in a thread."""
        self._thread = self._client.system.Thread(target=self.work, name="holdfast-reserve", daemon=True)
        self._thread.start()

    def work(self) -> None:
        """Block until all slots may be used, or something fails, which is told as `failure`, or it is closed."""
        try:
            while not self._closed.is_set():
                if self._there > self._usable:
                    slots = self._client.slots(self._layout.epoch, self._coord)
                    self._usable = self._there
                    self._prepare(slots)
                if self._usable >= self._layout.slots:
                    return
                self._await_more()
        except HoldfastError as error:
            self.failure = None if self._closed.is_set() else error
        except Exception as error:  # a bug of ours must not look like memory that never comes
            log.exception("slots cannot be made ready")
            self.failure = HoldfastError(f"{type(error).__name__}: {error}")

    def _await_more(self) -> None:
        waiting = self._connect()
        try:
            while not self._closed.is_set() and self._there <= self._usable:
                self._there = waiting.await_reserved(self._layout, self._usable + 1)
        finally:
            waiting.close()

    def pause(self, seconds: float) -> None:
        """Block for so long, unless it is closed: then `StaleEpoch`, as nobody needs what was being prepared."""
        if self._closed.wait(seconds):
            raise StaleEpoch("the slots are not needed any more")

    def close(self) -> None:
        """Have it end. Returns at once."""
        self._closed.set()

    def join(self, deadline_s: float) -> None:
        """Wait until it has ended. Raises `DeadlineExceeded`."""
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"the thread {self._thread.name} did not end within {deadline_s:.0f} s")


@contextmanager
def node_turn(client: SmpClient) -> Iterator[None]:
    """A block that one trainer of this node runs at a time. Blocks until it is the caller's turn; but not for ever, as
    a process may stand still in it: what is done there may be done by several at once, if need be."""
    limit = time.monotonic() + TURN_DEADLINE_S
    with (client.arena / "turn").open("a") as file:
        while time.monotonic() < limit:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TURN_POLL_S)
        yield
