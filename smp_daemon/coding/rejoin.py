"""Brings a restarted SMP's node back to everything its group counts on.

The predecessor may have died while it repaired a unit, received a shard or computed parity again. Here missing shards
are recovered, missing parity is computed again, and what the predecessor left is verified and its damaged units are
repaired, for the newest snapshot held here and the newest that the job knows to be protected.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.recovery.rebuild import recover, repair_parity, repair_units
from holdfast.smp_daemon.shared.errors import HoldfastError, Unrecoverable
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.plan import choose_sources, parity_repairer
from holdfast.smp_daemon.shared.settings import REJOIN
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.store import Store

AGAIN_S = 5.0
"""Pause between two attempts. There are `ATTEMPTS` at most, while something is missing and no newer epoch has begun:
the other SMPs may have been restarted too."""

ATTEMPTS = 24

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Missing:
    """The shards and parities, as (group, position), of a snapshot that this node lacks, and its damaged units."""

    shards: tuple[str, ...] = ()
    parities: tuple[tuple[int, int], ...] = ()
    damaged: tuple[tuple[Key, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        return bool(self.shards or self.parities or self.damaged)


class Rejoiner:
    """The thread that calls `rejoin` after an SMP has started in an arena that holds something."""

    def __init__(self, method: str, system: System = MACHINE) -> None:
        """`method`: how lost shards are computed, see `rebuild.recover`."""
        self._system = system
        self._method = method
        self._closed = system.Event()

    def start(self, store: Store) -> None:
        """Start the thread, if `store` holds anything and ``HOLDFAST_REJOIN`` is not 0."""
        if store.holdings.held() and REJOIN.value():
            self._system.Thread(target=self._run, args=(store, store.epoch), name="rejoin", daemon=True).start()

    def close(self) -> None:
        """Make no further attempt."""
        self._closed.set()

    def _run(self, store: Store, epoch: int) -> None:
        failpoint("rejoin.before")
        episodes = Episodes(log)
        for _ in range(ATTEMPTS):
            try:
                if rejoin(store, epoch, self._method):
                    episodes.end("rejoin", "this node holds again all that can be recovered")
                    break
            except HoldfastError as error:
                if store.epoch != epoch:
                    log.info("a new epoch has begun, which recovers the rest: %s", error)
                    return
                episodes.begin("rejoin", "this node does not hold all of its part yet: %s", error)
            if self._closed.wait(AGAIN_S):
                return
        failpoint("rejoin.done")


def rejoin(store: Store, epoch: int, method: str) -> bool:
    """Recover what is missing here. Blocks while bytes travel, and holds no lock meanwhile.

    Returns whether all that can be recovered is here. False: try again, since SMPs that hold the rest may come back.

    Raises:
        HoldfastError: something cannot be recovered now, or another epoch has begun.
    """
    newest = max((key.snapshot for key in store.own_keys()), default=None)
    snapshots = sorted({snapshot for snapshot in (newest, store.protected) if snapshot is not None})
    whole = _bring_back_all(store, epoch, snapshots, method)  # first what is missing, which is known without reading
    for key in store.holdings.unverified():
        if key.snapshot in snapshots:
            store.holdings.verify(key, lambda count: store.check_epoch(epoch))
    return whole and _bring_back_all(store, epoch, snapshots, method)


def _bring_back_all(store: Store, epoch: int, snapshots: Sequence[SnapshotId], method: str) -> bool:
    whole = True
    for snapshot in snapshots:
        store.check_epoch(epoch)
        with store.changed:
            layouts = [layout for layout in store.arena.layouts.values() if layout.epoch == snapshot.epoch]
        if not layouts or not find_missing(store, max(layouts, key=lambda each: each.revision), snapshot):
            continue
        sources = choose_sources(gather_inventories(store.job, addresses_of(layouts), layouts, store.system), snapshot)
        if sources is None:
            whole = False  # SMPs that hold the rest may come back
            continue
        try:
            _bring_back(store, epoch, sources, method)
        except Unrecoverable as error:
            if snapshot == store.protected:
                raise
            log.info("%s cannot be recovered: %s", snapshot, error, extra=about(snapshot))
    return whole


def find_missing(store: Store, layout: Layout, snapshot: SnapshotId) -> Missing:
    """What this node lacks of a snapshot: at its position in `layout`, and at those it took over from lost nodes."""
    holdings, node = store.holdings, store.node
    keys: list[Key] = [key for key in holdings.held() if key.snapshot == snapshot]
    shards = {key.coord for key in keys if isinstance(key, ShardKey)}
    places = [
        (group, position)
        for group in range(len(layout.groups))
        for position, member in enumerate(layout.members(group))
        if member.name == node or parity_repairer(layout, group, position) in shards
    ]
    damaged = [(key, tuple(holdings.known_damage(key))) for key in keys]
    return Missing(
        tuple(s.coord for each in layout.nodes if each.name == node for s in each.shards if s.coord not in shards),
        tuple(
            (group, position)
            for group, position in places
            if layout.has_parity(group, position)
            and not holdings.holds(ParityKey(snapshot, layout.tag(group), position))
        ),
        tuple((key, units) for key, units in damaged if units),
    )


def _bring_back(store: Store, epoch: int, sources: Sources, method: str) -> None:
    """Repair damaged units, and recover what no node holds. What another node holds is not missing: its rank moved."""
    snapshot, missing = sources.snapshot, find_missing(store, sources.layout, sources.snapshot)
    for key, units in missing.damaged:
        repaired = repair_units(store, key, units)
        text, extra = "%s: %d of %d damaged units are repaired", about(snapshot, repaired=repaired)
        log.warning(text, key, repaired, len(units), extra=extra)
    for coord in missing.shards:
        if coord not in sources.shards:
            store.check_epoch(epoch)
            how = recover(store, sources, coord, method).how
            log.warning("%s of %s was missing and was %s", coord, snapshot, how, extra=about(snapshot, coord=coord))
    encoded = snapshot == store.protected or any(sources.parities.values())  # else it was meant to be sealed only
    for group, position in missing.parities if encoded else ():
        if sources.parity_holder(group, position) is None:
            store.check_epoch(epoch)
            count = repair_parity(store, sources, group, position)
            text = "parity of %s was missing, and is encoded again: %d bytes fetched"
            log.warning(text, snapshot, count, extra=about(snapshot, bytes=count))
