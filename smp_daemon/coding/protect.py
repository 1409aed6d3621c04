"""Encoding: one thread per SMP sends its data units to whoever holds the parity of their stripe.

Each SMP pushes on its own as soon as its shards are sealed; nobody coordinates. Units go straight from the arena to
the socket. At most `WINDOW` of them are on their way, whoever to, until they are acknowledged, which is when they are
accumulated; so a slow peer slows its senders and takes no memory. What was not acknowledged on a connection that broke
is sent again on the next; a unit that comes twice is accumulated once.

Between two units it waits: for a cap on bandwidth, and while trainers of this node communicate (`Board.pause`). Groups
may take turns (`smp_daemon.shared.pacer.turn_delay_s`).
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from queue import SimpleQueue

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import Accumulate
from holdfast.smp_daemon.shared.pacer import Pacer, Patience, turn_delay_s
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.smp_daemon.storage.store import Store

WINDOW = 4
"""Units on their way at the same time."""

ATTEMPTS = 3
"""How often a unit is sent that arrives damaged: then it is not the way that is bad, but what is sent."""

REREAD_S = 0.002
"""How often the board is read during a pause: nothing tells that a trainer has resumed."""

RECONNECT_DEADLINE_S = 5.0
RECONNECT_EVERY_S = 0.05

log = get_log(__name__)
_episodes = Episodes(log)


@dataclass(frozen=True, slots=True)
class OutboundUnit:
    """One data unit for one parity owner."""

    address: Address
    message: Accumulate
    content: memoryview
    attempt: int = 1


class Protector:
    """The thread that encodes. `protect`, `announce` and `hang_up` may be called from any thread and return at once.

    Args:
        pacer: caps what it sends.
        turns: in how many turns the groups encode; 1: all at once.
        priority: see `smp_daemon.shared.priority`.
    """

    def __init__(
        self, peers: PeerClient, pacer: Pacer, turns: int = 1, priority: str = "normal", system: System = MACHINE
    ) -> None:
        self._system = system
        self._peers = peers
        self._pacer = pacer
        self._turns = turns
        self._priority = priority
        # Guarded by the store's lock, as threads that seal add to it. The connections of `_links` belong to the
        # encoding thread; others only `interrupt` them.
        self._sealed: deque[tuple[SnapshotId, float]] = deque(maxlen=2)
        self._queue: SimpleQueue[SnapshotId | None] = system.SimpleQueue()
        self._store: Store
        self._closed = system.Event()
        self._links: Links | None = None

    def start(self, store: Store) -> None:
        """Begin to work for `store`."""
        self._store = store
        self._system.Thread(target=self._run, name="protect", daemon=True).start()

    def protect(self, snapshot: SnapshotId) -> None:
        """All shards of this node are sealed: send them to the group's parity."""
        with self._store.changed:
            self._sealed.append((snapshot, self._system.monotonic()))
            self._store.changed.notify_all()
        self._queue.put(snapshot)

    def announce(self, snapshot: SnapshotId, layout: Layout) -> None:
        """This node's own parity in `layout` is committed: tell the group."""
        self._peers.tell_parity_done(
            layout,
            self._store.node,
            self._store.epoch,
            snapshot,
            lambda reason: self._store.fail(snapshot, reason),
        )
        failpoint("parity.announced", snapshot.step)

    def hang_up(self) -> None:
        """A newer epoch has begun: wait for no answer of the one before. A node that lost power never gives it."""
        if self._links is not None:
            self._links.interrupt()

    def close(self) -> None:
        """Stop after the unit at hand."""
        self._closed.set()
        with self._store.changed:
            self._store.changed.notify_all()
        self._queue.put(None)

    def _run(self) -> None:
        make_background(self._priority)
        epoch = None
        with Links(self._store.counters, system=self._store.system) as links:
            self._links = links
            while (snapshot := self._queue.get()) is not None:
                if snapshot.epoch != epoch:
                    links.close()  # `hang_up` may have ended them
                    epoch = snapshot.epoch
                layout = self._store.layout
                if layout is None or layout.epoch != snapshot.epoch or not self._store.is_wanted(snapshot):
                    continue
                try:
                    self._encode(links, snapshot, layout)
                    _episodes.end("encode", "snapshots are encoded again: %s", snapshot, extra=about(snapshot))
                except (StaleEpoch, ProtocolError) as error:
                    text, extra = "encoding of %s ended early: %s", about(snapshot)
                    _episodes.begin("encode", text, snapshot, error, level=logging.INFO, extra=extra)
                    links.close()
                except HoldfastError as error:
                    links.close()
                    self._store.fail(snapshot, str(error))

    def _encode(self, links: Links, snapshot: SnapshotId, layout: Layout) -> None:
        patience = Patience(MAX_PAUSE_S)

        def over() -> bool:
            return self._closed.is_set() or not self._store.is_wanted(snapshot)

        def check() -> None:
            if over():
                raise StaleEpoch(f"{snapshot} was given up")

        def pace(count: int) -> None:
            self._wait(self._pacer.wait_s(count, self._system.monotonic()), over)
            self._make_way(patience, over)

        failpoint("encode.before", snapshot.step)
        group, _ = layout.place(self._store.node)
        self._wait(self._until_turn_s(group, snapshot), lambda: over() or self._is_overtaken(snapshot))
        send_units(self._store, links, snapshot, layout, check, pace)
        failpoint("encode.done", snapshot.step)

    def _wait(self, seconds: float, over: Callable[[], bool]) -> None:
        """Wait so long, but not once it is `over`; that is asked again whenever the store has changed."""
        if seconds > 0:
            with self._store.changed:
                self._store.changed.wait_for(over, seconds)

    def _make_way(self, patience: Patience, over: Callable[[], bool]) -> None:
        """Wait while a trainer of this node wants quiet."""

        def asked_s() -> float:
            now = self._system.monotonic()
            return patience.wait_s(self._store.board.paused_for(now), now)

        if asked_s() > 0:
            self._store.counters.add(pauses=1)
        while (wait_s := asked_s()) > 0 and not over():
            self._wait(min(wait_s, REREAD_S), over)

    def _until_turn_s(self, group: int, snapshot: SnapshotId) -> float:
        """How long it still is until this group's turn. Without two snapshots of this epoch no turns are known."""
        with self._store.changed:
            times = [at for sealed, at in self._sealed if sealed.epoch == snapshot.epoch]
        if len(times) < 2:
            return 0.0
        return times[1] + turn_delay_s(group, self._turns, times[1] - times[0]) - self._system.monotonic()

    def _is_overtaken(self, snapshot: SnapshotId) -> bool:
        """Whether a newer one was sealed meanwhile."""
        with self._store.changed:
            return any(sealed > snapshot for sealed, _ in self._sealed)


def send_units(
    store: Store,
    links: Links,
    snapshot: SnapshotId,
    layout: Layout,
    check: Callable[[], None],
    pace: Callable[[int], None],
) -> None:
    """Send every data unit of this node to its stripe's parity in `layout`. Blocks until all are accumulated.

    Args:
        check: called before each unit; raises if the work is not wanted any more.
        pace: called with the length of each unit in bytes before it is sent; waits as long as it likes.

    Raises:
        StaleEpoch, ProtocolError: it is not wanted any more, here or there.
        SmpUnavailable, DeadlineExceeded: a peer cannot be reached.
    """
    sender = _Sender(links, store, check, store.system)
    group, _ = layout.place(store.node)
    store.codings.await_gathering(store.epoch, Coding(snapshot, layout.tag(group)))
    for unit in _outbound_units(store, snapshot, layout):
        pace(unit.content.nbytes)
        sender.send(unit)
    sender.finish()


def _outbound_units(store: Store, snapshot: SnapshotId, layout: Layout) -> Iterator[OutboundUnit]:
    group, position = layout.place(store.node)
    stripes, members = layout.stripes(group), layout.members(group)
    count = stripes.units(position)
    for unit in range(count):
        if unit == count // 2:
            failpoint("encode.middle", snapshot.step)
        stripe = stripes.stripe_of(position, unit)
        piece = stripes.piece(position, unit)
        assert piece is not None
        coord = members[position].shards[piece.segment].coord
        index = unit - stripes.first_unit(position, piece.segment)
        view, digest = store.holdings.shard_unit(ShardKey(snapshot, coord), index)
        message = Accumulate(
            job=layout.job,
            epoch=store.epoch,
            snapshot=snapshot,
            tag=layout.tag(group),
            stripe=stripe,
            position=position,
            digest=digest,
        )
        for owner in stripes.parity_positions(stripe):
            yield OutboundUnit(members[owner].bulk, message, view)


class _Sender:
    """Keeps a window of units in flight, and sends again what a broken connection has lost."""

    def __init__(self, links: Links, store: Store, check: Callable[[], None], system: System) -> None:
        self._system = system
        self._links = links
        self._store = store
        self._check = check
        self._sent: deque[OutboundUnit] = deque()

    def send(self, unit: OutboundUnit) -> None:
        while len(self._sent) >= WINDOW:
            self._collect()
        self._check()
        self._sent.append(unit)
        try:
            self._links.send(unit.address, unit.message, unit.content)
        except SmpUnavailable as error:
            self._send_again(unit.address, error)

    def finish(self) -> None:
        while self._sent:
            self._collect()

    def _collect(self) -> None:
        unit = self._sent[0]
        try:
            self._links.receive(unit.address)
        except SmpUnavailable as error:
            self._send_again(unit.address, error)
            return
        except DamagedSnapshot as error:
            self._sent.popleft()
            if unit.attempt == ATTEMPTS:
                raise
            _episodes.begin("damaged", "a unit is sent again: %s", error, extra=about(peer=unit.address))
            self.send(replace(unit, attempt=unit.attempt + 1))
            return
        self._sent.popleft()
        _episodes.end("damaged", "units arrive whole again", extra=about(peer=unit.address))

    def _send_again(self, address: Address, broken: SmpUnavailable) -> None:
        """Connect anew and send all that was not acknowledged there, for as long as it is wanted."""
        limit = self._system.monotonic() + RECONNECT_DEADLINE_S
        while True:
            self._links.drop(address)
            self._check()
            if self._system.monotonic() > limit:
                raise broken
            try:
                for unit in [unit for unit in self._sent if unit.address == address]:
                    self._links.send(address, unit.message, unit.content)
                self._store.counters.add(reconnects=1)
                _episodes.end(address, "%s takes units again", address, extra=about(peer=address))
                return
            except (SmpUnavailable, DeadlineExceeded) as error:
                text, extra = "%s is sent to again: %s", about(peer=address)
                _episodes.begin(address, text, address, error, level=logging.INFO, extra=extra)
                with self._store.changed:
                    self._store.changed.wait(RECONNECT_EVERY_S)
