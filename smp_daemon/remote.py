"""Conversations with other SMPs, over TCP: units to accumulate, units asked for, and things to take part in."""

from __future__ import annotations

from typing import Any

import numpy as np

from holdfast.ec import choose_codec
from holdfast.smp_daemon.coding.drain import Drained
from holdfast.smp_daemon.coding.regroup import PHASES
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.ops.status import take_status
from holdfast.smp_daemon.recovery.units import MICROSECONDS, waits_of
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, ProtocolError
from holdfast.smp_daemon.shared.fields import address, digests, identifier, number, seconds, snapshot_id
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_COUNT
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.transport import Message, MessageStream
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.holdings import ParityKey, ShardKey

OPERATIONS = (
    *("fold", "inventory", "status", "reform", "move", "enlist", "drain"),
    *PHASES,
    *("shard_unit", "parity_unit", "partial"),
)
MAX_TERMS = 255
"""Nodes in a chain: no code has more units in a stripe."""


class PeerConversation:
    """Another SMP that sends units to accumulate, asks for units, or has this one take part in something."""

    def __init__(self, smp: Core) -> None:
        self._smp = smp
        self._store = smp.store
        self._links = Links(smp.store.counters)
        self._sum = memoryview(bytearray())
        self._accumulates = False
        self._drained: Drained | None = None

    def answer(self, message: Message, payload: int, stream: MessageStream) -> tuple[Message, memoryview | None]:
        op = message.get("op")
        if op not in OPERATIONS and not payload:
            raise ProtocolError(f"an SMP does not know the operation {op!r}")
        if payload and op != "fold":
            stream.close()
            raise ProtocolError(f"raw bytes with the operation {op!r}")
        if op == "fold":
            if not self._accumulates:
                self._accumulates = True  # and no more of anything else: accumulating has connections of its own
                make_background(self._smp.settings.priority)
            return self._accumulate(message, payload, stream), None
        self._check_job(message)
        if op == "inventory":
            return {"inventory": self._smp.inventory().to_json(digests(message, "known"))}, None
        if op == "status":
            return {"status": take_status(self._smp).to_json(digests(message, "known"))}, None
        if op == "reform":
            self._smp.monitor.request()
            return {}, None
        if op == "move":
            self._smp.monitor.regroup_for(_spares(message))
            return {}, None
        if op == "enlist":
            self._smp.monitor.enlist(number(message, "epoch", MAX_COUNT))
            return {}, None
        if op == "drain":
            self._drained = self._smp.drain(
                seconds(message, "deadline_s"), _spares(message), message.get("wait") is True
            )
            return {"drained": self._drained.to_json()}, None
        if op in PHASES:
            sources, layout = Sources.from_json(message.get("sources")), Layout.from_json(message.get("layout"))
            self._smp.monitor.take_part(str(op), number(message, "epoch", MAX_COUNT), sources, layout)
            return {}, None
        snapshot = snapshot_id(message, "snapshot")
        if op == "partial":
            return self._partial(message, snapshot)
        unit, digest_, sources_ = self._unit(message, snapshot)
        self._store.counters.add(bytes_sent=unit.nbytes)
        return {"digest": digest_, "sources": sources_}, unit

    def ended(self) -> None:
        """What was accumulated stays, and a unit that came in part was not accumulated. Who has left has no more to
        do."""
        self._links.close()
        if self._drained is not None:
            self._smp.stop()

    def _check_job(self, message: Message) -> None:
        if message.get("job") != self._store.job:
            raise ProtocolError(f"this SMP serves job {self._store.job!r}, not {message.get('job')!r}")

    def _accumulate(self, message: Message, payload: int, stream: MessageStream) -> Message:
        """Waits for the slot first and only then takes a buffer, so that buffers are held for no longer than a copy."""
        limit = self._store.longest_unit()
        if payload > limit:
            stream.close()
            raise ProtocolError(f"a unit of {payload} bytes; this job's have at most {limit}")
        stream.set_deadline(CALL_DEADLINE_S)
        try:
            try:
                self._check_job(message)
                epoch = number(message, "epoch", MAX_COUNT)
                coding = Coding(snapshot_id(message, "snapshot"), identifier(message, "tag"))
                stripe, position = number(message, "stripe"), number(message, "position")
                unit_digest = number(message, "digest")
                self._store.codings.await_gathering(epoch, coding)
            except HoldfastError:
                _discard(payload, stream)
                raise
            with self._smp.buffers.borrow(payload) as unit:
                stream.receive_into(unit)
                self._store.counters.add(bytes_received=payload)
                self._store.codings.accumulate(epoch, coding, stripe, position, unit, unit_digest)
        finally:
            stream.set_deadline(None)
        return {}

    def _unit(self, what: Message, snapshot: SnapshotId) -> tuple[memoryview, int, dict[int, int]]:
        """A unit that was just checked, its digest, and, of parity, the digests of what was accumulated into it."""
        index = number(what, "unit")
        if what.get("op") == "shard_unit":
            unit, record = self._store.holdings.checked_unit(ShardKey(snapshot, identifier(what, "coord")), index)
            return unit, record.digests[index], {}
        key = ParityKey(snapshot, identifier(what, "tag"), number(what, "position"))
        unit, record = self._store.holdings.checked_unit(key, index)
        sources = record.sources[index] if isinstance(record, ParityRecord) else {}
        return unit, record.digests[index], sources

    def _partial(self, message: Message, snapshot: SnapshotId) -> tuple[Message, memoryview]:
        """This node's share of a sum, added to that of the rest of the chain, which is asked first."""
        terms, length = message.get("terms"), number(message, "length", self._store.longest_unit())
        if not isinstance(terms, list) or not 0 < len(terms) <= MAX_TERMS or not isinstance(terms[0], dict):
            raise ProtocolError(f"'terms' must be a list that begins with this node's own, of at most {MAX_TERMS}")
        own, factor = terms[0].get("what"), number(terms[0], "factor", 255)
        if not isinstance(own, dict):
            raise ProtocolError("a term says what unit it takes")
        unit, _, sources = self._unit(own, snapshot)
        expected = sources.get(number(message, "position"))
        if self._sum.nbytes < length:
            self._sum = memoryview(bytearray(length))
        total, waits = self._sum[:length], []
        if len(terms) > 1:
            host, port = _address(terms[1])
            began = self._smp.system.monotonic()
            reply = self._links.call((host, port), {**message, "terms": terms[1:]}, total)
            waits = [int((self._smp.system.monotonic() - began) * MICROSECONDS), *_waits(reply)]
            if digest(total) != reply.get("digest"):
                self._links.drop((host, port))
                raise DamagedSnapshot(f"a partial sum from {host}:{port} was damaged on its way")
            expected = reply.get("expected") if expected is None else expected
        else:
            np.frombuffer(total, np.uint8)[:] = 0
        count = min(length, unit.nbytes)
        choose_codec(1, 1, self._smp.settings.backend).add_scaled(factor, unit[:count], total[:count])
        self._store.counters.add(bytes_sent=length)
        return {"digest": digest(total), "expected": expected, "waits": waits}, total


def _discard(count: int, stream: MessageStream) -> None:
    """Read raw bytes that nobody wants, so that the next message is found."""
    nowhere = memoryview(bytearray(min(count, 1 << 16)))
    while count:
        piece = nowhere[: min(count, nowhere.nbytes)]
        stream.receive_into(piece)
        count -= piece.nbytes


def _waits(reply: Message) -> list[int]:
    """How long the helpers of the rest of a chain waited for each other, in microseconds."""
    return [int(wait * MICROSECONDS) for wait in waits_of(reply)[:MAX_TERMS]]


def _spares(message: Message) -> list[tuple[str, int]]:
    spares = message.get("spares")
    if not isinstance(spares, list):
        raise ProtocolError("'spares' must be a list of addresses")
    return [_address({"at": spare}) for spare in spares]


def _address(term: Any) -> tuple[str, int]:
    return address(term.get("at") if isinstance(term, dict) else None)
