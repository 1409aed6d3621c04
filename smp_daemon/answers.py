"""What an SMP answers: to the trainers of this node over a unix socket, and to other SMPs and commands, units over TCP
and small messages over gRPC.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial, reduce
from operator import or_
from typing import Any

import msgspec
import numpy as np

from holdfast.ec import choose_codec
from holdfast.smp_daemon.coding.scrub import scrub
from holdfast.smp_daemon.net.links import Links
from holdfast.smp_daemon.net.peers import AtEnd
from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.ops.status import take_status
from holdfast.smp_daemon.recovery.fetch import MICROSECONDS, Fetcher, key_of
from holdfast.smp_daemon.recovery.inventories import gather_inventories
from holdfast.smp_daemon.recovery.rebuild import fetcher_of, lent_unit, recover
from holdfast.smp_daemon.shared import messages
from holdfast.smp_daemon.shared.errors import (
    ArenaTooSmall,
    ConfigError,
    DamagedSnapshot,
    HoldfastError,
    ProtocolError,
    StaleEpoch,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MAX_COUNT, MAX_MESSAGE_BYTES
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.plain import from_plain, reader, to_plain
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.records import ParityRecord, digest
from holdfast.smp_daemon.shared.settings import OF_AN_SMP, PRIORITY, REBUILD
from holdfast.smp_daemon.shared.starts import KILLED, WELL, TrainerEnd
from holdfast.smp_daemon.shared.transport import Message, Outbound, SocketStream
from holdfast.smp_daemon.shared.uids import peer_of
from holdfast.smp_daemon.shared.versions import RELEASE, check_range, spoken
from holdfast.smp_daemon.storage.codings import Coding
from holdfast.smp_daemon.storage.holdings import Key, ShardKey

MAX_DIGESTS = (MAX_MESSAGE_BYTES - (1 << 12)) // len(f"{(1 << 64) - 1},")
"""Number of unit digests that fit into a message beside its other fields."""

ROOM_DEADLINE_S = 10.0
"""How long a new start waits for the processes of the previous start to end."""

log = get_log(__name__)


class TrainerConversation:
    """The connection of one trainer of this node, used by the connection's thread alone.

    Slots that the trainer has taken stay its own when it disconnects, as it may come back; a new epoch replaces them.
    """

    def __init__(self, smp: Core, pid: int) -> None:
        self._smp = smp
        self._store = smp.store
        self._pid = pid
        self._greeted = False
        self._coord: str | None = None
        self._epoch: int | None = None
        self._hang_up: Callable[[], None] | None = None
        self._lender: Fetcher | None = None
        self._lent: memoryview | None = None

    def answer(self, message: Message, payload: int, stream: SocketStream) -> tuple[Message, memoryview | None]:
        if payload:
            stream.close()
            raise ProtocolError("a trainer sends no raw bytes")
        if self._hang_up is None:
            self._hang_up = stream.close
            self._smp.watchdog.connected(self._pid, self._hang_up)
        request: messages.Request = read_trainer_request(message)
        if isinstance(request, messages.InEpoch) and request.epoch is not None:
            self._store.state.check_epoch(request.epoch)
        self._lent = None
        return to_plain(TRAINER_ANSWERS[type(request)](self, request)) or {}, self._lent

    def ended(self) -> None:
        if self._hang_up is not None:
            self._smp.watchdog.left(self._pid, self._hang_up, self._coord, self._note_end)
        if self._lender is not None:
            self._lender.close()
        if self._greeted:
            self._smp.count_trainers(-1)

    def _hello(self, request: messages.Hello) -> messages.Greeted:
        if request.job != self._store.job:
            raise ConfigError(
                f"the SMP at {self._store.arena.path} serves job {self._store.job!r}, not {request.job!r}: "
                "check HOLDFAST_JOB"
            )
        check_range("this trainer", request.speaks, request.release)
        if request.coord is not None and request.epoch is None:
            self._check_room()
        if not self._greeted:
            self._greeted = True
            self._smp.count_trainers(1)
        row = None
        if request.coord is not None:
            self._coord = request.coord
            row = self._smp.watchdog.attend(self._pid, self._coord, self._hang_up)
        pid = self._smp.system.getpid()
        texts = {each.variable: each.text(self._smp.environment) for each in OF_AN_SMP}
        return messages.Greeted(
            node=self._store.node, pid=pid, row=row, speaks=spoken(), release=RELEASE, settings=texts
        )

    def _check_room(self) -> None:
        """Raise `ConfigError` if another run of this job is training here.

        Called for a trainer that has joined no epoch: admitting it would fence the other run and take over its
        protected snapshots.
        """
        other = self._smp.watchdog.await_room(self._pid, ROOM_DEADLINE_S)
        if other is not None:
            raise ConfigError(
                f"job {self._store.job!r} is already running on node {self._store.node}: process {other.pid} is its "
                f"trainer {other.coord}, after step {other.step:,}. Give this run another HOLDFAST_JOB or job=. If it "
                f"replaces the other run, end process {other.pid} first"
            )

    def _inventories(self, request: messages.AskInventories) -> Message:
        """The inventories of the SMPs at these addresses, without their layouts, which the asker knows already."""
        with self._store.changed:
            known = list(self._store.arena.layouts.values())
        found = gather_inventories(self._store.job, request.addresses, known, self._smp.system)
        return {"inventories": [replace(each, layouts={}).to_plain() for each in found]}

    def _join(self, request: messages.Join) -> None:
        self._store.join(request.epoch, request.start)
        if self._coord is not None:
            self._store.state.goes_on(request.epoch, self._coord)
            self._smp.recoveries.goes_on(self._coord)
            self._store.place(self._coord, request.near)
            self._smp.watchdog.joined(self._pid, self._coord, request.epoch)
        self._epoch = request.epoch

    def _configure(self, request: messages.Configure) -> messages.Reserved:
        count = self._store.configure(request.layout)
        self._smp.persister.configured(request.layout)
        return messages.Reserved(count=count)

    def _seal(self, request: messages.Seal) -> None:
        self._store.seal(request)
        self._smp.next_s, self._smp.spent = request.next_s, request.spent
        self._smp.watchdog.note_own(request.coord, request.spent.own)

    def _recover(self, request: messages.Recover) -> messages.Recovered:
        sources, coord = request.sources, request.coord
        self._store.outcomes.note_restored(sources.snapshot)
        if sources.persisted:
            recovered = self._smp.persister.recover(sources.snapshot, sources.layout, coord, request.check)
        else:
            recovered = recover(self._store, sources, coord, REBUILD.value(self._smp.environment), request.check)
        self._smp.recoveries.restored(
            self._store.state.epoch, sources.snapshot, coord, recovered.how, recovered.bytes_fetched
        )
        if len(recovered.digests) > MAX_DIGESTS:
            raise ConfigError(
                f"{coord} has {len(recovered.digests)} units of {recovered.unit_bytes} bytes, and a message "
                f"has room for {MAX_DIGESTS} digests: use longer units, or more ranks with smaller shards"
            )
        return recovered

    def _lend(self, request: messages.Lend) -> None:
        """Make later `AskUnit` requests return units of this snapshot."""
        sources = request.sources
        if sources.persisted:
            raise ConfigError(f"{sources.snapshot} is persisted: units are lent from memory only")
        if self._lender is not None:
            self._lender.close()
        self._store.outcomes.note_restored(sources.snapshot)
        # This node may hold no part of the snapshot. If the next start has ranks on this node only, this layout tells
        # them where the other nodes are.
        self._store.state.keep_layout(sources.layout)
        self._lender = fetcher_of(self._store, sources, by_chain=False)

    def _unit(self, request: messages.AskUnit) -> messages.LentUnit:
        if self._lender is None:
            raise ProtocolError("say first what to `lend` units of")
        before = self._lender.bytes_received
        self._lent, unit_digest = lent_unit(self._store, self._lender, request.coord, request.unit)
        fetched = self._lender.bytes_received - before
        if self._coord is not None:
            epoch, of = self._store.state.epoch, self._lender.snapshot
            self._smp.recoveries.restored(epoch, of, self._coord, "resharded", fetched)
        return messages.LentUnit(digest=unit_digest, bytes_fetched=self._lender.bytes_received)

    def _repair_parity(self, request: messages.RepairParity) -> None:
        sources, group, position = request.sources, request.group, request.position
        if not sources.layout.has_parity(group, position):
            raise ProtocolError(
                f"position {position} of group {group} has no parity in the layout of {sources.snapshot}"
            )
        self._smp.reconciler.order_parity(sources, group, position)

    def _say(self, request: messages.Say) -> None:
        self._smp.said = request.text

    def _ended(self, request: messages.Ended) -> None:
        if request.epoch is None:
            raise ProtocolError("say in which epoch it ends")
        self._end(request.epoch, request.coord, TrainerEnd(request.step, request.failure))

    def _end(self, epoch: int, coord: str, end: TrainerEnd) -> None:
        self._store.state.ended(epoch, coord, end)
        if end.failure != WELL:
            self._smp.recoveries.lost(coord)

    def _note_end(self, step: int) -> None:
        """Record that the trainer disconnected without saying how it ended, after `step` finished steps."""
        if self._coord is None or self._epoch is None:
            return
        try:
            self._end(self._epoch, self._coord, TrainerEnd(min(max(step, 0), MAX_COUNT), KILLED))
        except StaleEpoch:
            pass  # a newer start has begun without this trainer, and has noted how the old one ended
        except ArenaTooSmall as error:
            log.warning("could not record how %s ended: %s", self._coord, error)

    def _stop(self, request: messages.Stop) -> None:
        with self._store.changed:
            others = self._smp.trainers - self._greeted
            if others and not request.force:
                raise ConfigError(
                    f"trainers have {others} connections to the SMP of job {self._store.job!r} on {self._store.node}: "
                    "stop the job first, or use --force: they then start another SMP if they may"
                )
            self._smp.stop(remove=request.remove)

    def _finish(self, request: messages.Finish) -> None:
        self._store.state.check_epoch(request.epoch)
        failpoint("finish.told")
        self._smp.stop(remove=True)


TRAINER_ANSWERS: Mapping[type[messages.Request], Callable[[TrainerConversation, Any], object]] = {
    messages.Hello: TrainerConversation._hello,
    messages.AskInventory: lambda here, request: here._smp.inventory().to_plain(),
    messages.AskInventories: TrainerConversation._inventories,
    messages.Join: TrainerConversation._join,
    messages.Configure: TrainerConversation._configure,
    messages.AskSlots: lambda here, request: messages.SlotFiles(slots=here._store.slots(request.epoch, request.coord)),
    messages.Seal: TrainerConversation._seal,
    messages.Recover: TrainerConversation._recover,
    messages.Lend: TrainerConversation._lend,
    messages.AskUnit: TrainerConversation._unit,
    messages.RepairParity: TrainerConversation._repair_parity,
    messages.Persist: lambda here, request: messages.Accepted(accepted=here._smp.persister.order(request.snapshot)),
    messages.AskPersisted: lambda here, request: here._smp.persister.look(),
    messages.AskPersistedLayout: lambda here, request: here._smp.persister.layout_of(request.run, request.snapshot),
    messages.AskCounters: lambda here, request: here._store.counters.read(),
    messages.Scrub: lambda here, request: scrub(here._store, lambda count: None),
    messages.Say: TrainerConversation._say,
    messages.Ended: TrainerConversation._ended,
    messages.Leave: lambda here, request: here._smp.drainer.hand_over(request.deadline_s),
    messages.Finish: TrainerConversation._finish,
    messages.Stop: TrainerConversation._stop,
}
"""All that a trainer may ask, and how it is answered."""

TrainerRequest: Any = reduce(or_, TRAINER_ANSWERS)
read_trainer_request = reader(TrainerRequest, messages.ANSWERED)


def checked_peer(sock: socket.socket) -> int:
    """The pid at the other end of a unix socket. Raises `ConfigError` if the process is another user's."""
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise ConfigError(f"process {pid} of user {uid} may not use this SMP")
    return pid


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
        op, longest = message.get("op"), self._store.state.longest_unit() if payload else 0
        if payload > longest or (payload and op != "accumulate"):
            stream.close()
            raise ProtocolError(
                f"{payload} raw bytes with the operation {op!r}; units of this job have at most {longest}"
            )
        try:
            request: messages.PeerBulk = messages.read_peer_bulk(message)
        except ProtocolError:
            _discard(payload, stream)
            raise
        if isinstance(request, messages.Accumulate):
            if not self._accumulates:
                self._accumulates = True  # for good: connections that accumulate carry nothing else
                make_background(PRIORITY.value(self._smp.environment))
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

    def ended(self) -> None:
        """Close the links of a chain. Accumulated units stay; a unit that arrived in part was not accumulated."""
        self._links.close()

    def _accumulate(self, request: messages.Accumulate, payload: int, stream: SocketStream) -> Message:
        """Receive a unit and add it to the parity.

        Waits for the parity slot before it takes a buffer, so that a buffer is held only while a unit arrives and is
        added.
        """
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
        choose_codec(1, 1, self._store.backend).add_scaled(own.factor, unit[:count], total[:count])
        self._store.counters.add(bytes_sent=length)
        return messages.SumReply(digest=digest(total), expected=expected, waits=waits), total


def _discard(count: int, stream: SocketStream) -> None:
    """Read and drop `count` raw bytes, so that the next message can be read."""
    stream.set_deadline(CALL_DEADLINE_S)
    nowhere = memoryview(bytearray(min(count, 1 << 16)))
    while count:
        piece = nowhere[: min(count, nowhere.nbytes)]
        stream.receive_into(piece)
        count -= piece.nbytes
    stream.set_deadline(None)
