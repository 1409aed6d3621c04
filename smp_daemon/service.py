"""The SMP as a process: its sockets, its threads, and who may ask what.

Trainers of this node talk to it over a unix socket, other SMPs by gRPC (control) and TCP (raw bytes). All state
is in `smp_daemon.store`; this module only carries messages to it.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from smp_daemon.arena import Arena
from smp_daemon.errors import ConfigError, DamagedSnapshot, HoldfastError, ProtocolError
from smp_daemon.inventory import Inventory
from smp_daemon.layout import Layout, SnapshotId
from smp_daemon.limits import MAX_COUNT, MAX_UNIT_BYTES, PROTOCOL_VERSION
from smp_daemon.paths import Owner, read_owner, socket_path
from smp_daemon.peers import PeerClient, PeerServer
from smp_daemon.protect import Protector
from smp_daemon.rebuild import heal, recover
from smp_daemon.records import digest, write_json
from smp_daemon.sources import Sources
from smp_daemon.store import Store
from smp_daemon.transport import Listener, Message, Stream, bind_tcp, bind_unix

START_DEADLINE_S = 10.0

log = logging.getLogger(__name__)


class Smp:
    """One running SMP. Made by `smp_daemon.__main__`, and in threads by tests."""

    def __init__(self, job: str, node: str, arena: Path, host: str, port: int = 0, bulk_port: int = 0) -> None:
        """Take over the arena and start to serve.

        Ports of 0 mean: the ones a predecessor in this arena had, else any free ones.

        Raises:
            ConfigError: the arena or a port is taken, or the address is not this machine's.
            ProtocolError: the arena belongs to another job or node.
        """
        self.stopped = threading.Event()
        self._finished = False
        self._arena = Arena(arena)
        before = read_owner(arena)
        if before is not None and before.host == host:
            port, bulk_port = port or before.control_port, bulk_port or before.bulk_port
        self._peer_client = PeerClient()
        protector = Protector(self._peer_client)
        self.store = Store(self._arena, job, node, on_sealed=protector.protect, on_parity=protector.announce)
        protector.start(self.store)
        self._bulk = Listener(bind_tcp(host, bulk_port), lambda sock: PeerConversation(self.store))
        self._control = PeerServer(self.store, host, port)
        self.owner = Owner(
            os.getpid(),
            psutil.Process().create_time(),
            job,
            node,
            host,
            self._control.port,
            self._bulk.port,
        )
        self._peer_client.ping(f"{host}:{self._control.port}", job, START_DEADLINE_S)
        write_json(arena / "smp.json", {name: getattr(self.owner, name) for name in Owner.__slots__})
        self._local = Listener(
            bind_unix(socket_path(arena)), lambda sock: TrainerConversation(self, _checked_peer(sock))
        )

    def inventory(self) -> Inventory:
        """What it holds."""
        with self.store.changed:
            shards, parities = self.store.holdings()
            return Inventory(
                node=self.owner.node,
                host=self.owner.host,
                control_port=self.owner.control_port,
                bulk_port=self.owner.bulk_port,
                epoch=self.store.epoch,
                protected=self.store.protected,
                layouts=dict(self._arena.layouts),
                shards=shards,
                parities=parities,
            )

    def finish(self) -> None:
        """The job has ended well: nothing of it is needed any more."""
        self._finished = True
        self.stopped.set()

    def close(self) -> None:
        """Stop serving. Removes the arena if the job has finished; else it stays for a successor."""
        for part in (self._bulk, self._control, self._peer_client):
            part.close()
        if self._finished:
            self.store.retire()
        self._local.close()


class TrainerConversation:
    """One trainer of this node. What it began and did not seal becomes free when it is gone."""

    def __init__(self, smp: Smp, pid: int) -> None:
        self._smp = smp
        self._store = smp.store
        self._pid = pid
        self._writing: set[tuple[SnapshotId, str]] = set()
        self._operations: dict[str, Callable[[Message], Message]] = {
            "hello": self._hello,
            "inventory": lambda message: smp.inventory().to_json(),
            "join": self._join,
            "configure": self._configure,
            "begin": self._begin,
            "seal": self._seal,
            "abandon": self._abandon,
            "await": self._await,
            "recover": self._recover,
            "heal": self._heal,
            "finish": self._finish,
        }

    def answer(self, message: Message, payload: int, stream: Stream) -> tuple[Message, None]:
        operation = self._operations.get(str(message.get("op")))
        if payload:
            stream.close()
            raise ProtocolError("a trainer sends no raw bytes")
        if operation is None:
            raise ProtocolError(f"an SMP does not know the operation {message.get('op')!r}")
        return operation(message), None

    def ended(self) -> None:
        for snapshot, coord in self._writing:
            self._store.abandon(snapshot, coord)

    def _hello(self, message: Message) -> Message:
        if _text(message, "job") != self._store.job:
            raise ConfigError(
                f"the SMP at {self._store.arena.path} serves job {self._store.job!r}, not {message['job']!r}: "
                "check HOLDFAST_JOB"
            )
        if _number(message, "version") != PROTOCOL_VERSION:
            raise ConfigError(
                f"the SMP speaks version {PROTOCOL_VERSION}, this trainer version {message['version']}: "
                "install the same holdfast on both"
            )
        return {"node": self._store.node, "pid": os.getpid()}

    def _join(self, message: Message) -> Message:
        self._store.join(_number(message, "epoch", MAX_COUNT))
        return {}

    def _configure(self, message: Message) -> Message:
        self._store.configure(Layout.from_json(message.get("layout")))
        return {}

    def _begin(self, message: Message) -> Message:
        snapshot, coord = _snapshot(message, "snapshot"), _text(message, "coord")
        keep = message.get("keep")
        if not isinstance(keep, list):
            raise ProtocolError("'keep' must be a list of snapshots")
        protected = _snapshot(message, "protected") if message.get("protected") else None
        pool, slot = self._store.begin(snapshot, coord, [_snapshot({"keep": pair}, "keep") for pair in keep], protected)
        self._writing.add((snapshot, coord))
        path = pool.path(slot)
        return {"file": path.name, "inode": path.stat().st_ino, "bytes": slot.bytes}

    def _seal(self, message: Message) -> Message:
        snapshot, coord = _snapshot(message, "snapshot"), _text(message, "coord")
        self._store.seal(snapshot, coord)
        self._writing.discard((snapshot, coord))
        return {}

    def _abandon(self, message: Message) -> Message:
        snapshot, coord = _snapshot(message, "snapshot"), _text(message, "coord")
        self._store.abandon(snapshot, coord)
        self._writing.discard((snapshot, coord))
        return {}

    def _await(self, message: Message) -> Message:
        snapshot = _snapshot(message, "snapshot")
        return {"outcome": int(self._store.await_outcome(snapshot, _seconds(message, "deadline_s")))}

    def _recover(self, message: Message) -> Message:
        recovered = recover(self._store, Sources.from_json(message.get("sources")), _text(message, "coord"))
        path = self._store.arena.path / recovered.file
        return {
            "file": recovered.file,
            "inode": path.stat().st_ino,
            "bytes": path.stat().st_size,
            "how": recovered.how,
            "bytes_fetched": recovered.bytes_fetched,
        }

    def _heal(self, message: Message) -> Message:
        sources = Sources.from_json(message.get("sources"))
        group, position = _number(message, "group"), _number(message, "position")

        def work() -> None:
            try:
                count = heal(self._store, sources, group, position)
                log.info("parity of position %d healed for %s: %d bytes fetched", position, sources.snapshot, count)
            except HoldfastError as error:
                log.warning("parity of position %d not healed for %s: %s", position, sources.snapshot, error)

        threading.Thread(target=work, name="heal", daemon=True).start()
        return {}

    def _finish(self, message: Message) -> Message:
        self._store.check_epoch(_number(message, "epoch"))
        self._smp.finish()
        return {}


class PeerConversation:
    """Another SMP that sends units to fold in, or asks for units."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._scratch = bytearray()

    def answer(self, message: Message, payload: int, stream: Stream) -> tuple[Message, memoryview | None]:
        unit = self._receive(payload, stream)
        if message.get("job") != self._store.job:
            raise ProtocolError(f"this SMP serves job {self._store.job!r}, not {message.get('job')!r}")
        snapshot = _snapshot(message, "snapshot")
        op = message.get("op")
        if op == "fold":
            self._store.fold(
                snapshot,
                _number(message, "stripe"),
                _number(message, "position"),
                unit,
                _number(message, "digest"),
            )
            return {}, None
        if op == "shard_unit":
            view, shard = self._store.shard(snapshot, _text(message, "coord"))
            unit, unit_digest = _unit(view, _number(message, "unit"), shard.unit_bytes, shard.digests)
            if digest(unit) != unit_digest:
                self._store.drop_shard(snapshot, shard.coord)
                raise DamagedSnapshot(f"{shard.coord} of {snapshot} on node {self._store.node!r} is damaged")
            return {"digest": unit_digest}, unit
        if op == "parity_unit":
            view, parity = self._store.parity(snapshot, _number(message, "group"), _number(message, "position"))
            index = _number(message, "unit")
            unit, unit_digest = _unit(view, index, parity.unit_bytes, parity.digests)
            if digest(unit) != unit_digest:
                self._store.drop_parity(snapshot, parity.group, parity.position)
                raise DamagedSnapshot(f"a parity of {snapshot} on node {self._store.node!r} is damaged")
            return {"digest": unit_digest, "sources": parity.sources[index]}, unit
        raise ProtocolError(f"an SMP does not know the operation {op!r}")

    def ended(self) -> None:
        """Nothing: what was folded in stays, and a unit that came in part was not folded in."""

    def _receive(self, payload: int, stream: Stream) -> memoryview:
        limit = self._store.layout.unit_bytes if self._store.layout else MAX_UNIT_BYTES
        if payload > limit:
            stream.close()
            raise ProtocolError(f"a unit of {payload} bytes; this job's have at most {limit}")
        if len(self._scratch) < payload:
            self._scratch = bytearray(payload)
        unit = memoryview(self._scratch)[:payload]
        stream.receive_into(unit)
        return unit


def _unit(view: memoryview, index: int, unit_bytes: int, digests: tuple[int, ...]) -> tuple[memoryview, int]:
    if not 0 <= index < len(digests):
        raise ProtocolError(f"there is no unit {index}: the slot has {len(digests)}")
    return view[index * unit_bytes : (index + 1) * unit_bytes], digests[index]


def watch(smp: Smp, owner_pid: int | None) -> None:
    """Block until the job has finished or, if given, the process `owner_pid` is gone."""
    if owner_pid is None:
        smp.stopped.wait()
        return
    try:
        owner = os.pidfd_open(owner_pid)
    except ProcessLookupError:
        smp.finish()
        return
    woken, wake = os.pipe()
    threading.Thread(target=lambda: (smp.stopped.wait(), os.write(wake, b".")), daemon=True).start()
    ready, _, _ = select.select([owner, woken], [], [])
    if owner in ready:
        smp.finish()


def _checked_peer(sock: socket.socket) -> int:
    """The pid at the other end of a unix socket. Raises `ConfigError` if it is another user's."""
    pid, uid, _ = struct.unpack("3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    if uid != os.getuid():
        raise ConfigError(f"process {pid} of user {uid} may not use this SMP")
    return int(pid)


def _number(message: Message, key: str, most: int = (1 << 64) - 1) -> int:
    value = message.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= most:
        raise ProtocolError(f"{key!r} must be a number between 0 and {most}, not {value!r}")
    return value


def _seconds(message: Message, key: str) -> float:
    value = message.get(key)
    if not isinstance(value, int | float) or not 0 <= value <= 3600:
        raise ProtocolError(f"{key!r} must be between 0 and 3600 s, not {value!r}")
    return float(value)


def _text(message: Message, key: str) -> str:
    value = message.get(key)
    if not isinstance(value, str):
        raise ProtocolError(f"{key!r} must be a text, not {value!r}")
    return value


def _snapshot(message: dict[str, Any], key: str) -> SnapshotId:
    value = message.get(key)
    if not isinstance(value, list) or len(value) != 2:
        raise ProtocolError(f"{key!r} must be [epoch, step], not {value!r}")
    return SnapshotId(*(_number({key: n}, key, MAX_COUNT) for n in value))
