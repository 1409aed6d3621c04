"""Fetches units of one snapshot: a whole shard, what parity is made of, or single units to repair.

Workers take the units of a `UnitSource` in order. There are two: the memory of other SMPs (`Fetcher`, here), and
storage (`persist.reading.StoredShards`).

The fetcher tries the ways to get a unit one after another (`smp_daemon.recovery.ways`). A request that is late is given
up with its connection, so nothing of it can arrive any more, and the next way is tried. If there is none, what was late
is asked again, with twice the patience. So a unit is received right where it belongs, by one thread at a time. A unit
that does not match its digest is an erasure, like one that nobody holds.
"""

from __future__ import annotations

import logging
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import numpy as np

from holdfast.ec import Codec, TooManyErasures, choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.recovery.ways import Chooser, Way, WayKind, Ways
from holdfast.smp_daemon.shared import messages
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    NotHeld,
    ProtocolError,
    SmpUnavailable,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.records import digest
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.system import MACHINE, Network, Threads
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey

WORKERS = 4
"""Units that are fetched at a time, which keeps all links busy."""

MAX_SUMS = 2
"""Most units that are summed up here at a time: each takes k buffers and k connections."""

IDLE = 8
"""Most idle connections that are kept open for later requests."""

REFUSALS = (SmpUnavailable, DeadlineExceeded, DamagedSnapshot, ProtocolError)
"""What a source may do instead of giving a unit. Any other error ends the fetch."""

MICROSECONDS = 1e6
log = get_log(__name__)


class StripePlace(NamedTuple):
    """The place of a unit: its group, stripe, and number in the stripe, 0..k-1 for data, k..k+m-1 for parity."""

    group: int
    stripe: int
    number: int


@dataclass(frozen=True, slots=True)
class HeldUnit:
    """A unit of a stripe that some SMP holds.

    Attributes:
        number: the unit's number in its stripe: 0..k-1 for data, k..k+m-1 for parity.
        address: the SMP that holds it.
        what: the name by which to request it.
        length: its length in bytes. Data units may be shorter than the stripe; the rest is zeros.
    """

    number: int
    address: Address
    what: messages.ShardUnit | messages.ParityUnit
    length: int


def key_of(snapshot: SnapshotId, what: messages.ShardUnit | messages.ParityUnit) -> Key:
    """The shard or the parity that a unit is of."""
    if isinstance(what, messages.ShardUnit):
        return ShardKey(snapshot, what.coord)
    return ParityKey(snapshot, what.tag, what.position)


def place_of(layout: Layout, key: Key, index: int) -> StripePlace:
    """The place of unit `index` of a shard or a parity. Raises `Unrecoverable` if it belongs to no stripe."""
    if isinstance(key, ShardKey):
        located = layout.locate(key.coord)
        if not layout.protects(located.group):
            raise Unrecoverable(f"{key.coord} is lost and its group {located.group} has no parity")
        stripes = layout.stripes(located.group)
        stripe = stripes.stripe_of(located.position, stripes.first_unit(located.position, located.segment) + index)
        return StripePlace(located.group, stripe, stripes.data_positions(stripe).index(located.position))
    group = layout.group_of(key.tag)
    if group is None:
        raise Unrecoverable(f"{key} belongs to no group of this layout")
    stripes = layout.stripes(group)
    stripe = stripes.parity_stripe_of(key.position, index)
    return StripePlace(group, stripe, stripes.data + stripes.parity_positions(stripe).index(key.position))


def held_units(sources: Sources, group: int, stripe: int) -> Iterator[HeldUnit]:
    """The units of a stripe that have a known holder, data first."""
    layout, stripes = sources.layout, sources.layout.stripes(group)
    for index, position, piece in stripes.contributors(stripe):
        coord = layout.members(group)[position].shards[piece.segment].coord
        address = sources.shards.get(coord)
        if address is not None:
            unit = piece.offset // stripes.unit_bytes
            yield HeldUnit(index, address, messages.ShardUnit(coord, unit), piece.length)
    length = stripes.stripe_bytes(stripe)
    for row, position in enumerate(stripes.parity_positions(stripe)):
        address = sources.parity_holder(group, position)
        if address is not None:
            rank = stripes.parity_rank(position, stripe)
            what = messages.ParityUnit(layout.tag(group), position, rank)
            yield HeldUnit(stripes.data + row, address, what, length)


class Computation:
    """Computes one unit of a stripe, data or parity, from k others. Not thread-safe; does not block.

    Attributes:
        operands: the other units of the stripe that have a holder, by number, data first.
        needed: how many operands the computation takes. The rest of the k are padding: zeros that are stored nowhere.
        buffers: the operands that have come, by number. Each buffer is at least as long as the unit.
    """

    def __init__(self, sources: Sources, place: StripePlace, length: int, backend: str = "auto") -> None:
        """`length`: length of the unit in bytes. `backend`: see `ec.choose_codec`."""
        layout = sources.layout
        self._backend = backend
        self._place = place
        self._length = length
        self._stripes = layout.stripes(place.group)
        self._digests: dict[int, int] = {}
        held = held_units(sources, place.group, place.stripe)
        stored = {number for number, _, _ in self._stripes.contributors(place.stripe)} | {place.number}
        self._padding = [number for number in range(self._stripes.data) if number not in stored]
        self.operands = {unit.number: unit for unit in held if unit.number != place.number}
        self.needed = self._stripes.data - len(self._padding)
        self.buffers: dict[int, memoryview] = {}

    @property
    def is_data(self) -> bool:
        """Whether it is a data unit, whose digest the holders of its parity know."""
        return self._place.number < self._stripes.data

    def add(self, number: int, buffer: memoryview, reply: messages.UnitReply) -> None:
        """Add operand `number`, which was received into `buffer`. If it is shorter than the unit, the rest of the
        buffer is overwritten with zeros."""
        self._digests |= reply.sources
        if (received := self.operands[number].length) < self._length:
            np.frombuffer(buffer, np.uint8)[received : self._length] = 0
        self.buffers[number] = buffer

    def chain(self, order: Sequence[int]) -> messages.PartialSum:
        """The request to send to the holder of the first operand in `order`, so that helpers sum the operands on the
        way here."""
        factors = self._codec().coefficients([*order, *self._padding], self._place.number)
        units = [self.operands[number] for number in order]
        terms = tuple(messages.Term(unit.address, unit.what, factors.get(unit.number, 0)) for unit in units)
        return messages.PartialSum(terms, self._length, self._position)

    def finish(self, out: memoryview, expected: int | None = None) -> int:
        """Compute the unit into `out` from the operands that have come, and return its digest.

        Args:
            expected: the unit's digest, if known here; for data units it is also learnt from the parity.

        Raises:
            Unrecoverable: too few operands have come.
            DamagedSnapshot: the result does not match the digest, or no digest is known.
        """
        _, stripe, number = self._place
        units = {index: buffer[: out.nbytes] for index, buffer in self.buffers.items()}
        zeros = memoryview(bytes(out.nbytes if self._padding else 0))
        try:
            if out.nbytes:
                self._codec().reconstruct(units | dict.fromkeys(self._padding, zeros), {number: out})
        except TooManyErasures as error:
            raise Unrecoverable(f"stripe {stripe} of group {self._place.group}: {error}") from error
        if expected is None and number < self._stripes.data:
            expected = self._digests.get(self._position)
        if expected is None or digest(out) != expected:
            raise DamagedSnapshot(f"unit {number} of stripe {stripe} was computed and does not match its digest")
        return expected

    def _codec(self) -> Codec:
        return choose_codec(self._stripes.data, self._stripes.parity, self._backend)

    @property
    def _position(self) -> int:
        """The position of the node whose data unit this is. Holders of parity keep the unit's digest under it."""
        return self._stripes.data_positions(self._place.stripe)[self._place.number]


@dataclass(frozen=True, slots=True)
class WantedUnit:
    """A unit to fetch.

    Attributes:
        name, index: for messages: unit `index` of this shard or parity.
        out: where it goes; as long as the unit.
        holders: the SMPs that hold it. `what`: the name by which to request it from them.
        place: its place in its stripe, from whose other units it can be computed; None: it cannot.
        expected: its digest, if known here. For data units it is also learnt from the parity.
        came: called with the unit's digest by the worker that has fetched it.
    """

    name: str
    index: int
    out: memoryview
    holders: tuple[Address, ...] = ()
    what: messages.ShardUnit | None = None
    place: StripePlace | None = None
    expected: int | None = None
    came: Callable[[int], None] = lambda digest: None


@dataclass(frozen=True, slots=True, eq=False)
class _Asked:
    """A request that is under way.

    Attributes:
        way: by which way; for a sum, with one operand.
        address: the address of the SMP that is asked, of all that it has.
        shared: how many requests that SMP has open, with this one. `strikes`: see `SourceSpeed`, as it was made.
        began_s, patience_s: when it was made, and after how long it is late.
    """

    way: Way
    address: Address
    links: Links
    shared: int
    strikes: int
    began_s: float
    patience_s: float


Writing = Callable[[], AbstractContextManager[None]]
"""Entered by a worker while bytes may arrive in a unit. Raises if the fetch is over."""


class _Over(Exception):
    """Another worker's unit cannot be got."""


class UnitSource(ABC):
    """A place that gives the units of one snapshot's shards, each compared with the digest of its seal: so whoever
    restores, rebuilds or exports a shard does it in one way, wherever the bytes are. Calls block. Thread-safe; use it
    as a context manager.

    Attributes:
        bytes_received: of all units and operands that have come from elsewhere.
    """

    def __init__(self, snapshot: SnapshotId, layout: Layout, threads: Threads) -> None:
        """`layout`: of the snapshot's epoch."""
        self.snapshot = snapshot
        self.layout = layout
        self._threads = threads
        # Guards the fields of the source. Notified when a worker stops writing or has ended. Held for bookkeeping only,
        # never by who has the store's lock: that is taken under it, where the next unit is asked for, as are the locks
        # of streams, counters and logs.
        self.changed = threads.Condition()
        self.bytes_received = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @abstractmethod
    def how(self, coord: str) -> str:
        """How a shard comes from here, see `messages.Recovered`."""

    @abstractmethod
    def shard_unit(self, coord: str, index: int, out: memoryview) -> WantedUnit:
        """Unit `index` of a shard, to be fetched into `out`. Reads nothing."""

    @abstractmethod
    def lost_unit(self, key: Key, index: int, out: memoryview, expected: int) -> WantedUnit:
        """Unit `index` of what this node holds, whose bytes there do not match the digest `expected`. Reads nothing.
        Raises `Unrecoverable` if it can come from nowhere."""

    @abstractmethod
    def get(self, unit: WantedUnit, left: int, writing: Writing) -> int:
        """Fetch a unit and return its digest, in this thread. `left`: how many are still to come."""

    def interrupt(self) -> None:  # noqa: B027
        """End what waits for an answer, if that is possible. What is still read then is not used."""

    def close(self) -> None:  # noqa: B027
        """Free what is kept for later calls, which make it anew."""

    def shard(self, coord: str, out: memoryview) -> Iterator[WantedUnit]:
        """All units of a shard in order, to be fetched into `out`."""
        length = self.layout.unit_bytes
        for index in range(-(-out.nbytes // length)):
            yield self.shard_unit(coord, index, out[index * length : (index + 1) * length])

    def fill(self, coord: str, out: memoryview) -> None:
        """Fetch a shard into `out`, which is as long. Raises as `all`."""
        self.all(self.shard(coord, out), -(-out.nbytes // self.layout.unit_bytes))

    def one(self, unit: WantedUnit) -> int:
        """Fetch a unit, in this thread. Returns its digest.

        Raises:
            Unrecoverable: no SMP gives the unit, and too little of its stripe is left.
            DamagedSnapshot: what storage gave, or what was computed, does not match its digest.
            PlaceError: the storage fails.
        """
        return self.get(unit, 1, nullcontext)

    def all(self, units: Iterable[WantedUnit], count: int) -> None:
        """Fetch `count` units by several workers. Blocks until nothing is written to any of them any more.

        Args:
            units: taken one after another, whenever a worker is free; no two workers take one at a time.

        Raises: as `one`, for the first unit that cannot be got; or whatever `units` or a `came` raises.
        """
        _Crew(self, iter(units), count, self._threads).wait()


class Fetcher(UnitSource):
    """The memory of the SMPs that hold something of a snapshot. Its connections are kept until `close`."""

    def __init__(
        self,
        sources: Sources,
        counters: Counters,
        backend: str = "auto",
        *,
        by_chain: bool = True,
        network: Network = MACHINE,
    ) -> None:
        """
        Args:
            backend: see `ec.choose_codec`.
            by_chain: whether helpers may pass sums on; otherwise every operand comes here.
        """
        super().__init__(sources.snapshot, sources.layout, network)
        self._network = network
        self.sources = sources
        self._counters = counters
        self._backend = backend
        self._by_chain = by_chain
        self._episodes = Episodes(log)
        # `changed` guards all fields below, and is notified when a sum is over, too. A connection in use belongs to one
        # thread; others only interrupt it.
        self._chooser = Chooser()
        self._idle: list[tuple[Address, Links]] = []
        self._open: dict[Links, bool] = {}  # in use, in order, and whether `interrupt` has ended what each waits for
        self._buffers: list[memoryview] = []
        self._sums = 0
        self._requests = 0

    @property
    def misses_somebody(self) -> bool:
        """Whether an SMP that holds something is gone, so that a unit that failed now may be got later."""
        with self.changed:
            return self._chooser.speeds.misses_somebody

    def close(self) -> None:
        """Close the connections. Later calls open new ones."""
        with self.changed:
            while self._idle:
                self._idle.pop()[1].close()

    # ------------------------------------------------------------------ what is fetched

    def how(self, coord: str) -> str:
        return "fetched" if coord in self.sources.shards else "rebuilt"

    def shard_unit(self, coord: str, index: int, out: memoryview) -> WantedUnit:
        try:
            place = place_of(self.layout, ShardKey(self.snapshot, coord), index)
        except Unrecoverable:  # it has no parity: only its holder has it
            place = None
        return WantedUnit(coord, index, out, self.sources.holders(coord), messages.ShardUnit(coord, index), place)

    def lost_unit(self, key: Key, index: int, out: memoryview, expected: int) -> WantedUnit:
        return WantedUnit(str(key), index, out, place=place_of(self.layout, key, index), expected=expected)

    # ------------------------------------------------------------------ one unit

    def get(self, unit: WantedUnit, left: int, writing: Writing) -> int:
        computation = None
        if unit.place is not None:
            computation = Computation(self.sources, unit.place, unit.out.nbytes, self._backend)
        ways = self._ways(unit, computation)
        draw = random.Random(unit.index)
        refusal: HoldfastError | None = None
        try:
            while True:
                with writing(), self.changed:
                    way = self._chooser.choose(ways, draw, left)
                if way is None:
                    if not ways.next_round():
                        raise refusal or self._why_not(unit, computation)
                    continue
                if ways.missed or ways.spoilt:
                    self._counters.add(units_requested_again=1)
                if way.kind is not WayKind.SUM:
                    if (found := self._receive(unit, ways, way, computation, writing)) is not None:
                        return found
                elif computation is not None and self._gather(unit, ways, way, computation):
                    try:
                        with writing():
                            return computation.finish(unit.out, unit.expected)
                    except DamagedSnapshot as error:
                        self._counters.add(units_damaged=1)
                        ways.spoilt, refusal = True, error
        finally:
            if computation is not None:
                with self.changed:
                    self._buffers += computation.buffers.values()

    def _ways(self, unit: WantedUnit, computation: Computation | None) -> Ways:
        if computation is None:
            return Ways(unit.holders)
        operands = {number: held.address for number, held in computation.operands.items()}
        # Helpers learn the digest of a sum from parity, which has those of data units; so a chain gives no other unit.
        by_chain = self._by_chain and computation.is_data and unit.expected is None
        return Ways(unit.holders, operands, computation.needed, by_chain)

    def _receive(
        self, unit: WantedUnit, ways: Ways, way: Way, computation: Computation | None, writing: Writing
    ) -> int | None:
        """Get the unit whole or by a chain. Returns its digest; None: it was refused, as is noted in `ways`."""
        what = unit.what if way.kind is WayKind.WHOLE or computation is None else computation.chain(way.operands)
        assert what is not None  # a unit with holders has a name
        asked = self._send(unit, ways, way, what)
        if asked is None:
            return None
        found: int | None = None
        waits: tuple[float, ...] = ()
        with self._noting(unit, ways, asked):
            with writing():
                if way.kind is WayKind.WHOLE:
                    found = self._unit(asked, unit.out).digest
                else:
                    found, waits = self._sum(asked, unit.out)
            self._answered(asked, unit.out.nbytes, waits)
        return found

    def _gather(self, unit: WantedUnit, ways: Ways, way: Way, computation: Computation) -> bool:
        """Request operands, all at once. Returns whether all that a sum takes are here."""
        with self.changed:
            # Without a deadline of its own: a sum under way ends by the deadlines of its requests.
            self.changed.wait_for(lambda: self._sums < MAX_SUMS)
            self._sums += 1
        asked: list[_Asked] = []
        try:
            for number in way.operands:
                held = computation.operands[number]
                sent = self._send(unit, ways, Way(WayKind.SUM, (number,), (held.address,)), held.what)
                asked += [sent] if sent is not None else []
            while asked:
                each = asked.pop(0)
                (number,) = each.way.operands
                length, buffer = computation.operands[number].length, self._buffer()
                with self._noting(unit, ways, each, buffer):
                    reply = self._unit(each, buffer[:length])
                    self._answered(each, length, ())
                    computation.add(number, buffer, reply)
                    ways.came.add(number)
        finally:
            for each in asked:
                self._give_up(each)
            with self.changed:
                self._sums -= 1
                self._chooser.doubt = False
                self.changed.notify_all()
        return len(ways.came) >= ways.needed

    def _buffer(self) -> memoryview:
        with self.changed:
            if self._buffers:
                return self._buffers.pop()
        return memoryview(bytearray(self.layout.unit_bytes))

    def _why_not(self, unit: WantedUnit, computation: Computation | None) -> HoldfastError:
        try:
            if computation is not None:
                computation.finish(memoryview(bytearray(unit.out.nbytes)), unit.expected)
            else:
                place_of(self.layout, ShardKey(self.snapshot, unit.name), unit.index)
        except HoldfastError as error:
            return error
        return Unrecoverable(f"no SMP gives unit {unit.index} of {unit.name}")

    # ------------------------------------------------------------------ one request

    def _send(
        self,
        unit: WantedUnit,
        ways: Ways,
        way: Way,
        what: messages.ShardUnit | messages.ParityUnit | messages.PartialSum,
    ) -> _Asked | None:
        """Send a request to the first SMP of a way; None: it could not be sent, as is noted in `ways`."""
        with self.changed:
            source = self._chooser.speeds[way.through[0]]
            source.open += 1
            number, self._requests = self._requests, self._requests + 1
            patience_s = ways.patience_s(self._chooser.speeds)
            links = self._take_links(way.through[0])
            shared, strikes = source.open, source.strikes
        asked = _Asked(way, way.through[0], links, shared, strikes, self._network.monotonic(), patience_s)
        with self._noting(unit, ways, asked):
            links.set_deadline(patience_s)
            asked = replace(asked, address=self._connect(asked, number))
            links.send(asked.address, messages.Fetch(job=self.layout.job, snapshot=self.snapshot, what=what))
            return asked
        return None

    def _connect(self, asked: _Asked, number: int) -> Address:
        """Connect to the SMP that is asked. Returns the address used: each may be of another network card, so requests
        use them in turn."""
        layout = self.layout
        addresses = layout.ways_to(asked.way.through[0])
        first = number % len(addresses)
        problem: HoldfastError | None = None
        for address in (*addresses[first:], *addresses[:first]):
            try:
                asked.links.connect(address, layout.job, asked.patience_s)
                return address
            except (SmpUnavailable, DeadlineExceeded) as error:
                problem = error
        assert problem is not None  # every SMP has an address
        raise problem

    def _unit(self, asked: _Asked, out: memoryview) -> messages.UnitReply:
        """The answer with a unit, whose bytes fill `out`. Raises `DamagedSnapshot` if they do not match its digest."""
        reply = from_plain(messages.UnitReply, asked.links.receive(asked.address, out), "an answer with a unit")
        self._check_arrival(asked, reply.digest)
        return reply

    def _sum(self, asked: _Asked, out: memoryview) -> tuple[int, tuple[float, ...]]:
        """Like `_unit`, for a partial sum: its digest, and how long each helper except the last waited for the next
        one, in seconds. Raises `ProtocolError` if no helper knows the digest."""
        reply = from_plain(messages.SumReply, asked.links.receive(asked.address, out), "an answer with a sum")
        if reply.expected is None:
            raise ProtocolError(f"none of the SMPs asked through {asked.address} knows the digest of the sum")
        self._check_arrival(asked, reply.expected)
        return reply.expected, tuple(wait / MICROSECONDS for wait in reply.waits)

    def _check_arrival(self, asked: _Asked, expected: int) -> None:
        if asked.links.digest != expected:
            self._counters.add(units_damaged=1)
            raise DamagedSnapshot(f"a unit of {self.snapshot} from {asked.address} was damaged on its way")

    @contextmanager
    def _noting(self, unit: WantedUnit, ways: Ways, asked: _Asked, buffer: memoryview | None = None) -> Iterator[None]:
        """Give a request up if it fails. What its source refuses is noted in `ways`; other errors are raised."""
        try:
            yield
        except REFUSALS as error:
            if self._give_up(asked):
                raise  # not the doing of its source: another unit has failed
            with self.changed:
                self._buffers += [buffer] if buffer is not None else []
                self._note_refusal(ways, asked, error)
            text = "%s does not give unit %d of %s, requested as %s: %s"
            extra = about(self.sources.snapshot, coord=unit.name, peer=asked.address)
            # Nothing is wrong with a source that no longer holds the unit: its trainers took the slot for a snapshot.
            level = logging.INFO if isinstance(error, NotHeld) else logging.WARNING
            what = (asked.address, unit.index, unit.name, asked.way.kind.value, error)
            self._episodes.begin(asked.address, text, *what, level=level, extra=extra)
        except BaseException:
            self._give_up(asked)
            raise

    def _note_refusal(self, ways: Ways, asked: _Asked, error: HoldfastError) -> None:
        """Note what a failure says of its source, or of the unit there. Called with the lock."""
        speeds, address = self._chooser.speeds, asked.way.through[0]
        ways.missed |= not isinstance(error, NotHeld)
        is_silent = isinstance(error, DeadlineExceeded)
        if asked.way.kind is WayKind.CHAIN:  # it does not show which helper failed
            ways.by_chain = False
            self._chooser.doubt |= is_silent and not any(map(speeds.is_slow, asked.way.through))
        elif is_silent and asked.patience_s < CALL_DEADLINE_S:
            ways.late.add(address)
            speeds[address].late = True
        elif isinstance(error, SmpUnavailable | DeadlineExceeded):
            speeds.failed(address, asked.strikes, silent=is_silent)
        elif asked.way.kind is WayKind.WHOLE:
            ways.failed.add(address)
        else:
            ways.bad.update(asked.way.operands)

    def _answered(self, asked: _Asked, count: int, waits: Sequence[float]) -> None:
        """Note that `count` bytes have come, and keep the connection."""
        with self.changed:
            seconds = max(0.0, self._network.monotonic() - asked.began_s)
            self._chooser.speeds.answered(asked.way.through, seconds, asked.shared, waits)
            self._chooser.speeds[asked.way.through[0]].open -= 1
            self.bytes_received += count
            self._open.pop(asked.links, None)
            self._idle.append((asked.way.through[0], asked.links))
            if len(self._idle) > IDLE:
                self._idle.pop(0)[1].close()
        self._episodes.end(asked.address, "%s gives units again", asked.address)

    def _give_up(self, asked: _Asked) -> bool:
        """Close the connection of a request, so that nothing of its answer arrives any more. Returns whether
        `interrupt` has ended the request."""
        with self.changed:
            self._chooser.speeds[asked.way.through[0]].open -= 1
            interrupted = self._open.pop(asked.links, False)
        asked.links.close()
        return interrupted

    def _take_links(self, address: Address) -> Links:
        """An idle connection to `address`, or one to be made. Called with the lock."""
        found = next((each for each in self._idle if each[0] == address), None)
        if found is not None:
            self._idle.remove(found)
        links = found[1] if found is not None else Links(self._counters, network=self._network)
        self._open[links] = False
        return links

    def interrupt(self) -> None:
        """End all requests that wait for an answer; they raise `SmpUnavailable`."""
        with self.changed:
            for links in self._open:
                self._open[links] = True
                links.interrupt()


class _Crew:
    """The workers of one `UnitSource.all`. They share the source's lock, which guards all fields."""

    def __init__(self, source: UnitSource, units: Iterator[WantedUnit], count: int, threads: Threads) -> None:
        self._source = source
        self._units = units
        self._left = count
        self._changed = source.changed
        self._working = 0
        self._writing = 0
        self._failure: Exception | None = None
        for _ in range(min(WORKERS, count)):
            with self._changed:
                self._working += 1
            try:
                threads.Thread(target=self._work, name="fetch", daemon=True).start()
            except RuntimeError:  # there is no room for another thread: this one works in its place
                self._work()
                break

    def wait(self) -> None:
        """Block until all is fetched, or nothing is written any more since a unit failed. Raises what failed.

        A worker that is still connecting then is left to run into its deadline, and writes nothing.
        """
        with self._changed:
            self._changed.wait_for(lambda: not self._working or (self._failure is not None and not self._writing))
            if self._failure is not None:
                raise self._failure

    def _work(self) -> None:
        try:
            while (unit := self._next()) is not None:
                found = self._source.get(unit, self._left, self._write)
                with self._write():
                    unit.came(found)
        except _Over:
            pass
        except Exception as error:  # even a bug must end the fetch, not leave `wait` waiting
            with self._changed:
                self._failure = self._failure or error
            self._source.interrupt()
        finally:
            with self._changed:
                self._working -= 1
                self._changed.notify_all()

    def _next(self) -> WantedUnit | None:
        with self._changed:
            self._left -= 1
            return None if self._failure is not None else next(self._units, None)

    @contextmanager
    def _write(self) -> Iterator[None]:
        with self._changed:
            if self._failure is not None:
                raise _Over
            self._writing += 1
        try:
            yield
        finally:
            with self._changed:
                self._writing -= 1
                self._changed.notify_all()
