"""The trainer's client of its node's SMP. Imports neither torch nor grpc.

A trainer may fork data loader workers at any time, so this module starts no thread and no runtime of its own.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.smp_daemon.shared.board import HEARTBEAT_ROWS, Board, RepairState, SnapshotOutcome, TrainerPhase
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    NoFreeSlot,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
)
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import (
    CALL_DEADLINE_S,
    MAX_SAYING,
    MOVE_DEADLINE_S,
    move_deadline,
)
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.messages import (
    Accepted,
    AskCounters,
    AskInventories,
    AskInventory,
    AskPersisted,
    AskPersistedLayout,
    AskSlots,
    AskUnit,
    Await,
    Configure,
    Ended,
    Finish,
    Greeted,
    Hello,
    Inventories,
    Join,
    Lend,
    LentUnit,
    Outcome,
    Persist,
    Recover,
    Recovered,
    RepairParity,
    Request,
    Reserved,
    Say,
    Scrub,
    Seal,
    SlotFile,
    SlotFiles,
    Stop,
    Suspect,
    Verify,
)
from holdfast.smp_daemon.shared.owners import BUSY, Owners, choices, in_words, taken
from holdfast.smp_daemon.shared.paths import not_private, read_owner, socket_path
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.records import ShardRecord, digest, read_json, record_name
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.starts import Start, TrainerEnd
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.smp_daemon.shared.versions import RELEASE, check_range, spoken

log = get_log(__name__)

ANSWER_S = 5.0
"""How much longer than the requested wait the SMP may take to answer."""

AWAIT_S = 600.0
"""Longest wait that one message asks for; a longer one takes several, as a large snapshot takes hours to protect."""

BUSY_S = 0.2
"""How long `take` waits for a slot that the SMP writes, in seconds: it repairs a unit, or wipes a part, in
milliseconds."""

BUSY_POLL_S = 1e-3
END_DEADLINE_S = 5.0
PLACE_DEADLINE_S = 60.0
"""Timeout for queries of the storage of persisted snapshots."""


@dataclass(frozen=True, slots=True)
class RecoveredShard:
    """A shard that this node's SMP has recovered.

    Attributes:
        view: its slot file, mapped.
        how: ``held``, ``repaired``, ``fetched``, ``rebuilt`` or ``persisted``.
        bytes_fetched: bytes fetched over the network for it.
        unit_bytes: length of its units; the last may be shorter.
        digests: digest of each unit, from the seal.
    """

    view: memoryview
    how: str
    bytes_fetched: int
    unit_bytes: int
    digests: tuple[int, ...]

    def __post_init__(self) -> None:
        """Raises `ProtocolError` unless the digests cover the whole slot."""
        if self.unit_bytes < 1 or len(self.digests) != -(-self.view.nbytes // self.unit_bytes):
            raise ProtocolError(
                f"{len(self.digests)} digests of units of {self.unit_bytes} bytes are not those of a slot of "
                f"{self.view.nbytes} bytes"
            )

    def matches(self, unit: int) -> bool:
        """Whether a unit still has the digest that it was sealed with. Reads the unit with the GIL released."""
        offset = unit * self.unit_bytes
        return digest(self.view[offset : offset + self.unit_bytes]) == self.digests[unit]


@dataclass(frozen=True, slots=True)
class TakenSlot:
    """A slot that a trainer has taken to write into.

    Attributes:
        file: its file in the arena. number: see `owners.taken`. view: its bytes.
    """

    file: str
    number: int
    view: memoryview


class SmpClient:
    """A connection to this node's SMP. Calls from several threads take turns; each blocks until the answer.

    Attributes:
        near: the NUMA node on which the SMP should place the trainer's slots, sent by `join`; None: any.
        epoch: the epoch that was joined last; None: none was.

    Every call raises `SmpUnavailable` if the SMP is gone, `DeadlineExceeded` if it does not answer in time, and
    whatever error the SMP replies with.
    """

    def __init__(self, arena: Path, job: str, coord: str | None = None, system: System = MACHINE) -> None:
        """Connect. Blocks for seconds if processes of an earlier start of the job are still ending.

        Args:
            coord: the trainer's coordinate, if the SMP should watch it. The trainer must then call `heartbeat`.

        Raises:
            SmpUnavailable: no SMP serves `arena`.
            ConfigError: the SMP serves another job; or, with `coord`, another run of this job is active on this node.
            VersionMismatch: the SMP has a version of holdfast that this one cannot talk to.
        """
        self.arena = arena
        self.system = system
        self._coord = coord
        self._row: int | None = None
        self._job = job
        # Guards `_maps`, `_taken` and `_given_back`, and is held while a file is mapped, but not while its pages are
        # touched, which takes a minute for a large slot. The threads that reserve slots, copy or seal take it. No
        # other lock is taken under it.
        self._mapping = system.Lock()
        # Held from a request to its reply, so that the messages of several threads do not mix on the connection. The
        # training thread and those that copy, reserve and restore take it; `_call` says how long they wait for it.
        self._lock = system.Lock()
        self._maps: dict[str, tuple[int, memoryview]] = {}
        self._lengths: dict[str, tuple[int, int]] = {}  # the epoch and length of each shard's slots; see `slots`
        self._owners = Owners(arena)
        self._taken = 0
        self._given_back: set[tuple[str, str]] = set()
        self._stream: SocketStream | None = None
        self._connections = 0
        self._process: Any = None
        self.epoch: int | None = None
        self.near: int | None = None
        self.reconnect()

    def reconnect(self, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Connect again after `SmpUnavailable`. Raises the errors of the constructor, and `DeadlineExceeded`."""
        self._hang_up()
        self._connections += 1
        try:
            is_served = socket_path(self.arena).exists()
        except PermissionError as error:
            closed = self.arena if self.arena.parent.stat().st_uid == os.getuid() else self.arena.parent
            raise ConfigError(f"{closed} {not_private(closed, os.getuid())}") from error
        if not is_served:
            raise SmpUnavailable(f"no SMP serves {self.arena}: start one with `python -m holdfast.smp_daemon`")
        self._stream = connect(socket_path(self.arena), deadline_s, network=self.system)
        try:
            self._greet(deadline_s)
        except BaseException:  # a signal handler may raise, too; a connection that was not greeted is none
            self._hang_up()
            raise

    def _greet(self, deadline_s: float) -> None:
        # With an epoch the SMP takes this for a trainer that comes back, without one for a new run of the job.
        oldest, newest = spoken()
        hello = Hello(
            job=self._job, version=oldest, newest=newest, release=RELEASE, coord=self._coord, epoch=self.epoch
        )
        greeted = from_plain(Greeted, self._call(hello, deadline_s), "how an SMP greets")
        check_range(f"the SMP of {self.arena}", greeted.speaks, greeted.release)
        self.node, self.pid, row = greeted.node, greeted.pid, greeted.row
        self._watch()
        self._board = Board(self.arena / "board", files=self.system)
        self._row = row if row is not None and 0 <= row < HEARTBEAT_ROWS else None

    def _watch(self) -> None:
        """Watch the process of the SMP, if it is visible here."""
        self._unwatch()
        with suppress(OSError):
            self._process = self.system.pidfd_open(self.pid)

    def _unwatch(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.system.close(process)

    @property
    def connection(self) -> int | None:
        """Number of the current connection; None once it is over, as far as a call or the SMP's end has shown. One
        system call; never blocks. While another thread reconnects, it may be None although there is one again."""
        stream, process = self._stream, self._process
        if stream is None or stream.closed or (process is not None and self.system.await_end(process, 0)):
            return None
        return self._connections

    def inventory(self) -> Inventory:
        """What the SMP holds."""
        return Inventory.read(self._call(AskInventory()))

    def inventories(self, addresses: Collection[Address]) -> list[Inventory]:
        """What the SMPs at `addresses` hold, as far as they answer, without layouts. Blocks while they are asked."""
        reply = self._call(AskInventories(addresses=tuple(addresses)), MOVE_DEADLINE_S)
        return [Inventory.read(each) for each in from_plain(Inventories, reply, "what SMPs hold").inventories]

    def join(self, epoch: int, start: Start | None = None, *, deadline_s: float | None = None) -> None:
        """Enter an epoch, and fence every older one.

        Args:
            start: set if the job starts with this epoch.
            deadline_s: timeout for another thread's call to end, and again for the answer. By default the wait for the
                other call has no limit of its own, and the answer has `CALL_DEADLINE_S`.
        """
        message = Join(epoch=epoch, start=start, near=self.near)
        if deadline_s is None:
            self._call(message)
        else:
            self._call(message, deadline_s, turn_s=deadline_s)
        if epoch != self.epoch:
            with self._mapping:
                self._given_back.clear()
        self.epoch = self._owners.epoch = epoch
        self._board = Board(self.arena / "board", files=self.system)

    def configure(self, layout: Layout, *, wait: bool = True) -> int:
        """Have the SMP reserve memory for `layout`. Returns how many slots of every shard, and of parity, may be used.

        Args:
            wait: block until all may be used, which takes as long as zeroing the memory. An older SMP always does.

        Raises:
            ArenaTooSmall: there is not enough room.
            DeadlineExceeded: not all of the memory was reserved in time.
        """
        message = Configure(layout=layout, wait=wait)
        reply = self._call_to_move(message, 0) if wait else self._call(message, MOVE_DEADLINE_S)
        count = _reserved(reply, layout.slots)
        if wait and count < layout.slots:
            raise DeadlineExceeded(f"the SMP of {self.arena} has reserved {count} of {layout.slots} slots in time")
        return count

    def ready(self, epoch: int) -> int:
        """How many slots of every shard, and of parity, may be used in that epoch; or `board.REFUSED`: `configure` says
        why. Reads shared memory; never blocks."""
        return self._board.ready(epoch)

    def slots(self, epoch: int, coord: str) -> list[memoryview]:
        """All slots that `take` may return for `coord` in that epoch, mapped. Mappings of other slots are dropped. May
        take as long as touching all pages of the slots."""
        reply = self._call(AskSlots(epoch=epoch, coord=coord), MOVE_DEADLINE_S)
        there = from_plain(SlotFiles, reply, "the slots of a shard").slots
        names = {slot.file for slot in there}
        with self._mapping:
            self._maps = {name: known for name, known in self._maps.items() if name in names}
        if there:
            self._lengths[coord] = epoch, there[0].bytes
        return [self._map(slot) for slot in there]

    def take(self, coord: str, keep: Collection[SnapshotId]) -> TakenSlot:
        """A slot of the epoch that was joined, to write a shard into: one that is free, or that holds a snapshot which
        is not in `keep`. The SMP is not asked once `slots` has told of one. Blocks for `BUSY_S` at most.

        Raises:
            NoFreeSlot: there is none.
            StaleEpoch: a newer epoch has begun.
        """
        epoch = self.epoch or 0
        if self._lengths.get(coord, (0, 0))[0] != epoch:
            self.slots(epoch, coord)
        limit_s, before = self.system.monotonic() + BUSY_S, None
        while True:
            marks = self._marks(coord, epoch)
            with self._mapping:
                given_back = set(self._given_back)
            for file, owner in choices(marks, keep, given_back):
                if (slot := self._take(file, owner)) is not None:
                    return slot
            if self._board.epoch != epoch:
                raise StaleEpoch(f"epoch {epoch} of this trainer is over")
            is_steady = marks == before and BUSY not in marks.values()
            if is_steady or self.system.monotonic() > limit_s:
                raise NoFreeSlot(f"no slot of {coord} is free: {in_words(marks.values())}")
            before = marks
            self.system.Event().wait(BUSY_POLL_S)

    def _marks(self, coord: str, epoch: int) -> dict[str, str]:
        """The owner of each slot of the epoch's layout."""
        of, length = self._lengths.get(coord, (0, 0))
        marks = {}
        for file, owners in self._owners.found().items():
            mine = [owner for owner, since in owners if since == of == epoch and file.rsplit(".", 2)[0] == coord]
            with suppress(FileNotFoundError):  # it is deleted meanwhile
                if mine and (self.arena / file).stat().st_size == length:
                    marks[file] = mine[-1]
        return marks

    def _take(self, file: str, owner: str) -> TakenSlot | None:
        """Take a slot from its owner; None if somebody else was faster, or it has another file by now."""
        with self._mapping:
            self._taken += 1
            number = self._taken
            self._given_back.discard((file, owner))
        if not self._owners.change(file, owner, taken(number)):
            return None
        try:
            status = (self.arena / file).stat()
            view = self._map(SlotFile(file=file, inode=status.st_ino, bytes=status.st_size))
        except (FileNotFoundError, StaleEpoch):
            return None
        return TakenSlot(file, number, view)

    def give_back(self, slot: TakenSlot) -> None:
        """A slot that was not sealed, or perhaps was, may be taken again if it is still this trainer's. Nothing may
        write into it any more. Returns at once."""
        with self._mapping:
            self._given_back.add((slot.file, taken(slot.number)))

    def seal(
        self,
        snapshot: SnapshotId,
        coord: str,
        slot: TakenSlot,
        keep: Collection[SnapshotId],
        protected: SnapshotId | None = None,
        with_parity: Collection[SnapshotId] | None = None,
        *,
        encode: bool = True,
        next_s: float = 0.0,
        digests: tuple[int, ...] = (),
    ) -> None:
        """Have the SMP check and commit a shard whose bytes are all written. Frees older snapshots that are not in
        `keep`, and parity of those that are not in `with_parity`.

        Args:
            protected: the newest snapshot that the whole job knows to be protected. It must be in `keep`.
            encode: whether the snapshot is to be protected; the same on every rank.
            next_s: how long after it the next one is to be protected, in seconds, for operators; 0: unknown.
            digests: digests of all units, taken as they were written; empty: the SMP reads the slot for them.
        """
        request = Seal(
            snapshot=snapshot,
            coord=coord,
            slot=slot.file,
            taken=slot.number,
            keep=tuple(keep),
            protected=protected,
            with_parity=None if with_parity is None else tuple(with_parity),
            encode=encode,
            next_s=next_s,
            digests=digests,
        )
        self._call(request, self._read_deadline(f"{coord}.*.safetensors"))

    def sealed_shard(self, snapshot: SnapshotId, coord: str, slot: TakenSlot) -> RecoveredShard:
        """The shard that was sealed in `slot`, with the digests from its commit record. Reads a file of the arena, and
        does not ask the SMP. Thread-safe.

        Raises:
            StaleEpoch: the slot does not hold that shard any more.
        """
        data = read_json(self.arena / record_name(slot.file), self.system)
        record = None if data is None else from_plain(ShardRecord, data, "a commit record")
        if record is None or (record.snapshot, record.coord) != (snapshot, coord):
            raise StaleEpoch(f"the slot of {coord} does not hold {snapshot} any more")
        return RecoveredShard(slot.view, "held", 0, record.unit_bytes, record.digests)

    def outcome(self, snapshot: SnapshotId) -> SnapshotOutcome:
        """What became of a snapshot, as far as this node knows. Reads shared memory; never blocks."""
        return self._board.outcome(*snapshot)

    def pause(self, index: int, until_s: float) -> None:
        """Ask the SMP, for trainer `index` of this node, to send no encoding traffic until `until_s`
        (`time.monotonic`); see `Board.pause`."""
        self._board.pause(index, until_s)

    def resume(self, index: int) -> None:
        """Withdraw the request of trainer `index` that `pause` made."""
        self._board.resume(index)

    def heartbeat(self, phase: TrainerPhase, step: int) -> None:
        """Note that the training thread is alive and has finished `step` steps. Writes shared memory; never blocks."""
        if self._row is not None:
            self._board.heartbeat(self._row, phase, step)

    def copying(self, step: int | None) -> None:
        """Note that the snapshot of `step` is being copied; None: it is sealed or given up. Writes shared memory; never
        blocks."""
        if self._row is not None:
            self._board.copying(self._row, step)

    def await_outcome(self, snapshot: SnapshotId, deadline_s: float) -> SnapshotOutcome:
        """Block until `snapshot` is protected or has failed, at most `deadline_s`, or `ANSWER_S` more if the SMP does
        not respond."""
        until_s = self.system.monotonic() + deadline_s
        while True:
            left_s = min(max(0.0, until_s - self.system.monotonic()), AWAIT_S)
            reply = self._call(Await(snapshot=snapshot, deadline_s=left_s), left_s + ANSWER_S)
            outcome = SnapshotOutcome(from_plain(Outcome, reply, "what became of a snapshot").outcome)
            if outcome is not SnapshotOutcome.PENDING or self.system.monotonic() >= until_s:
                return outcome

    def recover(self, sources: Sources, coord: str, *, check: bool = True) -> RecoveredShard:
        """Have the SMP recover `coord` from wherever its bytes are. Returns the shard, mapped.

        Args:
            check: have the SMP read a shard that it holds already, and repair it in place. If False, the SMP answers
                at once for such a shard, and the caller must compare each unit with its digest before using it.
        """
        message = Recover(epoch=self.epoch, sources=sources, coord=coord, check=check)
        reply = self._call_to_move(message, sources.layout.shard_bytes(coord))
        got = from_plain(Recovered, reply, "a shard that is held again")
        return RecoveredShard(self._map(got, touch=False), got.how, got.bytes_fetched, got.unit_bytes, got.digests)

    def lend(self, sources: Sources) -> None:
        """Choose the snapshot whose units `unit` returns from now on, whichever SMP holds them."""
        self._call(Lend(epoch=self.epoch, sources=sources))

    def unit(self, coord: str, index: int, out: memoryview) -> int:
        """Fill `out` with unit `index` of shard `coord`, verified. `out` must be as long as the unit. Blocks meanwhile.

        Returns the bytes that the SMP has fetched over the network since `lend`.

        Raises:
            Unrecoverable, DamagedSnapshot: the unit cannot be recovered intact.
        """
        message = AskUnit(epoch=self.epoch, coord=coord, unit=index)
        with self._lock:
            stream = self._connected()
            stream.set_deadline(MOVE_DEADLINE_S)
            due = False
            try:
                reply, payload = call(stream, message)
                due = True
                if payload != out.nbytes:
                    raise ProtocolError(f"unit {index} of {coord} has {payload} bytes there, and {out.nbytes} here")
                found = stream.receive_into(out)
            except BaseException as error:
                if due or not isinstance(error, HoldfastError):
                    stream.close()  # the rest of the unit would be taken for the next reply
                raise
        lent = from_plain(LentUnit, reply, "a unit that is lent")
        if found != lent.digest:
            raise DamagedSnapshot(f"unit {index} of {coord} was damaged on its way from the SMP")
        return lent.bytes_fetched

    @property
    def persist_due(self) -> bool:
        """Whether this node is ready to persist a snapshot. Reads shared memory; never blocks."""
        return self._board.due

    def persist(self, snapshot: SnapshotId) -> bool:
        """Have the SMP persist its part of a snapshot in the background. Returns whether it does."""
        return self._is_accepted(Persist(snapshot=snapshot))

    def persisted(self, deadline_s: float = PLACE_DEADLINE_S) -> Persisted:
        """What is persisted, as far as the SMP sees. Raises `PlaceError` if the storage fails."""
        return from_plain(Persisted, self._call(AskPersisted(), deadline_s), "what is persisted")

    def persisted_layout(self, run: str, snapshot: SnapshotId) -> Layout:
        """The layout that a persisted snapshot was taken in. Raises `PlaceError`, `DamagedSnapshot`."""
        return Layout.read(self._call(AskPersistedLayout(run=run, snapshot=snapshot), PLACE_DEADLINE_S))

    def verify(self) -> bool:
        """Have the SMP check the newest sealed shards that it holds, and repair them, in the background.

        Returns at once: False if such a check is running already, and no other was started.
        """
        return self._is_accepted(Verify())

    def repair_parity(self, sources: Sources, group: int, position: int) -> None:
        """Have the SMP recompute the parity of a lost node in the background, for as long as this epoch lasts. Harmless
        if repeated."""
        self._call(RepairParity(epoch=self.epoch, sources=sources, group=group, position=position))

    def repaired(self) -> RepairState:
        """How far everything is that trainers of this node have ordered with `repair_parity` in the epoch that this one
        has joined. Reads shared memory; never blocks."""
        return RepairState.UNDER_WAY if self.epoch is None else self._board.repair(self.epoch)

    def say(self, text: str) -> None:
        """Have the SMP show the first `MAX_SAYING` characters of `text` to operators, in place of the previous text."""
        self._call(Say(epoch=self.epoch, text=text[:MAX_SAYING]))

    def suspect(self, node: str) -> None:
        """Tell the SMP that `node` seems to be dead. The SMP still decides by its own checks, but makes them sooner."""
        self._call(Suspect(node=node))

    def ended(self, coord: str, end: TrainerEnd) -> None:
        """Report how the job ends for this trainer, if it has joined an epoch. Blocks for seconds at most."""
        if self.epoch is not None:
            said = Ended(epoch=self.epoch, coord=coord, step=end.step, failure=end.failure)
            self._call(said, END_DEADLINE_S, turn_s=END_DEADLINE_S)

    def counters(self) -> dict[str, int]:
        """What the SMP has counted since it started; see `smp_daemon.shared.counters.Counts`."""
        return from_plain(dict[str, int], self._call(AskCounters()), "what an SMP has counted")

    def scrub(self) -> dict[str, int]:
        """Have the SMP check every sealed unit now, and repair damaged ones. Returns the counts ``units``, ``damaged``
        and ``repaired``.

        Blocks for about one read of the arena.
        """
        return from_plain(dict[str, int], self._call(Scrub(), self._read_deadline("*")), "what a scrub has found")

    def _read_deadline(self, names: str) -> float:
        """Timeout for an SMP to read the files of its arena with such names."""
        length = 0
        for path in self.arena.glob(names):
            with suppress(FileNotFoundError):  # it is deleted meanwhile
                length += path.stat().st_size
        return move_deadline(length)

    def finish(self, epoch: int) -> None:
        """Report that the job has ended well. The SMP removes its arena and ends; blocks until it has.

        Raises:
            SmpUnavailable: it ended before it had removed the whole arena.
        """
        self._end(Finish(epoch=epoch), removes=True)

    def stop(self, *, remove: bool, force: bool) -> None:
        """Stop the SMP. Blocks until it has ended.

        Args:
            remove: remove the arena; else it stays for a successor.
            force: stop even while other trainers are connected.

        Raises:
            ConfigError: other trainers are connected, and `force` is False.
        """
        self._end(Stop(remove=remove, force=force), removes=remove)

    def _end(self, message: Request, *, removes: bool) -> None:
        if self._process is None:
            raise SmpUnavailable(f"the process of the SMP of {self.arena} is gone, or of another pid namespace")
        try:
            try:
                self._call(message)
            except SmpUnavailable:
                pass  # the SMP may end before it sends its answer
            if not self.system.await_end(self._process, CALL_DEADLINE_S):
                raise DeadlineExceeded(f"SMP {self.pid} did not end within {CALL_DEADLINE_S:.0f} s")
            if removes and (self.arena / "smp.json").exists():
                raise SmpUnavailable(f"SMP {self.pid} ended and left {self.arena} behind")
        finally:
            self.close()

    def close(self) -> None:
        """Close the connection and drop all mappings."""
        self.heartbeat(TrainerPhase.GONE, 0)
        self._row = None
        self._hang_up()
        self._unwatch()
        with self._mapping:
            self._maps.clear()

    def _call(self, message: Request, deadline_s: float = CALL_DEADLINE_S, turn_s: float = -1) -> Message:
        """Send a request and return its reply. `turn_s`: timeout for another thread's call to end; -1: none."""
        if turn_s < 0:
            with self._lock:  # not `acquire`: a signal handler cannot raise between taking the lock and this block
                return self._ask(message, deadline_s)
        if not self._lock.acquire(timeout=turn_s):
            raise DeadlineExceeded(f"the SMP of {self.arena} is still busy with another call of this trainer")
        try:
            return self._ask(message, deadline_s)
        finally:
            self._lock.release()

    def _call_to_move(self, message: Request, count: int) -> Message:
        """Send a request and return its reply, however long the SMP works on it, as long as bytes move.

        `count`: most bytes that the SMP works on without saying so, as when it digests them.
        """
        board = self._board
        seen = board.moves

        def moves() -> bool:
            nonlocal seen
            before, seen = seen, board.moves
            return seen != before

        with self._lock:
            stream = self._connected()
            stream.goes_on = moves
            try:
                return self._ask(message, move_deadline(count))
            finally:
                stream.goes_on = None

    def _ask(self, message: Request, deadline_s: float) -> Message:
        stream = self._connected()
        stream.set_deadline(deadline_s)
        try:
            reply, payload = call(stream, message)
        except (DeadlineExceeded, SmpUnavailable) as error:
            if not stream.closed:  # the SMP has answered: this is its own error
                raise
            raise type(error)(self._told(error)) from error
        if payload:
            stream.close()
            raise ProtocolError("the SMP sent bytes that were not requested")
        return reply

    def _told(self, error: HoldfastError) -> str:
        """What to tell of a connection that failed: whose it was, and what to do."""
        try:
            owner = read_owner(self.arena, self.system)
        except ProtocolError:
            owner = None
        if owner is None:
            return f"the SMP of {self.arena}: {error}"
        told = f"SMP {owner.pid} of node {owner.node}: {error}"
        if not isinstance(error, DeadlineExceeded):
            return told
        return f"{told}: `kill -CONT {owner.pid}` if it is stopped, else kill it: the next takes over what it holds"

    def _connected(self) -> SocketStream:
        if self._stream is None:
            raise SmpUnavailable(f"the connection to the SMP of {self.arena} is over")
        return self._stream

    def _is_accepted(self, message: Request) -> bool:
        return from_plain(Accepted, self._call(message), "whether that is done").accepted

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()

    def _map(self, slot: SlotFile, *, touch: bool = True) -> memoryview:
        """Map a slot file, or return the mapping that exists already.

        Args:
            touch: whether to touch its pages, so that a copy into it does not wait for the kernel. Not for a slot that
                is read first: reading maps pages, too, many at a time and in each of the threads that load.
        """
        with self._mapping:
            known = self._maps.get(slot.file)
            if known is not None and known[0] == slot.inode and known[1].nbytes == slot.bytes:
                return known[1]
            mapped = self._map_file(slot)
            view = memoryview(mapped)
            self._maps[slot.file] = (slot.inode, view)
        # Without the lock, or a copy into another slot would wait for the minute that a large slot takes.
        try:
            if touch:
                self.system.populate(mapped)
        except OSError as error:
            log.debug("a slot is not touched ahead of time, and the first copy will be slower: %s", error)
        return view

    def _map_file(self, slot: SlotFile) -> mmap.mmap:
        name, inode, length = slot.file, slot.inode, slot.bytes
        files = self.system
        if Path(name).name != name:
            raise ProtocolError(f"{name!r} is not a file of the arena")
        try:
            fd = files.open(self.arena / name, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError as error:
            raise StaleEpoch(f"the slot {name} was taken away before it was opened") from error
        except OSError as error:
            raise ProtocolError(f"{name!r} is not a file of the arena: {error.strerror}") from error
        try:
            status = files.fstat(fd)
            if status.st_ino != inode:
                raise StaleEpoch(f"the slot {name} was taken away before it was opened")
            if status.st_size != length or length < 1:
                raise ProtocolError(f"the slot {name} has {status.st_size} bytes, not {length}")
            mapped = files.map(fd, length)
        finally:
            files.close(fd)
        mapped.madvise(mmap.MADV_DONTDUMP)
        return mapped


def _reserved(reply: Message, slots: int) -> int:
    count = from_plain(Reserved, reply, "how much is reserved").count
    return slots if count is None else count
