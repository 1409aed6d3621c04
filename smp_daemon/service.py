"""The SMP as a process: its sockets, its threads, and who may ask what.

Trainers of this node talk to it over a unix socket, other SMPs by gRPC (control) and TCP (raw bytes). All state
is in `smp_daemon.store`; this module only carries messages to it.
"""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import psutil

from holdfast.ec import choose_codec
from holdfast.smp_daemon.arena import Arena
from holdfast.smp_daemon.attendance import Attendance
from holdfast.smp_daemon.credentials import current
from holdfast.smp_daemon.drain import Drain, Drained
from holdfast.smp_daemon.errors import ConfigError
from holdfast.smp_daemon.gate import Gate
from holdfast.smp_daemon.holdings import ParityKey, ShardKey
from holdfast.smp_daemon.inventory import Inventory
from holdfast.smp_daemon.layout import SnapshotId
from holdfast.smp_daemon.listener import Listener, bind_tcp, bind_unix
from holdfast.smp_daemon.liveness import Deadlines
from holdfast.smp_daemon.local import TrainerConversation, checked_peer
from holdfast.smp_daemon.monitor import Monitor
from holdfast.smp_daemon.on_hang import OnHang
from holdfast.smp_daemon.pacer import MAX_TURNS, Pacer
from holdfast.smp_daemon.paths import Owner, read_owner, socket_path
from holdfast.smp_daemon.peers import PeerClient, PeerServer
from holdfast.smp_daemon.persist.options import Options
from holdfast.smp_daemon.persist.persister import Persister
from holdfast.smp_daemon.points import reach
from holdfast.smp_daemon.protect import Protector
from holdfast.smp_daemon.rebuild import METHODS
from holdfast.smp_daemon.records import write_json
from holdfast.smp_daemon.recoveries import Recoveries
from holdfast.smp_daemon.rejoin import Rejoiner
from holdfast.smp_daemon.remote import PeerConversation
from holdfast.smp_daemon.scratch import Scratch
from holdfast.smp_daemon.scrub import Scrubber
from holdfast.smp_daemon.sources import Address
from holdfast.smp_daemon.store import Store

START_DEADLINE_S = 10.0


@dataclass(frozen=True, slots=True)
class Settings:
    """How an SMP works, as far as it is not the job's to say.

    Attributes:
        backend: erasure code backend, see `ec.choose_codec`.
        bandwidth: most bytes per second that encoding sends; 0: no limit.
        turns: in how many turns the groups encode, see `smp_daemon.pacer.turn_delay_s`; 1: all at once.
        scrub: bytes per second that the scrub reads; 0: it does not run by itself.
        reform_after_s: how long a node may be missing before the survivors re-form their groups; 0: they never do.
        rebuild: how lost shards are computed, see `smp_daemon.rebuild.recover`.
        memory: most bytes that slots may take, reserved from the start; 0: what the layout needs, at the first step.
        deadlines: how long trainers may be quiet.
        on_hang: shell command for each hang of a trainer; empty: none.
        zero: what is given up is overwritten with zeros.
        priority: how much encoding, folding and the scrub press on the trainers, see `smp_daemon.priority`.
        persist: the persist tier; None: it is off.
    """

    backend: str = "auto"
    bandwidth: float = 0.0
    turns: int = 1
    scrub: float = 64e6
    reform_after_s: float = 30.0
    rebuild: str = "chain"
    memory: int = 0
    zero: bool = False
    deadlines: Deadlines = field(default_factory=Deadlines)
    on_hang: str = ""
    priority: str = "normal"
    persist: Options | None = None

    def __post_init__(self) -> None:
        if self.rebuild not in METHODS:
            raise ConfigError(f"{self.rebuild!r} is no way to rebuild: use one of {', '.join(METHODS)}")
        if not 1 <= self.turns <= MAX_TURNS:
            raise ConfigError(f"{self.turns} turns: use 1 to {MAX_TURNS}, 1 for all groups at once")
        try:
            choose_codec(2, 1, self.backend)
        except ValueError as error:
            raise ConfigError(str(error)) from error


class Smp:
    """One running SMP. Made by `smp_daemon.__main__`, and in threads by tests."""

    def __init__(
        self,
        job: str,
        node: str,
        arena: Path,
        host: str,
        port: int = 0,
        bulk_port: int = 0,
        settings: Settings | None = None,
        access: str = "loopback",
    ) -> None:
        """Take over the arena and start to serve.

        Ports of 0 mean: the ones a predecessor in this arena had, else any free ones.

        Args:
            access: how friend is told from foe, for people; see `smp_daemon.credentials.access_of`.

        Raises:
            ConfigError: the arena or a port is taken, or the address is not this machine's.
            ProtocolError: the arena belongs to another job or node.
        """
        self.settings = settings or Settings()
        self.stopped = threading.Event()
        self.access = access
        self.trainers = 0
        self.said = ""
        self._finished = False
        self._drain = Drain(self)
        self._arena = Arena(arena, memory=self.settings.memory, zero=self.settings.zero)
        before = read_owner(arena)
        if before is not None and before.host == host:
            port, bulk_port = port or before.control_port, bulk_port or before.bulk_port
        credentials = current()
        self._peer_client = PeerClient(credentials, job)
        self._protector = Protector(
            self._peer_client, Pacer(self.settings.bandwidth), self.settings.turns, self.settings.priority
        )
        self._scrubber = Scrubber(Pacer(self.settings.scrub), self.settings.priority)
        self.persister = Persister(self.settings.persist, self.settings.priority)
        self.monitor = Monitor(
            self._peer_client, self.settings.reform_after_s, self.settings.rebuild, lambda: self.trainers
        )
        self._rejoiner = Rejoiner(self.settings.rebuild)
        self.recoveries = Recoveries()
        self.store = Store(
            self._arena,
            job,
            node,
            backend=self.settings.backend,
            on_sealed=self._sealed,
            on_parity=self._protector.announce,
            on_protected=self.recoveries.protected,
            on_epoch=self._begun,
            spare=self.persister.spare,
        )
        self._arena.settle()
        reach("start.adopted")
        self.attendance = Attendance(
            lambda: self.store.board,
            self.settings.deadlines,
            OnHang(self.settings.on_hang, job, node) if self.settings.on_hang else None,
            self.recoveries.lost,
        )
        self.scratch = Scratch()
        for thread in (self._protector, self._scrubber, self.monitor, self.persister):
            thread.start(self.store)
        bulk = bind_tcp(host, bulk_port)
        self._control = PeerServer(self.store, host, port, credentials)
        reach("start.bound")
        self.owner = Owner(
            os.getpid(),
            psutil.Process().create_time(),
            job,
            node,
            host,
            self._control.port,
            bulk.getsockname()[1],
            before.http_port if before is not None else 0,
        )
        gate = Gate(credentials, job)
        self._bulk = Listener(bulk, lambda sock: PeerConversation(self), gate)  # others may ask for the owner at once
        self._peer_client.ping(f"{host}:{self._control.port}", job, START_DEADLINE_S, starting=True)
        self._write_owner()
        self._local = Listener(
            bind_unix(socket_path(arena)), lambda sock: TrainerConversation(self, checked_peer(sock))
        )
        reach("start.serving")
        self._rejoiner.start(self.store)

    def inventory(self) -> Inventory:
        """What it holds."""
        with self.store.changed:
            keys = self.store.holdings.held()
            return Inventory(
                node=self.owner.node,
                host=self.owner.host,
                control_port=self.owner.control_port,
                bulk_port=self.owner.bulk_port,
                epoch=self.store.epoch,
                protected=self.store.protected,
                trainers=self.trainers,
                layouts=dict(self._arena.layouts),
                shards=frozenset((key.snapshot, key.coord) for key in keys if isinstance(key, ShardKey)),
                parities=frozenset((key.snapshot, key.tag, key.position) for key in keys if isinstance(key, ParityKey)),
                unpromised=frozenset(self.store.unpromised()),
                leaving=self._drain.leaving,
                record=self.store.record,
            )

    def shown_at(self, port: int) -> None:
        """It shows itself over HTTP on that port of loopback: tell those who look into the arena."""
        self.owner = replace(self.owner, http_port=port)
        self._write_owner()

    def finish(self) -> None:
        """The job has ended well: nothing of it is needed any more."""
        self._finished = True
        reach("finish.told")
        self.stopped.set()

    def stop(self, *, remove: bool = False) -> None:
        """End. What is held stays for a successor, unless it is to be removed."""
        self._finished = self._finished or remove
        self.stopped.set()

    def drain(self, deadline_s: float, spares: Collection[Address], wait: bool) -> Drained:
        """Move what is held here to other nodes; see `smp_daemon.drain.Drain.run`. `stop` is up to the caller."""
        return self._drain.run(deadline_s, spares, wait=wait)

    def close(self) -> None:
        """Stop serving. Removes the arena if the job has finished; else it stays for a successor."""
        self._drain.end()
        self.attendance.close()
        parts = (
            self.persister,
            self._rejoiner,
            self.monitor,
            self._scrubber,
            self._protector,
            self._bulk,
            self._control,
            self._peer_client,
        )
        for part in parts:
            part.close()
        if self._finished:
            reach("finish.closing")
            self.store.retire()
        self._local.close()

    def _sealed(self, snapshot: SnapshotId, must_encode: bool) -> None:
        self.recoveries.sealed(snapshot)
        if must_encode:
            self._protector.protect(snapshot)

    def _begun(self, epoch: int) -> None:
        self.recoveries.joined(epoch)
        self._protector.hang_up()

    def _write_owner(self) -> None:
        write_json(self._arena.path / "smp.json", asdict(self.owner))


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
