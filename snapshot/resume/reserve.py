"""Reserves memory for snapshots, laid out by all ranks together."""

from __future__ import annotations

import fcntl
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from holdfast.smp_daemon.shared.board import REFUSED as NO_MEMORY
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    SmpUnavailable,
    StaleEpoch,
    failure_of,
)
from holdfast.smp_daemon.shared.failures import NODE_MTBF_S
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import Layout, Node
from holdfast.smp_daemon.shared.limits import is_at_once
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.settings import MTBF
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.resume.arrange import Protection, arrange, node_of_rank, shortfalls

TURN_DEADLINE_S = 60.0
"""Timeout of `node_turn`, in seconds. A turn takes less than a second, with its rest; a node may have 16 ranks."""

TURN_POLL_S = 2e-3

REST = 4
"""After registering a piece of a slot with a device, the whole node pauses for this many times as long as that took:
meanwhile nothing can be launched on any of its devices."""

REFUSED, AWAY = -2, -1
"""Reported by a rank instead of the number of slots that it may use."""

log = get_log(__name__)

T = TypeVar("T")


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
            raise ConfigError(
                "another rank cannot keep its state, or its SMP not reserve memory for it; see that rank's error"
            ) from problem
        raise problem


def standing_of(problem: HoldfastError) -> int:
    """What other ranks are told of a problem: `AWAY` if it can be tried again, else `REFUSED`."""
    return AWAY if isinstance(problem, SmpUnavailable | DeadlineExceeded) else REFUSED


def together(agreement: Agreement, work: Callable[[], T]) -> T:
    """Do `work` on every rank, and return its result; raise a `HoldfastError` on every rank, with the same meaning, if
    it failed on any. A collective call."""
    made: list[T] = []
    problem = failure_of(lambda: made.append(work()), HoldfastError)
    [worst] = agreement.minimum([0 if problem is None else standing_of(problem)])()
    raise_together(worst, problem)
    return made[0]


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
) -> tuple[Layout, int]:
    """Agree on the layout of `epoch`, and have every SMP begin to reserve its memory.

    A collective call; waits for nothing that takes long.

    Args:
        coord, slot_bytes: the caller's coordinate, and the length of the slots that it needs.
        run: the run that the epoch belongs to.
        parity_slots: see `Layout`.

    Returns:
        The layout, and how many slots of every shard, and of parity, are already reserved on this node.

    Raises:
        SmpUnavailable: an SMP is away; raised on every rank.
        HoldfastError: memory cannot be reserved, here or for another rank; raised on every rank.
    """

    def describe() -> Node:
        client.join(epoch)
        return node_of_rank(client.inventory(), coord, slot_bytes, domains)

    mine = together(agreement, describe)
    everyone = [decode_json(Node, t, "a rank's description") for t in agreement.gather(encode_json(mine))]
    layout = arrange(job, epoch, everyone, protection, slots, parity_slots, run)
    speaker = layout.node(client.node).shards[0].coord  # one rank of each node gives the SMP the layout
    there = together(agreement, lambda: client.configure(layout, wait=False) if speaker == coord else 0)
    if layout.coords[0] == coord:
        is_meant = len(layout.nodes) == 1 or not layout.parity  # there is no other node, or no protection was asked for
        for shortfall in shortfalls(layout, MTBF.value() or NODE_MTBF_S):
            log.log(logging.INFO if is_meant else logging.WARNING, "%s", shortfall)
    told = agreement.gather(str(there).encode())
    return layout, int(told[next(rank for rank, node in enumerate(everyone) if node.shards[0].coord == speaker)])


class Reserving:
    """The caller's slots of one layout. They become usable one by one, as the SMP posts them on the board, and are
    mapped and prepared beside the training.

    Used by the training thread, except `turn` and what is said to be a thread's.

    Attributes:
        is_small: whether all slots are reserved from the start, and mapping and preparing them takes only a moment.
        failure: why no more slots become usable; None: nothing has failed.
    """

    def __init__(
        self,
        client: SmpClient,
        layout: Layout,
        coord: str,
        there: int,
        prepare: Callable[[list[memoryview]], None],
    ) -> None:
        """
        Args:
            there: how many slots are reserved already.
            prepare: called with the mapped slots that are to become usable, and those before, which may be in use.
        """
        # `_usable` and `failure` are written by the thread of `_map` while it runs, and by the training thread while
        # none does. Each is a single reference, so a reader sees the old or the new value and needs no lock.
        self.is_small = there >= layout.slots and is_at_once(layout.slots * layout.shard_bytes(coord))
        self.failure: HoldfastError | None = None
        self._client = client
        self._layout = layout
        self._coord = coord
        self._prepare = prepare
        self._usable = 0
        self._closed = client.system.Event()
        self._idle = client.system.Event()
        self._idle.set()

    def look(self) -> int:
        """How many slots may be used; or `AWAY` or `REFUSED`. Maps and prepares those that have come since, in a thread
        unless they are small. Returns at once."""
        if self._idle.is_set() and self.failure is None and self._usable < self._layout.slots:
            ready = self._client.board.ready(self._layout.epoch)
            if self._client.connection is None:
                self.failure = SmpUnavailable(f"the SMP of {self._client.arena} went away while it reserved memory")
            elif ready == NO_MEMORY or ready > self._usable:
                self._begin(partial(self._map, ready))
        return self._usable if self.failure is None else standing_of(self.failure)

    def _begin(self, work: Callable[[], None]) -> None:
        if self.is_small:
            work()
            return
        self._idle.clear()
        self._client.system.Thread(target=work, name="holdfast-reserve", daemon=True).start()

    def _map(self, ready: int) -> None:
        try:
            if ready == NO_MEMORY:
                self._client.configure(self._layout, wait=False)  # raises why
            slots = self._client.slots(self._layout.epoch, self._coord)
            while self._usable < min(ready, len(slots)):  # a slot that a device cannot reach yet would hold a step up
                self._prepare(slots[: self._usable + 1])
                self._usable += 1
        except HoldfastError as error:
            self.failure = None if self._closed.is_set() else error
        except Exception as error:  # a bug of ours must not look like memory that never comes
            log.exception("slots cannot be made ready")
            self.failure = HoldfastError(f"{type(error).__name__}: {error}")
        finally:
            self._idle.set()

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
        """Make the thread end soon. Returns at once."""
        self._closed.set()

    def join(self, deadline_s: float) -> None:
        """Wait until the thread has ended. Raises `DeadlineExceeded`."""
        if not self._idle.wait(deadline_s):
            raise DeadlineExceeded(f"the thread that prepares slots did not end within {deadline_s:.0f} s")


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
