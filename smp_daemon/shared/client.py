"""The trainer's client of its node's SMP: how it is found, greeted and watched, and what it is asked.

Imports neither torch nor grpc: a trainer may fork at any time, so this module starts no thread and no runtime.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from holdfast.smp_daemon.shared import messages
from holdfast.smp_daemon.shared.board import HEARTBEAT_ROWS, Board, RepairState, SnapshotOutcome, TrainerPhase
from holdfast.smp_daemon.shared.deadlines import Progress
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
)
from holdfast.smp_daemon.shared.goodput import UNTOLD, Spent
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import (
    CALL_DEADLINE_S,
    MAX_SAYING,
    MOVE_DEADLINE_S,
    move_deadline,
    slowest_s,
)
from holdfast.smp_daemon.shared.paths import known_owner, not_private, socket_path
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.records import ShardRecord, Unit, read_json, record_name
from holdfast.smp_daemon.shared.sources import Address, Sources
from holdfast.smp_daemon.shared.starts import Start, TrainerEnd
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot, TrainerSlots
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.smp_daemon.shared.versions import RELEASE, check_range, spoken

ANSWER_S = 5.0
"""How much longer than the requested wait the SMP may take to answer."""

FIRST_LOOK_S = 2e-3
"""Pause before the board is looked at again, in seconds, at first."""

LATER_LOOK = 0.02
"""A pause lasts this share of the time that was waited before, so that a long wait takes few looks."""

END_DEADLINE_S = 5.0
"""How long a trainer that ends waits to report it, in seconds: twice, for its turn and for the answer. The SMP sees
that it has ended in any case, but then not how."""

PLACE_DEADLINE_S = 60.0
"""Timeout for queries of the storage of persisted snapshots."""


class SmpConnection:
    """A connection to the SMP of an arena. Calls from several threads take turns; each blocks until the answer.

    Attributes:
        epoch: the epoch that was joined last; None: none was.
        node, pid, settings: of the SMP that serves there; see `messages.Greeted`.
        board: of the epoch that was joined last. Looking at it needs no answer of the SMP.

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
        # Held from a request to its reply, so that the messages of several threads do not mix on the connection. The
        # training thread and those that copy, reserve and restore take it; `_call` says how long they wait for it.
        self._lock = system.Lock()
        self._stream: SocketStream | None = None
        self._connections = 0
        self._process: int | None = None
        self.epoch: int | None = None
        self.reconnect()

    def reconnect(self, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Connect again after `SmpUnavailable`. Raises the errors of the constructor, and `DeadlineExceeded`."""
        self._hang_up()
        self._connections += 1
        try:
            is_served = socket_path(self.arena).exists()
        except PermissionError as error:
            closed = next(each for each in (*reversed(self.arena.parents), self.arena) if not os.access(each, os.X_OK))
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
        hello = messages.Hello(job=self._job, speaks=spoken(), release=RELEASE, coord=self._coord, epoch=self.epoch)
        greeted = from_plain(messages.Greeted, self._call(hello, deadline_s), "how an SMP greets")
        check_range(f"the SMP of {self.arena}", greeted.speaks, greeted.release)
        self.node, self.pid, self.settings, row = greeted.node, greeted.pid, greeted.settings, greeted.row
        self._watch()
        self._look_at_board()
        self._row = row if row is not None and 0 <= row < HEARTBEAT_ROWS else None

    def _watch(self) -> None:
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

    def _look_at_board(self) -> None:
        """Map the board that is there now: each epoch has another file."""
        self.board = Board(self.arena / "board", files=self.system)

    def close(self) -> None:
        """Close the connection."""
        if self._row is not None:
            self.board.heartbeat(self._row, TrainerPhase.GONE, 0)
        self._row = None
        self._hang_up()
        self._unwatch()

    def _end(self, message: messages.Request, *, removes: bool) -> None:
        if self._process is None:
            raise SmpUnavailable(f"the process of the SMP of {self.arena} is gone, or of another pid namespace")
        try:
            limit_s = CALL_DEADLINE_S + slowest_s(self._bytes_of("*"))  # it gives all its memory back first
            with suppress(SmpUnavailable):  # the SMP may end before it sends its answer
                self._call(message)
            if not self.system.await_end(self._process, limit_s):
                raise DeadlineExceeded(f"SMP {self.pid} did not end within {limit_s:.0f} s")
            owner = known_owner(self.arena, self.system) if removes else None
            if owner is not None and owner.pid == self.pid:  # else a successor has come to the same place already
                raise SmpUnavailable(f"SMP {self.pid} ended and left {self.arena} behind")
        finally:
            self.close()

    def _call(self, message: messages.Request, deadline_s: float = CALL_DEADLINE_S, turn_s: float = -1) -> Message:
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

    def _call_to_move(self, message: messages.Request, count: int) -> Message:
        """Send a request and return its reply, however long the SMP works on it, as long as bytes move.

        `count`: most bytes that the SMP works on without saying so, as when it digests them.
        """
        board = self.board
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

    def _ask(self, message: messages.Request, deadline_s: float) -> Message:
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

    def _bytes_of(self, names: str) -> int:
        length = 0
        for path in self.arena.glob(names):
            with suppress(FileNotFoundError):  # it is deleted meanwhile
                length += path.stat().st_size
        return length

    def _told(self, error: HoldfastError) -> str:
        """What to tell of a connection that failed: whose it was, and what to do."""
        owner = known_owner(self.arena, self.system)
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

    def _call_for_bytes(self, message: messages.Request, out: memoryview, what: str) -> tuple[Message, int]:
        """Send a request whose reply comes with as many bytes as `out` takes. Returns the reply and their digest."""
        with self._lock:
            stream = self._connected()
            stream.set_deadline(MOVE_DEADLINE_S)
            due = False
            try:
                reply, payload = call(stream, message)
                due = True
                if payload != out.nbytes:
                    raise ProtocolError(f"{what} has {payload} bytes there, and {out.nbytes} here")
                return reply, stream.receive_into(out)
            except BaseException as error:
                if due or not isinstance(error, HoldfastError):
                    stream.close()  # the rest of the unit would be taken for the next reply
                raise

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()


@dataclass(frozen=True, slots=True)
class RecoveredShard:
    """A shard that this node's SMP has recovered: its slot file, mapped, and what `messages.Recovered` says of it."""

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

    def unit(self, number: int) -> Unit:
        """One of its units, and its digest."""
        begin = number * self.unit_bytes
        return Unit(self.view[begin : begin + self.unit_bytes], self.digests[number])


class SmpClient(SmpConnection):
    """What a trainer, or a command, asks of its node's SMP; see `SmpConnection` for how.

    Attributes:
        near: the NUMA node on which the SMP should place the trainer's slots, sent by `join`; None: any.
    """

    def __init__(self, arena: Path, job: str, coord: str | None = None, system: System = MACHINE) -> None:
        """See `SmpConnection`."""
        super().__init__(arena, job, coord, system)
        self.near: int | None = None
        self._slots = TrainerSlots(arena, system)

    def close(self) -> None:
        """Close the connection and drop all mappings."""
        super().close()
        self._slots.forget()

    def inventory(self) -> Inventory:
        """What the SMP holds."""
        return Inventory.read(self._call(messages.AskInventory()))

    def inventories(self, addresses: Collection[Address]) -> list[Inventory]:
        """What the SMPs at `addresses` hold, as far as they answer, without layouts. Blocks while they are asked."""
        reply = self._call(messages.AskInventories(addresses=tuple(addresses)), MOVE_DEADLINE_S)
        return [Inventory.read(each) for each in from_plain(messages.Inventories, reply, "what SMPs hold").inventories]

    def join(self, epoch: int, start: Start | None = None, *, deadline_s: float | None = None) -> None:
        """Enter an epoch, and fence every older one.

        Args:
            start: set if the job starts with this epoch.
            deadline_s: timeout for another thread's call to end, and again for the answer. By default the wait for the
                other call has no limit of its own, and the answer has `CALL_DEADLINE_S`.
        """
        message = messages.Join(epoch=epoch, start=start, near=self.near)
        if deadline_s is None:
            self._call(message)
        else:
            self._call(message, deadline_s, turn_s=deadline_s)
        self._slots.enter(epoch)
        self.epoch = epoch
        self._look_at_board()

    def configure(self, layout: Layout, *, wait: bool = True) -> int:
        """Have the SMP reserve memory for `layout`. Returns how many slots of every shard, and of parity, may be used.

        Args:
            wait: block until all may be used, which takes as long as zeroing the memory.

        Raises:
            ArenaTooSmall: there is not enough room.
            DeadlineExceeded: not all of the memory was reserved in time.
        """
        message, progress, moves = messages.Configure(layout=layout), Progress(self.system.monotonic), -1
        while True:
            reply = self._call(message, MOVE_DEADLINE_S)
            count = from_plain(messages.Reserved, reply, "how much is reserved").count
            if not wait or count >= layout.slots:
                return count
            is_news, began_s = False, self.system.monotonic()
            while not is_news:
                if (now := self.board.moves) != moves:
                    moves = now
                    progress.moved()
                if progress.is_stuck:
                    raise DeadlineExceeded(f"the SMP of {self.arena} has reserved {count} of {layout.slots} slots")
                self._look_again(began_s)
                is_news = self.board.epoch != layout.epoch or self.board.ready(layout.epoch) != count

    def slots(self, epoch: int, coord: str) -> list[memoryview]:
        """All slots that `take` may return for `coord` in that epoch, mapped. Mappings of other slots are dropped. May
        take as long as touching all pages of the slots."""
        reply = self._call(messages.AskSlots(epoch=epoch, coord=coord), MOVE_DEADLINE_S)
        return self._slots.learn(epoch, coord, from_plain(messages.SlotFiles, reply, "the slots of a shard").slots)

    def take(self, coord: str, keep: Collection[SnapshotId]) -> TakenSlot:
        """A slot of the epoch that was joined, to write a shard into: one that is free, or that holds a snapshot which
        is not in `keep`. The SMP is not asked once `slots` has told of one. Blocks for `trainer_slots.BUSY_S` at most.

        Raises:
            NoFreeSlot: there is none.
            StaleEpoch: a newer epoch has begun.
        """
        epoch = self.epoch or 0
        if not self._slots.knows(epoch, coord):
            self.slots(epoch, coord)
        return self._slots.take(epoch, coord, keep, lambda: self.board.epoch != epoch)

    def give_back(self, slot: TakenSlot) -> None:
        """A slot that was not sealed, or perhaps was, may be taken again if it is still this trainer's. Nothing may
        write into it any more. Returns at once."""
        self._slots.give_back(slot)

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
        spent: Spent = UNTOLD,
        digests: tuple[int, ...] = (),
    ) -> None:
        """Have the SMP check and commit a shard whose bytes are all written. Frees older snapshots that are not in
        `keep`, and parity of those that are not in `with_parity`. The arguments are those of `messages.Seal`."""
        request = messages.Seal(
            snapshot=snapshot,
            coord=coord,
            slot=slot.file,
            taken=slot.number,
            keep=tuple(keep),
            protected=protected,
            with_parity=None if with_parity is None else tuple(with_parity),
            encode=encode,
            next_s=next_s,
            spent=spent,
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
        return self.board.outcome(*snapshot)

    def heartbeat(self, phase: TrainerPhase, step: int) -> None:
        """Note that the training thread is alive and has finished `step` steps. Writes shared memory; never blocks."""
        if self._row is not None:
            self.board.heartbeat(self._row, phase, step)

    def copying(self, step: int | None) -> None:
        """Note that the snapshot of `step` is being copied; None: it is sealed or given up. Writes shared memory; never
        blocks."""
        if self._row is not None:
            self.board.copying(self._row, step)

    def await_outcome(self, snapshot: SnapshotId, deadline_s: float) -> SnapshotOutcome:
        """Block until `snapshot` is protected or has failed, at most for `deadline_s` and the last pause; see
        `LATER_LOOK`."""
        began_s = self.system.monotonic()
        until_s = began_s + deadline_s
        while (outcome := self.outcome(snapshot)) is SnapshotOutcome.PENDING and self.system.monotonic() < until_s:
            self._look_again(began_s)
        return outcome

    def _look_again(self, began_s: float) -> None:
        """Pause before another look at the board, in a wait that began then. Raises `SmpUnavailable` if nobody posts
        there any more."""
        if self.connection is None:
            raise SmpUnavailable(f"the connection to the SMP of {self.arena} is over")
        waited_s = self.system.monotonic() - began_s
        self.system.sleep(max(FIRST_LOOK_S, LATER_LOOK * waited_s))

    def recover(self, sources: Sources, coord: str, *, check: bool = True) -> RecoveredShard:
        """Have the SMP recover `coord` from wherever its bytes are. Returns the shard, mapped.

        Args:
            check: have the SMP read a shard that it holds already, and repair it in place. If False, the SMP answers
                at once for such a shard, and the caller must compare each unit with its digest before using it.
        """
        message = messages.Recover(epoch=self.epoch, sources=sources, coord=coord, check=check)
        reply = self._call_to_move(message, sources.layout.shard_bytes(coord))
        got = from_plain(messages.Recovered, reply, "a shard that is held again")
        view = self._slots.map(got, touch=False)
        return RecoveredShard(view, got.how, got.bytes_fetched, got.unit_bytes, got.digests)

    def lend(self, sources: Sources) -> None:
        """Choose the snapshot whose units `unit` returns from now on, whichever SMP holds them."""
        self._call(messages.Lend(epoch=self.epoch, sources=sources))

    def unit(self, coord: str, index: int, out: memoryview) -> int:
        """Fill `out` with unit `index` of shard `coord`, verified. `out` must be as long as the unit. Blocks meanwhile.

        Returns the bytes that the SMP has fetched over the network since `lend`.

        Raises:
            Unrecoverable, DamagedSnapshot: the unit cannot be recovered intact.
        """
        message = messages.AskUnit(epoch=self.epoch, coord=coord, unit=index)
        reply, found = self._call_for_bytes(message, out, f"unit {index} of {coord}")
        lent = from_plain(messages.LentUnit, reply, "a unit that is lent")
        if found != lent.digest:
            raise DamagedSnapshot(f"unit {index} of {coord} was damaged on its way from the SMP")
        return lent.bytes_fetched

    @property
    def persist_due(self) -> bool:
        """Whether this node is ready to persist a snapshot. Reads shared memory; never blocks."""
        return self.board.due

    def persist(self, snapshot: SnapshotId) -> bool:
        """Have the SMP persist its part of a snapshot in the background. Returns whether it does."""
        return from_plain(
            messages.Accepted, self._call(messages.Persist(snapshot=snapshot)), "whether that is done"
        ).accepted

    def persisted(self, deadline_s: float = PLACE_DEADLINE_S) -> Persisted:
        """What is persisted, as far as the SMP sees. Raises `PlaceError` if the storage fails."""
        return from_plain(Persisted, self._call(messages.AskPersisted(), deadline_s), "what is persisted")

    def persisted_layout(self, run: str, snapshot: SnapshotId) -> Layout:
        """The layout that a persisted snapshot was taken in. Raises `PlaceError`, `DamagedSnapshot`."""
        return Layout.read(self._call(messages.AskPersistedLayout(run=run, snapshot=snapshot), PLACE_DEADLINE_S))

    def repair_parity(self, sources: Sources, group: int, position: int) -> None:
        """Have the SMP recompute the parity of a lost node in the background, for as long as this epoch lasts. Harmless
        if repeated."""
        self._call(messages.RepairParity(epoch=self.epoch, sources=sources, group=group, position=position))

    def repaired(self) -> RepairState:
        """How far everything is that trainers of this node have ordered with `repair_parity` in the epoch that this one
        has joined. Reads shared memory; never blocks."""
        return RepairState.UNDER_WAY if self.epoch is None else self.board.repair(self.epoch)

    def say(self, text: str) -> None:
        """Have the SMP show the first `MAX_SAYING` characters of `text` to operators, in place of the previous text."""
        self._call(messages.Say(epoch=self.epoch, text=text[:MAX_SAYING]))

    def ended(self, coord: str, end: TrainerEnd) -> None:
        """Report how the job ends for this trainer, if it has joined an epoch. Blocks for seconds at most."""
        if self.epoch is not None:
            said = messages.Ended(epoch=self.epoch, coord=coord, step=end.step, failure=end.failure)
            self._call(said, END_DEADLINE_S, turn_s=END_DEADLINE_S)

    def leave(self, deadline_s: float) -> None:
        """Have the SMP move what it holds to other nodes, while all trainers of the job hold still. Blocks until it
        has, for `deadline_s` and as long as the bytes of its arena may take, or `ANSWER_S` more if it does not respond.

        Raises:
            DeadlineExceeded, ConfigError: see `coding.moving.Draining.hand_over`.
        """
        limit_s = min(deadline_s + slowest_s(self._bytes_of("*")), messages.LONGEST_S)
        self._call(messages.Leave(epoch=self.epoch, deadline_s=limit_s), limit_s + ANSWER_S)

    def counters(self) -> dict[str, int]:
        """What the SMP has counted since it started; see `smp_daemon.shared.counters.COUNTS`."""
        return from_plain(dict[str, int], self._call(messages.AskCounters()), "what an SMP has counted")

    def scrub(self) -> dict[str, int]:
        """Have the SMP check every sealed unit now, and repair damaged ones. Returns the counts ``units``, ``damaged``
        and ``repaired``.

        Blocks for about one read of the arena.
        """
        return from_plain(
            dict[str, int], self._call(messages.Scrub(), self._read_deadline("*")), "what a scrub has found"
        )

    def _read_deadline(self, names: str) -> float:
        """Timeout for an SMP to read the files of its arena with such names."""
        return move_deadline(self._bytes_of(names))

    def finish(self, epoch: int) -> None:
        """Report that the job has ended well. The SMP removes its arena and ends; blocks until it has.

        Raises:
            SmpUnavailable: it ended before it had removed the whole arena.
        """
        self._end(messages.Finish(epoch=epoch), removes=True)

    def stop(self, *, remove: bool, force: bool) -> None:
        """Stop the SMP. Blocks until it has ended.

        Args:
            remove: remove the arena; else it stays for a successor.
            force: stop even while other trainers are connected.

        Raises:
            ConfigError: other trainers are connected, and `force` is False.
        """
        self._end(messages.Stop(remove=remove, force=force), removes=remove)
