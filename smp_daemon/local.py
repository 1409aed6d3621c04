"""Conversations with the trainers of this node, over a unix socket."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from dataclasses import asdict, replace

from holdfast.smp_daemon.coding.scrub import scrub
from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.recovery.census import take_census
from holdfast.smp_daemon.recovery.fetch import Lender
from holdfast.smp_daemon.recovery.rebuild import recover, repair_parity, verify
from holdfast.smp_daemon.shared.errors import ArenaTooSmall, ConfigError, HoldfastError, ProtocolError, StaleEpoch
from holdfast.smp_daemon.shared.fields import address, identifier, number, seconds, snapshot_id, text
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_MESSAGE_BYTES, MAX_NODES, MAX_SAYING, PROTOCOL_VERSION
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.starts import KILLED, Start, TrainerEnd, checked_failure
from holdfast.smp_daemon.shared.transport import Message, MessageStream
from holdfast.smp_daemon.shared.uids import peer_of

MAX_DIGESTS = (MAX_MESSAGE_BYTES - (1 << 12)) // len(f"{(1 << 64) - 1},")
"""How many digests of units a message has room for, beside its other fields."""

ROOM_DEADLINE_S = 10.0
"""How long a new start waits for processes of the one before it to end."""

FENCED = ("recover", "lend", "unit", "heal", "say", "ended")
"""Operations that change something here and name no snapshot of the epoch at hand: who has joined one says which."""

log = get_log(__name__)


class TrainerConversation:
    """One trainer of this node. What it began and did not seal becomes free when it is gone."""

    def __init__(self, smp: Core, pid: int) -> None:
        self._smp = smp
        self._store = smp.store
        self._pid = pid
        self._writing: set[tuple[SnapshotId, str]] = set()
        self._greeted = False
        self._coord: str | None = None
        self._epoch: int | None = None
        self._hang_up: Callable[[], None] | None = None
        self._lender: Lender | None = None
        self._lent: memoryview | None = None
        self._operations: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "inventory": lambda message: smp.inventory().to_json(),
            "census": self._census,
            "join": self._join,
            "configure": self._configure,
            "begin": self._begin,
            "seal": self._seal,
            "abandon": self._abandon,
            "await": self._await,
            "recover": self._recover,
            "lend": self._lend,
            "unit": self._unit,
            "heal": self._heal,
            "persist": lambda message: {"accepted": smp.persister.order(snapshot_id(message, "snapshot"))},
            "persisted": lambda message: smp.persister.look().to_json(),
            "persisted_layout": lambda message: {
                "layout": smp.persister.layout_of(snapshot_id(message, "snapshot")).to_json()
            },
            "counters": lambda message: smp.store.counters.read(),
            "scrub": self._scrub,
            "verify": self._verify,
            "say": self._say,
            "suspect": self._suspect,
            "ended": self._ended,
            "finish": self._finish,
            "stop": self._stop,
        }

    def answer(self, message: Message, payload: int, stream: MessageStream) -> tuple[Message, memoryview | None]:
        operation = self._operations.get(str(message.get("op")))
        if payload:
            stream.close()
            raise ProtocolError("a trainer sends no raw bytes")
        if self._hang_up is None:
            self._hang_up = stream.close
            self._smp.watchdog.connected(self._pid, self._hang_up)
        if operation is None:
            raise ProtocolError(f"an SMP does not know the operation {message.get('op')!r}")
        if "epoch" in message and message["op"] in FENCED:
            self._store.check_epoch(number(message, "epoch", MAX_COUNT))
        self._lent = None
        return operation(message), self._lent

    def ended(self) -> None:
        for snapshot, coord in sorted(self._writing):
            self._store.abandon(snapshot, coord)
        if self._hang_up is not None:
            step = self._smp.watchdog.left(self._pid, self._hang_up, self._coord)
            self._note_end(step)
        if self._lender is not None:
            self._lender.close()
        if self._greeted:
            with self._store.changed:
                self._smp.trainers -= 1

    def _hello(self, message: Message) -> Message:
        if text(message, "job") != self._store.job:
            raise ConfigError(
                f"the SMP at {self._store.arena.path} serves job {self._store.job!r}, not {message['job']!r}: "
                "check HOLDFAST_JOB"
            )
        if number(message, "version") != PROTOCOL_VERSION:
            raise ConfigError(
                f"the SMP speaks version {PROTOCOL_VERSION}, this trainer version {message['version']}: "
                "install the same holdfast on both"
            )
        coord = text(message, "coord") if message.get("coord") is not None else None
        if coord is not None and message.get("epoch") is None:
            self._check_room()
        if not self._greeted:
            self._greeted = True
            with self._store.changed:
                self._smp.trainers += 1
        row = None
        if coord is not None:
            self._coord = coord
            row = self._smp.watchdog.attend(self._pid, self._coord, self._hang_up)
        return {"node": self._store.node, "pid": os.getpid(), "row": row}

    def _check_room(self) -> None:
        """A trainer comes that has joined no epoch. Raises `ConfigError` if another run of this job is at work here: it
        would be fenced, and what it has protected would be taken."""
        other = self._smp.watchdog.await_room(self._pid, ROOM_DEADLINE_S)
        if other is not None:
            raise ConfigError(
                f"job {self._store.job!r} is at work on node {self._store.node} already: process {other.pid} is its "
                f"trainer {other.coord}, after step {other.step:,}. Give this run another HOLDFAST_JOB, or job=; if "
                f"it is to take the place of the other, end process {other.pid} first"
            )

    def _census(self, message: Message) -> Message:
        """What the SMPs at these addresses hold; without their layouts, which whoever knows of them has."""
        told = message.get("addresses")
        if not isinstance(told, list) or len(told) > MAX_NODES:
            raise ProtocolError(f"'addresses' must be a list of at most {MAX_NODES}")
        with self._store.changed:
            known = list(self._store.arena.layouts.values())
        found = take_census(self._store.job, [address(each) for each in told], self._store.counters, known)
        return {"inventories": [replace(each, layouts={}).to_json() for each in found]}

    def _join(self, message: Message) -> Message:
        start = Start.from_json(message["start"]) if message.get("start") is not None else None
        epoch = number(message, "epoch", MAX_COUNT)
        self._store.join(epoch, start)
        if self._coord is not None:
            self._store.goes_on(epoch, self._coord)
            self._smp.watchdog.joined(self._pid, self._coord)
        self._epoch = epoch
        return {}

    def _configure(self, message: Message) -> Message:
        self._store.configure(Layout.from_json(message.get("layout")))
        return {}

    def _begin(self, message: Message) -> Message:
        snapshot, coord = snapshot_id(message, "snapshot"), identifier(message, "coord")
        keep = message.get("keep")
        if not isinstance(keep, list):
            raise ProtocolError("'keep' must be a list of snapshots")
        protected = snapshot_id(message, "protected") if message.get("protected") else None
        kept = [snapshot_id({"keep": pair}, "keep") for pair in keep]
        pool, slot = self._store.begin(snapshot, coord, kept, protected)
        self._writing = {begun for begun in self._writing if begun[0] in kept} | {(snapshot, coord)}
        path = pool.path(slot)
        return {"file": path.name, "inode": path.stat().st_ino, "bytes": slot.bytes}

    def _seal(self, message: Message) -> Message:
        snapshot, coord = snapshot_id(message, "snapshot"), identifier(message, "coord")
        protected = snapshot_id(message, "protected") if message.get("protected") else None
        self._store.seal(snapshot, coord, protected)
        self._writing.discard((snapshot, coord))
        return {}

    def _abandon(self, message: Message) -> Message:
        snapshot, coord = snapshot_id(message, "snapshot"), identifier(message, "coord")
        self._store.abandon(snapshot, coord, unused=message.get("unused") is True)
        self._writing.discard((snapshot, coord))
        return {}

    def _await(self, message: Message) -> Message:
        snapshot = snapshot_id(message, "snapshot")
        return {"outcome": int(self._store.await_outcome(snapshot, seconds(message, "deadline_s")))}

    def _recover(self, message: Message) -> Message:
        check = message.get("check", True)
        if not isinstance(check, bool):
            raise ProtocolError(f"'check' must be true or false, not {check!r}")
        sources = Sources.from_json(message.get("sources"))
        self._store.is_restored(sources.snapshot)
        coord = identifier(message, "coord")
        if sources.persisted:
            recovered = self._smp.persister.recover(sources.snapshot, coord, check)
        else:
            recovered = recover(self._store, sources, coord, self._smp.settings.rebuild, check)
        self._smp.recoveries.restored(
            self._store.epoch, sources.snapshot, coord, recovered.how, recovered.bytes_fetched
        )
        if len(recovered.digests) > MAX_DIGESTS:
            raise ConfigError(
                f"{message['coord']} has {len(recovered.digests)} units of {recovered.unit_bytes} bytes, and a message "
                f"has room for {MAX_DIGESTS} digests: use longer units, or more ranks with smaller shards"
            )
        path = self._store.arena.path / recovered.file
        return {
            "file": recovered.file,
            "inode": path.stat().st_ino,
            "bytes": path.stat().st_size,
            "how": recovered.how,
            "bytes_fetched": recovered.bytes_fetched,
            "unit_bytes": recovered.unit_bytes,
            "digests": recovered.digests,
        }

    def _lend(self, message: Message) -> Message:
        """From now on `unit` gives units of this snapshot."""
        sources = Sources.from_json(message.get("sources"))
        if sources.persisted:
            raise ConfigError(f"{sources.snapshot} is persisted: units are lent from memory only")
        if self._lender is not None:
            self._lender.close()
        self._store.is_restored(sources.snapshot)
        self._lender = Lender(self._store, sources)
        return {}

    def _unit(self, message: Message) -> Message:
        if self._lender is None:
            raise ProtocolError("say first what to `lend` units of")
        before = self._lender.bytes_fetched
        unit, unit_digest = self._lender.unit(identifier(message, "coord"), number(message, "unit", MAX_COUNT))
        self._lent = unit
        fetched = self._lender.bytes_fetched - before
        if self._coord is not None:
            epoch, of = self._store.epoch, self._lender.snapshot
            self._smp.recoveries.restored(epoch, of, self._coord, "resharded", fetched)
        return {"digest": unit_digest, "bytes_fetched": self._lender.bytes_fetched}

    def _heal(self, message: Message) -> Message:
        sources = Sources.from_json(message.get("sources"))
        group, position = number(message, "group"), number(message, "position")
        if not sources.layout.has_parity(group, position):
            raise ProtocolError(
                f"position {position} of group {group} has no parity in the layout of {sources.snapshot}"
            )

        def work() -> None:
            try:
                count = repair_parity(self._store, sources, group, position)
                text = "parity of position %d repaired for %s: %d bytes fetched"
                log.info(text, position, sources.snapshot, count, extra=about(sources.snapshot, bytes=count))
            except HoldfastError as error:
                text = "parity of position %d not repaired for %s: %s"
                log.warning(text, position, sources.snapshot, error, extra=about(sources.snapshot))

        self._smp.system.Thread(target=work, name="heal", daemon=True).start()
        return {}

    def _scrub(self, message: Message) -> Message:
        return asdict(scrub(self._store, lambda count: None))

    def _verify(self, message: Message) -> Message:
        claim = self._store.holdings.verifying
        if not claim.acquire(blocking=False):
            return {"started": False}

        def work() -> None:
            try:
                verify(self._store)
            except HoldfastError as error:
                log.warning("the newest shards are not all checked: %s", error)
            finally:
                claim.release()

        try:
            self._smp.system.Thread(target=work, name="verify", daemon=True).start()
        except BaseException:
            claim.release()
            raise
        return {"started": True}

    def _say(self, message: Message) -> Message:
        said = message.get("text")
        if not isinstance(said, str) or len(said) > MAX_SAYING:
            raise ProtocolError(f"'text' must be a string of at most {MAX_SAYING} characters")
        self._smp.said = said
        return {}

    def _ended(self, message: Message) -> Message:
        end = TrainerEnd(number(message, "step", MAX_COUNT), checked_failure(message.get("failure")))
        self._store.ended(number(message, "epoch", MAX_COUNT), identifier(message, "coord"), end)
        return {}

    def _note_end(self, step: int | None) -> None:
        """It went away without a word, with so many steps finished; None: it has left as it should."""
        if step is None or self._coord is None or self._epoch is None:
            return
        try:
            self._store.ended(self._epoch, self._coord, TrainerEnd(min(max(step, 0), MAX_COUNT), KILLED))
        except StaleEpoch:
            pass  # the next start goes on without it, and has taken note of how it ended
        except ArenaTooSmall as error:
            log.warning("how %s ended is not noted: %s", self._coord, error)

    def _suspect(self, message: Message) -> Message:
        self._smp.monitor.suspect(identifier(message, "node"))
        return {}

    def _stop(self, message: Message) -> Message:
        with self._store.changed:
            others = self._smp.trainers - self._greeted
            if others and message.get("force") is not True:
                raise ConfigError(
                    f"trainers have {others} connections to the SMP of job {self._store.job!r} on {self._store.node}: "
                    "stop the job first, or use --force: they then start another SMP if they may"
                )
            self._smp.stop(remove=message.get("remove") is True)
        return {}

    def _finish(self, message: Message) -> Message:
        self._store.check_epoch(number(message, "epoch"))
        self._smp.finish()
        return {}


def checked_peer(sock: socket.socket) -> int:
    """The pid at the other end of a unix socket. Raises `ConfigError` if it is another user's."""
    pid, uid = peer_of(sock)
    if uid != os.getuid():
        raise ConfigError(f"process {pid} of user {uid} may not use this SMP")
    return pid
