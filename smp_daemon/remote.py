"""Answers to other SMPs and to commands: units over TCP, small messages over gRPC."""

from __future__ import annotations

from functools import partial

import msgspec
import numpy as np

from holdfast.ec import choose_codec
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.net.peers import AtEnd
from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.ops.status import take_status
from holdfast.smp_daemon.recovery.units import MICROSECONDS, key_of
from holdfast.smp_daemon.shared import messages
from holdfast.smp_daemon.shared.errors import ConfigError, DamagedSnapshot, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.shared.transport import Message, Outbound, SocketStream
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.holdings import Key, ShardKey


def answer_control(smp: Core, request: messages.PeerControl, at_end: AtEnd) -> Outbound:
    """The reply to a message that came over gRPC. Blocks for as long as the request takes."""
    store, monitor = smp.store, smp.monitor
    match request:
        case messages.Ping():
            layout = store.state.newest_layout()
            revision = layout.revision if layout is not None and layout.epoch == store.state.epoch else 0
            return messages.Pong(job=store.job, node=store.node, epoch=store.state.epoch, revision=revision)
        case messages.ParityDone():
            store.codings.parity_done(request.epoch, Coding(request.snapshot, request.tag), request.position)
        case messages.PeerInventory():
            return smp.inventory().to_plain(request.known)
        case messages.PeerStatus():
            return take_status(smp).to_plain(request.known)
        case messages.Regroup():
            monitor.lead(request)
        case messages.Enlist():
            monitor.enlist(request.epoch, request.start)
        case messages.GiveUpRuns():
            if smp.trainers and store.state.run is not None and store.state.run.id in request.runs:
                raise ConfigError(f"trainers of run {store.state.run} are connected to {store.node}: end them first")
            store.give_up(request.runs)
        case messages.Adopt() | messages.Encode() | messages.Release():
            return smp.reconciler.obey(request)
        case messages.Drain():
            drained = smp.drainer.run(request.deadline_s, request.spares, wait=request.wait)
            at_end(partial(smp.stop, remove=True))  # nobody needs what is here any more, so its memory goes back
            return dict(to_plain(drained))
    return {}


class PeerConversation:
    """The TCP connection of another SMP that sends or asks for units. Used by the connection's thread alone."""

    def __init__(self, smp: Core) -> None:
        self._smp = smp
        self._store = smp.store
        self._links = Links(smp.store.counters, network=smp.system)
        self._sum = memoryview(bytearray())
        self._accumulates = False

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Outbound, memoryview | None]:
        try:
            request: messages.PeerBulk = messages.read_peer_bulk(message)
            if payload and not isinstance(request, messages.Accumulate):
                raise ProtocolError(f"raw bytes with the operation {message.get('op')!r}")
        except ProtocolError:
            if payload:
                self._pass_over(message, payload, stream)
            raise
        if isinstance(request, messages.Accumulate):
            if not self._accumulates:
                self._accumulates = True  # for good: connections that accumulate carry nothing else
                make_background(self._smp.settings.priority)
            return self._accumulate(request, payload, stream), None
        messages.check_request(request, self._store.job)
        match request:
            case messages.AskShard():
                return self._shard(request.coord), None
            case messages.Fetch():
                what = request.what
                if isinstance(what, messages.PartialSum):
                    return self._partial(request, what)
                return self._unit(key_of(request.snapshot, what), what.unit)

    def _pass_over(self, message: Message, payload: int, stream: SocketStream) -> None:
        """Discard the unit of a refused message. Close the connection if the unit cannot be one of this job's."""
        if message.get("op") != "accumulate" or payload > self._store.state.longest_unit():
            stream.close()
            return
        stream.set_deadline(CALL_DEADLINE_S)
        try:
            _discard(payload, stream)
        finally:
            stream.set_deadline(None)

    def ended(self) -> None:
        """Close the links of a chain. Accumulated units stay; a unit that arrived in part was not accumulated."""
        self._links.close()

    def _accumulate(self, request: messages.Accumulate, payload: int, stream: SocketStream) -> Message:
        """Receive a unit and add it to the parity.

        Waits for the parity slot before it takes a buffer, so that a buffer is held only while a unit arrives and is
        added.
        """
        limit = self._store.state.longest_unit()
        if payload > limit:
            stream.close()
            raise ProtocolError(f"a unit of {payload} bytes; this job's have at most {limit}")
        stream.set_deadline(CALL_DEADLINE_S)
        codings, coding = self._store.codings, Coding(request.snapshot, request.tag)
        try:
            try:
                messages.check_request(request, self._store.job)
                codings.await_gathering(request.epoch, coding)
            except HoldfastError:
                _discard(payload, stream)
                raise
            with self._smp.buffers.borrow(payload) as unit:
                found = stream.receive_into(unit)
                self._store.counters.add(bytes_received=payload)
                self._check_arrival(request, found)
                codings.accumulate(request.epoch, coding, request.stripe, request.position, unit, request.digest)
        finally:
            stream.set_deadline(None)
        return {}

    def _check_arrival(self, request: messages.Accumulate, found: int) -> None:
        if found != request.digest:
            self._store.counters.add(units_damaged=1)
            raise DamagedSnapshot(
                f"a unit of {request.snapshot} from position {request.position} was damaged on its way"
            )

    def _shard(self, coord: str) -> messages.HeldShard:
        holdings = self._store.holdings
        run = self._store.state.run
        held = [key for key in holdings.held() if isinstance(key, ShardKey) and key.coord == coord]
        opened = [(key, holdings.open(key)[1]) for key in held]
        own = [(key, record) for key, record in opened if run is not None and record.run == run.id]
        if not own:
            raise ProtocolError(f"node {self._store.node!r} holds no shard of {coord} of its run")
        key, record = max(own, key=lambda pair: pair[0])
        return messages.HeldShard(
            run=record.run, snapshot=key.snapshot, bytes=record.bytes, unit_bytes=record.unit_bytes
        )

    def _unit(self, key: Key, index: int) -> tuple[messages.UnitReply, memoryview]:
        """A unit whose digest was just checked."""
        unit, record = self._store.holdings.checked_unit(key, index)
        self._store.counters.add(bytes_sent=unit.nbytes)
        sources = record.sources[index] if isinstance(record, ParityRecord) else {}
        return messages.UnitReply(digest=record.digests[index], sources=sources), unit

    def _partial(self, request: messages.Fetch, wanted: messages.PartialSum) -> tuple[messages.SumReply, memoryview]:
        """Ask the rest of the chain for its partial sum, and add this node's term to it."""
        length, longest = wanted.length, self._store.state.longest_unit()
        if length > longest:
            raise ProtocolError(f"a sum of {length} bytes; this job's units have at most {longest}")
        own, *others = wanted.terms
        unit, record = self._store.holdings.checked_unit(key_of(request.snapshot, own.what), own.what.unit)
        sources = record.sources[own.what.unit] if isinstance(record, ParityRecord) else {}
        expected = sources.get(wanted.position)
        if self._sum.nbytes < length:
            self._sum = memoryview(bytearray(length))
        total = self._sum[:length]
        waits: tuple[int, ...] = ()
        if others:
            host, port = others[0].at
            began = self._smp.system.monotonic()
            what = msgspec.structs.replace(wanted, terms=tuple(others))
            rest = msgspec.structs.replace(request, what=what)
            reply = from_plain(messages.SumReply, self._links.call((host, port), rest, total), "an answer with a sum")
            waits = (int((self._smp.system.monotonic() - began) * MICROSECONDS), *reply.waits)
            if self._links.digest != reply.digest:
                self._links.drop((host, port))
                raise DamagedSnapshot(f"a partial sum from {host}:{port} was damaged on its way")
            expected = reply.expected if expected is None else expected
        else:
            np.frombuffer(total, np.uint8)[:] = 0
        count = min(length, unit.nbytes)
        choose_codec(1, 1, self._smp.settings.backend).add_scaled(own.factor, unit[:count], total[:count])
        self._store.counters.add(bytes_sent=length)
        return messages.SumReply(digest=digest(total), expected=expected, waits=waits), total


def _discard(count: int, stream: SocketStream) -> None:
    """Read and drop `count` raw bytes, so that the next message can be read."""
    nowhere = memoryview(bytearray(min(count, 1 << 16)))
    while count:
        piece = nowhere[: min(count, nowhere.nbytes)]
        stream.receive_into(piece)
        count -= piece.nbytes
