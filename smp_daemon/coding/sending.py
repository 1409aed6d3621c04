"""Sends a node's data units to the nodes that hold the parity of their stripe.

Several threads send in parallel, each over its own connections, so that no single connection, network card or processor
is the bottleneck. A thread takes the next unit as soon as fewer than `WINDOW` of its units are in flight. A unit is in
flight until the peer acknowledges that it has accumulated it, so a slow peer slows its senders and takes no memory.
When a connection breaks, its unacknowledged units are sent again; a unit that arrives twice is accumulated once.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Self

from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, DeadlineExceeded, NoFreeSlot, SmpUnavailable
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, Node, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, slowest_s
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import Accumulate
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.holdings import ShardKey
from holdfast.smp_daemon.storage.store import Store

WINDOW = 4
"""Largest number of units that one thread has in flight."""

ATTEMPTS = 3
"""How many times a unit that arrives damaged is sent. After that, the damage is at the sender."""

RECONNECT_DEADLINE_S = 5.0
"""How long a broken connection to a peer is tried again, in seconds, before the snapshot fails: an SMP that was
restarted serves again within it, and other snapshots wait meanwhile."""
RECONNECT_EVERY_S = 0.05
"""Pause between two tries, in seconds."""

AVOIDED_S = 60.0
"""How long a lane avoids a peer after its connection broke while those of other lanes worked."""

SILENT_S = 3.0
"""How long nothing may move over a connection, while others to the same peer work, before it counts as broken."""

CONNECT_S = 5.0
"""Timeout for connecting, unless there is only one lane."""

log = get_log(__name__)
_episodes = Episodes(log)


@dataclass(frozen=True, slots=True)
class OutboundUnit:
    """One data unit for one parity owner."""

    owner: Node
    message: Accumulate
    content: memoryview
    attempt: int = 1


class Sender:
    """Sends from one node, over `links` connections to each peer for each network card of this node.

    `send` and `close` are called by one thread; `interrupt` may be called from any thread.
    """

    def __init__(self, store: Store, links: int, prepare: Callable[[], None] = lambda: None) -> None:
        """`prepare`: called first in each thread that the sender starts."""
        self._store = store
        self._links = links
        self._prepare = prepare
        self._lanes: list[_Lane] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def interrupt(self) -> None:
        """Close every connection: a thread that waits on one gets `SmpUnavailable`."""
        for lane in list(self._lanes):
            lane.links.interrupt()

    def close(self) -> None:
        """Close every connection; the next `send` opens new ones."""
        for lane in self._lanes:
            lane.links.close()
            lane.avoided.clear()

    def send(
        self, snapshot: SnapshotId, layout: Layout, check: Callable[[], None], pace: Callable[[int], None]
    ) -> None:
        """Send every data unit of this node to its stripe's parity in `layout`. Blocks until all are accumulated.

        Args:
            check: called before each unit, by any sending thread; raises if the work is no longer wanted.
            pace: called with the length of each unit in bytes before it is sent, by one thread at a time; may block.

        Raises:
            StaleEpoch, ProtocolError: the work is no longer wanted, by this node or by a peer.
            SmpUnavailable, DeadlineExceeded: a peer cannot be reached, or has no slot for its parity.
        """
        store = self._store
        # A node has a slot once its trainers have sealed their part, and some may have more bytes to copy than others.
        slots_by_s = store.network.monotonic() + CALL_DEADLINE_S + slowest_s(layout.moved_bytes)
        cards = layout.node(store.node).bulk_addresses
        count = self._links * len(cards)
        for number in range(len(self._lanes), count):
            source = cards[number % len(cards)][0] if len(cards) > 1 else ""
            self._lanes.append(_Lane(number, store, source, alone=count == 1))
        group, _ = layout.place(store.node)
        supply = _Supply(_outbound_units(store, snapshot, layout), self._lanes, check, pace, slots_by_s, store)
        while True:
            try:
                store.codings.await_gathering(store.state.epoch, Coding(snapshot, layout.tag(group)))
                break
            except NoFreeSlot as error:
                supply.put_off(error)
        # The calling thread runs the first lane. Each of these threads owns one of the other lanes until it is joined.
        threads = [
            store.network.Thread(target=self._run, args=(lane, supply), name="send", daemon=True)
            for lane in self._lanes[1:]
        ]
        for thread in threads:
            thread.start()
        self._lanes[0].run(supply)
        for thread in threads:
            thread.join()
        supply.raise_failure()

    def _run(self, lane: _Lane, supply: _Supply) -> None:
        self._prepare()
        lane.run(supply)


class _Supply:
    """The units of one snapshot, distributed to lanes. Thread-safe."""

    def __init__(
        self,
        units: Iterator[OutboundUnit],
        lanes: list[_Lane],
        check: Callable[[], None],
        pace: Callable[[int], None],
        slots_by_s: float,
        store: Store,
    ) -> None:
        """`slots_by_s`: when each node must have a slot for its parity (`Clocks.monotonic`)."""
        self._monotonic = store.network.monotonic
        self._slots_by_s = slots_by_s
        self._units = units
        self._lanes = lanes
        self._check = check
        self._pace = pace
        # Held by the thread that takes the next unit from `_units`, also while `_pace` blocks. `_changed` and the
        # store's lock are taken under it.
        self._taking = store.network.Lock()
        # Guards all attributes below; `_failure` is also read without it. Notified when a unit is ready, when the last
        # open unit is acknowledged, when no more units come, and on failure. No lock is taken under it.
        self._changed = store.network.Condition()
        self._ready: deque[OutboundUnit] = deque()
        self._open = 0
        self._drained = False
        self._failure: Exception | None = None
        self._acknowledged: dict[str, float] = {}
        now = store.network.monotonic()
        self._parted = {
            node: avoiding
            for node in {node for lane in lanes for node in lane.avoided}
            if len(avoiding := {lane.number for lane in lanes if lane.avoided.get(node, now) > now}) < len(lanes)
        }
        """The lanes that do not reach a peer, by its name; never all lanes."""

    def next(self, lane: _Lane, *, wait: bool) -> OutboundUnit | None:
        """A unit for a lane; None: there is none now or, with `wait`, never will be. Raises as `check`."""
        while True:
            with self._changed:
                self.raise_failure()
                for unit in self._ready:
                    if lane.number not in self._parted.get(unit.owner.name, ()):
                        self._ready.remove(unit)
                        return unit
                if self._ready or self._drained:
                    if not wait or (self._drained and not self._open):
                        return None
                    self._changed.wait()  # ends: units of other lanes are acknowledged, or fail, within a deadline
                    continue
            self._make_ready()

    def acknowledged(self, owner: str, now: float) -> None:
        """The peer `owner` has accumulated a unit."""
        with self._changed:
            self._acknowledged[owner] = now
            self._open -= 1
            if not self._open:
                self._changed.notify_all()

    def is_awake(self, owner: str, since: float) -> bool:
        """Whether the peer `owner` has acknowledged a unit after `since`, over any connection."""
        with self._changed:
            return self._acknowledged.get(owner, since) > since

    def part(self, lane: _Lane, owner: Node, units: list[OutboundUnit]) -> bool:
        """A lane no longer reaches a peer: let other lanes send its `units`. False if none of them reaches the peer."""
        with self._changed:
            self.raise_failure()
            parted = self._parted.setdefault(owner.name, set())
            if len(parted | {lane.number}) == len(self._lanes):
                return False
            parted.add(lane.number)
            self._ready.extend(units)
            self._changed.notify_all()
            return True

    def put_off(self, error: NoFreeSlot) -> None:
        """A node has no slot for its parity yet. Raises `DeadlineExceeded` if it should have one by now, or as
        `check`."""
        self.check()
        if self._monotonic() > self._slots_by_s:
            raise DeadlineExceeded(str(error)) from error

    def check(self) -> None:
        """Raises if the work is no longer wanted, or has failed in any lane."""
        self.raise_failure()
        self._check()

    def fail(self, error: Exception) -> None:
        """Keep the first failure, and make all lanes end."""
        with self._changed:
            if self._failure is not None:
                return
            self._failure = error
            self._changed.notify_all()
        for lane in self._lanes:
            lane.links.interrupt()

    def raise_failure(self) -> None:
        """Raises the first failure of any lane, if there is one."""
        if self._failure is not None:
            raise self._failure

    def _make_ready(self) -> None:
        with self._taking:
            if self._ready:  # another thread's: a unit must not be paced long before it is sent
                return
            unit = None if self._drained else next(self._units, None)
            if unit is not None:
                self.check()
                self._pace(unit.content.nbytes)
            with self._changed:
                if unit is None:
                    self._drained = True
                else:
                    self._open += 1
                    self._ready.append(unit)
                self._changed.notify_all()


class _Lane:
    """One connection to each peer, and the units in flight on them. One thread at a time owns it.

    Attributes:
        links: the connections. Other threads only call its `interrupt`.
        avoided: by the name of a peer, until when the other lanes send its units (`Clocks.monotonic`).
    """

    def __init__(self, number: int, store: Store, source: str, *, alone: bool) -> None:
        """
        Args:
            source: the address of the network card to use; empty: the system chooses.
            alone: whether there are no other lanes.
        """
        self.number = number
        self.links = Links(
            store.counters, network=store.network, source=source, patience=None if alone else self._lose_patience
        )
        self.avoided: dict[str, float] = {}
        self._connect_s = CALL_DEADLINE_S if alone else CONNECT_S
        self._store = store
        self._clock = store.network
        self._supply: _Supply
        self._sent: deque[OutboundUnit] = deque()
        self._owners: dict[Address, str] = {}

    def run(self, supply: _Supply) -> None:
        """Send until `supply` has no more units. Blocks. Errors go to `supply.fail`."""
        self._supply = supply
        self._sent.clear()
        try:
            while True:
                if len(self._sent) >= WINDOW:
                    self._collect()
                elif unit := supply.next(self, wait=not self._sent):
                    self._send(unit)
                elif self._sent:
                    self._collect()
                else:
                    return
        except Exception as error:
            supply.fail(error)

    def _send(self, unit: OutboundUnit) -> None:
        self._supply.check()
        self._sent.append(unit)
        try:
            self._hand_over(unit)
        except (SmpUnavailable, DeadlineExceeded) as error:
            self._broken(unit.owner, error)

    def _hand_over(self, unit: OutboundUnit) -> None:
        address = self._address(unit.owner)
        self._owners[address] = unit.owner.name
        self.links.connect(address, unit.message.job, self._connect_s)
        self.links.send(address, unit.message, unit.content)

    def _collect(self) -> None:
        unit = self._sent[0]
        address = self._address(unit.owner)
        try:
            self.links.receive(address)
        except (SmpUnavailable, DeadlineExceeded) as error:
            self._broken(unit.owner, error)
            return
        except NoFreeSlot as error:
            self._supply.put_off(error)
            self._sent.popleft()
            self._send(unit)
            return
        except DamagedSnapshot as error:
            self._sent.popleft()
            if unit.attempt == ATTEMPTS:
                raise
            _episodes.begin("damaged", "a unit is sent again: %s", error, extra=about(peer=address))
            self._send(replace(unit, attempt=unit.attempt + 1))
            return
        self._sent.popleft()
        owner = unit.owner.name
        self._supply.acknowledged(owner, self._clock.monotonic())
        _episodes.end("damaged", "units arrive whole again", extra=about(peer=address))
        _episodes.end((owner, self.number), "a connection to %s works again", owner, extra=about(peer=address))

    def _lose_patience(self, address: Address, waited_s: float) -> None:
        """Raises `SmpUnavailable` if a connection is silent for `SILENT_S` while the peer answers on others."""
        since = self._clock.monotonic() - waited_s
        if waited_s >= SILENT_S and self._supply.is_awake(self._owners[address], since):
            raise SmpUnavailable(f"nothing has moved for {waited_s:.0f} s, while other connections carry on")

    def _broken(self, owner: Node, error: SmpUnavailable | DeadlineExceeded) -> None:
        """A connection broke: let other lanes send its unacknowledged units.

        If no other lane reaches the peer, this one reconnects, or raises `error` if that is a timeout. Raises as
        `_Supply.check`: connections are closed on purpose when a newer epoch begins.
        """
        self._supply.check()
        address = self._address(owner)
        self.links.drop(address)
        mine = [unit for unit in self._sent if unit.owner.name == owner.name]
        if self._supply.part(self, owner, mine):
            self._sent = deque(unit for unit in self._sent if unit.owner.name != owner.name)
            self.avoided[owner.name] = self._clock.monotonic() + AVOIDED_S
            text = "a connection to %s is broken; other connections take over for %.0f s: %s"
            extra = about(peer=address)
            _episodes.begin((owner.name, self.number), text, owner.name, AVOIDED_S, error, extra=extra)
        elif isinstance(error, DeadlineExceeded):
            raise error
        else:
            self._send_again(address, error)

    def _send_again(self, address: Address, broken: SmpUnavailable) -> None:
        """Reconnect to a peer and send its unacknowledged units. Raises `broken` after `RECONNECT_DEADLINE_S`."""
        limit = self._clock.monotonic() + RECONNECT_DEADLINE_S
        while True:
            self.links.drop(address)
            self._supply.check()
            if self._clock.monotonic() > limit:
                raise broken
            try:
                for unit in [unit for unit in self._sent if self._address(unit.owner) == address]:
                    self._hand_over(unit)
                self._store.counters.add(reconnects=1)
                _episodes.end(address, "%s takes units again", address, extra=about(peer=address))
                return
            except (SmpUnavailable, DeadlineExceeded) as error:
                text, extra = "reconnecting to %s: %s", about(peer=address)
                _episodes.begin(address, text, address, error, level=logging.INFO, extra=extra)
                with self._store.changed:
                    self._store.changed.wait(RECONNECT_EVERY_S)

    def _address(self, owner: Node) -> Address:
        addresses = owner.bulk_addresses
        return addresses[self.number % len(addresses)]


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
            epoch=store.state.epoch,
            snapshot=snapshot,
            tag=layout.tag(group),
            stripe=stripe,
            position=position,
            digest=digest,
        )
        for owner in stripes.parity_positions(stripe):
            yield OutboundUnit(members[owner], message, view)
