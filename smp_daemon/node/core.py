"""An SMP without its listening sockets, which `service` adds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from holdfast.ec import choose_codec
from holdfast.smp_daemon.coding.moving import Draining, Monitor
from holdfast.smp_daemon.coding.protect import Protector
from holdfast.smp_daemon.coding.scrub import Scrubber
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.persist.persister import Persister
from holdfast.smp_daemon.recovery.reconciler import Reconciler
from holdfast.smp_daemon.recovery.recoveries import Recoveries
from holdfast.smp_daemon.shared import settings
from holdfast.smp_daemon.shared.errors import ConfigError, ProtocolError
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.goodput import UNTOLD
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.paths import Owner
from holdfast.smp_daemon.shared.records import write_json
from holdfast.smp_daemon.shared.starts import WELL
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.holdings import ParityKey, ShardKey
from holdfast.smp_daemon.storage.receiving import BufferPool, buffers_for
from holdfast.smp_daemon.storage.store import Store
from holdfast.smp_daemon.watchdog.liveness import Health, judge_lease
from holdfast.smp_daemon.watchdog.watchdog import Watchdog, run_on_hang

log = get_log(__name__)


class Core:
    """The running parts of one SMP.

    Attributes:
        owner: who serves the arena, and where; set once the sockets are bound.
        stopped: set when the SMP must end. `finished`: the arena can be removed then.
        system: the machine.
        environment: the variables with its settings, see `shared.settings`; None: those of this process.
        lease_s: how long a peer may be silent before the survivors regroup without it; 0: for ever.
        trainers: number of connections of trainers; changed under the store's lock. `said`: the last message of the
            training loop to operators. `next_s`, `spent`: see `shared.messages.Seal`.
        impaired: which optional parts do not work as requested, in words.
    """

    owner: Owner

    def __init__(
        self,
        job: str,
        node: str,
        arena: Path,
        environment: Mapping[str, str] | None,
        cards: int,
        access: str,
        system: System = MACHINE,
    ) -> None:
        """Take over the arena and start the threads. `cards`: number of addresses for raw bytes. Raises as `Smp`."""
        for each in (*settings.OF_AN_SMP, settings.REBUILD):
            each.value(environment)  # raises before anything is touched
        backend, priority = settings.BACKEND.value(environment), settings.PRIORITY.value(environment)
        links = settings.LINKS.value(environment)
        try:
            choose_codec(2, 1, backend)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        self.environment = environment
        self.system = system
        self.stopped = system.Event()
        self.access = access
        self.trainers = 0
        self._trained_s = system.monotonic()
        self.said = ""
        self.next_s = 0.0
        self.spent = UNTOLD
        self.impaired: list[str] = []
        self.finished = False
        self.arena = Arena(
            arena, memory=settings.MEMORY.value(environment), zero=settings.ZERO.value(environment), files=system
        )
        self.credentials = system.credentials()
        self.peers = PeerClient(job, self.credentials, system)
        self._protector = Protector(self.peers, Pacer(settings.BANDWIDTH.value(environment)), links, priority, system)
        self.recoveries = Recoveries(system.monotonic, self._silent_s)
        self.store = Store(
            self.arena,
            job,
            node,
            backend=backend,
            on_sealed=self._sealed,
            on_parity=self._protector.announce,
            on_protected=self.recoveries.protected,
            on_epoch=self._begun,
            spare=int(bool(settings.PERSIST.value(environment))),  # for the snapshot that is being persisted
            priority=priority,
            network=system,
        )
        failpoint("start.adopted")
        self.reconciler = Reconciler(self.store, settings.REBUILD.value(environment))
        self.watchdog = Watchdog(
            lambda: self.store.outcomes.board,
            settings.DEADLINES.value(environment),
            partial(run_on_hang, command, job, node) if (command := settings.ON_HANG.value(environment)) else None,
            self.recoveries.trains,
            self._shard_bytes,
            system,
        )
        self.buffers = BufferPool(buffers_for(links * cards), system)
        self._protector.start(self.store)
        self._scrubber = Scrubber(self.store, Pacer(settings.SCRUB.value(environment)), priority)
        self.lease_s = settings.REGROUP_AFTER.value(environment)
        self.monitor = Monitor(self.store, self.peers, self.lease_s, lambda: self.trainers)
        self.persister = Persister(self.store, environment)
        self.drainer = Draining(self.store, self.inventory, self.monitor)

    def _shard_bytes(self, coord: str) -> int:
        """The length of a trainer's shard, in bytes; 0: no layout of this epoch has it yet."""
        layout = self.store.state.layout
        try:
            return layout.shard_bytes(coord) if layout is not None else 0
        except ProtocolError:
            return 0

    def inventory(self) -> Inventory:
        """What this SMP holds."""
        with self.store.changed:
            keys = self.store.holdings.held()
            return Inventory(
                node=self.owner.node,
                host=self.owner.host,
                control_port=self.owner.control_port,
                bulk_port=self.owner.bulk_port,
                more_bulk=self.owner.more_bulk,
                epoch=self.store.state.epoch,
                protected=self.store.state.protected,
                trainers=self.trainers,
                layouts=dict(self.arena.layouts),
                shards=frozenset((key.snapshot, key.coord) for key in keys if isinstance(key, ShardKey)),
                parities=frozenset((key.snapshot, key.tag, key.position) for key in keys if isinstance(key, ParityKey)),
                never_acknowledged=frozenset(self.store.outcomes.unacknowledged({key.snapshot for key in keys})),
                leaving=self.drainer.leaving,
                record=self.store.state.record,
                run=self.store.state.run,
                given_up=self.store.state.given_up,
            )

    def record_http_address(self, host: str, port: int) -> None:
        """Record in the arena that this SMP serves HTTP at `host` and `port`; port 0: nowhere."""
        self.owner = replace(self.owner, http_host=host, http_port=port)
        self.write_owner()

    def impair(self, how: str) -> None:
        """An optional part does not work as requested: log that, and show it to operators from now on."""
        self.impaired.append(how)
        log.error(how)

    def count_trainers(self, change: int) -> None:
        """A trainer has connected (1), or its connection has ended (-1)."""
        with self.store.changed:
            self.trainers += change
            self._trained_s = self.system.monotonic()

    @property
    def trainerless_s(self) -> float | None:
        """How many seconds no trainer has been connected; None: none ever was, or all have ended well."""
        with self.store.changed:
            ends = self.store.state.record.ends.values()
            if not self.store.state.epoch or (ends and all(end.failure == WELL for end in ends)):
                return None
            return 0.0 if self.trainers else self.system.monotonic() - self._trained_s

    def stop(self, *, remove: bool = False) -> None:
        """Stop. The arena stays for a successor, unless `remove` is set, as when the job has ended well."""
        self.finished = self.finished or remove
        self.stopped.set()

    def end(self) -> None:
        """Stop the threads. The arena stays."""
        self.drainer.end()
        self.watchdog.close()
        threads = (self.persister, self.monitor, self._scrubber, self._protector, self.store.reserver)
        for part in (self.reconciler, *threads):
            part.close()

    def _sealed(self, snapshot: SnapshotId, must_encode: bool) -> None:
        self.recoveries.sealed(snapshot)
        if must_encode:
            self._protector.protect(snapshot)

    def _silent_s(self) -> float:
        """For how long the node of the group that has been silent longest has been; 0: none is."""
        ages = self.monitor.leases().values()
        return max((age for age in ages if judge_lease(age, self.lease_s) != Health.ALIVE), default=0.0)

    def _begun(self, epoch: int) -> None:
        self.recoveries.joined(epoch)
        self._protector.hang_up()

    def write_owner(self) -> None:
        """Record in the arena who serves it, and where."""
        write_json(self.arena.path / "smp.json", asdict(self.owner))
