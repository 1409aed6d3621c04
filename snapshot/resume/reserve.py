"""Reserves memory for snapshots, laid out by all ranks together."""

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
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import Layout
from holdfast.smp_daemon.shared.limits import is_at_once, move_deadline
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.arrange import Protection, RankInfo, arrange, shortfalls
from holdfast.snapshot.step.ledger import ProtectEvery

TURN_DEADLINE_S = 60.0
"""Timeout of `node_turn`, in seconds. A turn takes less than a second, with its rest; a node may have 16 ranks."""

TURN_POLL_S = 2e-3

REST = 4
"""After registering a piece of a slot with a device, the whole node pauses for this many times as long as that took:
meanwhile nothing can be launched on any of its devices."""

REFUSED, AWAY = -2, -1
"""Reported by a rank instead of the number of slots that it may use."""

log = get_log(__name__)


def raise_together(worst: int, problem: HoldfastError | None) -> None:
    """Raise on every rank, with the same meaning, if something failed on any.

    Args:
        worst: the least `standing_of` of any rank.
        problem: what failed on this rank, if anything did.
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
    """What other ranks are told of a problem: `AWAY` if it can be tried again, else `REFUSED`."""
    return AWAY if isinstance(problem, SmpUnavailable | DeadlineExceeded) else REFUSED


def _together(agreement: Agreement, work: Callable[[], None]) -> None:
    """Do `work` on every rank; raise on every rank, with the same meaning, if it failed on any. A collective call."""
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
    run: Run,
    parity_slots: int | None = None,
    protect_every: ProtectEvery = 1,
) -> tuple[Layout, int]:
    """Agree on the layout of `epoch`, and have every SMP begin to reserve its memory.

    A collective call; waits for nothing that takes long.

    Args:
        coord, slot_bytes: the caller's coordinate, and the length of the slots that it needs.
        run: the run that the epoch belongs to.
        parity_slots: see `Layout`.
        protect_every: which snapshots are protected; the same on every rank.

    Returns:
        The layout, and how many slots of every shard, and of parity, are already reserved on this node.

    Raises:
        SmpUnavailable: an SMP is away; raised on every rank.
        HoldfastError: memory cannot be reserved, here or for another rank; raised on every rank.
    """
    mine: list[RankInfo] = []

    def ask() -> None:
        client.join(epoch)
        mine.append(RankInfo.of(coord, client.inventory(), slot_bytes, tuple(domains), protect_every))

    _together(agreement, ask)
    everyone = [decode_json(RankInfo, t, "a rank's description") for t in agreement.gather(encode_json(mine[0]))]
    layout = arrange(job, epoch, everyone, protection, slots, parity_slots, run)
    speaker = layout.node(client.node).shards[0].coord  # one rank of each node gives the SMP the layout
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
        there: how many slots of every shard were reserved already, as `lay_out` returned.
        prepare: called with the caller's slots.

    Raises:
        HoldfastError: as `lay_out`.
    """

    def wait() -> None:
        count, limit = there, client.system.monotonic() + move_deadline(layout.node(client.node).state_bytes)
        while count < layout.slots:
            count = client.await_reserved(layout, layout.slots)
            if count < layout.slots and client.system.monotonic() > limit:
                raise DeadlineExceeded(f"the SMP did not reserve the memory in {client.arena} in time")

    _together(agreement, wait)
    _together(agreement, lambda: prepare(client.slots(layout.epoch, coord)))


class Reserving:
    """The caller's slots of one layout. They become usable one by one, as they are reserved, mapped and prepared.

    Call `work`, or leave it to a thread (`start`) while training goes on.

    Attributes:
        is_small: whether all slots are reserved from the start, and mapping and preparing them takes only a moment.
        failure: why no more slots become usable; None: nothing has failed.
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
            connect: opens another connection to the SMP, on which the thread waits.
            there: how many slots are reserved already.
            prepare: called with the mapped slots that are to become usable, and those before, which may be in use.
        """
        # `_there`, `_usable` and `failure` are written by the one thread that runs `work`. The training thread reads
        # them through `standing`. Each is a single reference, so it reads the old or the new value and needs no lock.
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
        """How many slots may be used; or `AWAY` or `REFUSED`. May be read by any thread."""
        return self._usable if self.failure is None else standing_of(self.failure)

    def start(self) -> None:
        """Run `work` in a thread."""
        self._thread = self._client.system.Thread(target=self.work, name="holdfast-reserve", daemon=True)
        self._thread.start()

    def work(self) -> None:
        """Block until all slots may be used, something fails (see `failure`), or `close` is called."""
        try:
            while not self._closed.is_set():
                if self._there > self._usable:
                    slots = self._client.slots(self._layout.epoch, self._coord)
                    while self._usable < self._there:  # a slot that a device cannot reach yet would hold a step up
                        self._prepare(slots[: self._usable + 1])
                        self._usable += 1
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

    @contextmanager
    def turn(self) -> Iterator[None]:
        """A block that registers a piece of a slot, in turns with the other ranks of this node. Beside the training,
        the node rests before the turn ends. Raises `StaleEpoch` on `close`, as nobody needs the slots any more."""
        now = self._client.system.monotonic
        with node_turn(self._client):
            began = now()
            yield
            if not self.is_small and self._closed.wait(REST * (now() - began)):
                raise StaleEpoch("the slots are not needed any more")

    def close(self) -> None:
        """Make `work` end soon. Returns at once."""
        self._closed.set()

    def join(self, deadline_s: float) -> None:
        """Wait until the thread has ended. Raises `DeadlineExceeded`."""
        if self._thread is not None:
            self._thread.join(deadline_s)
            if self._thread.is_alive():
                raise DeadlineExceeded(f"the thread {self._thread.name} did not end within {deadline_s:.0f} s")


@contextmanager
def node_turn(client: SmpClient) -> Iterator[None]:
    """A block that one trainer of this node runs at a time. Blocks until it is the caller's turn, for `TURN_DEADLINE_S`
    at most, as another process may hang in its turn. So the block must be safe to run in several processes at once."""
    limit = time.monotonic() + TURN_DEADLINE_S
    with (client.arena / "turn").open("a") as file:
        while time.monotonic() < limit:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                time.sleep(TURN_POLL_S)
        yield
