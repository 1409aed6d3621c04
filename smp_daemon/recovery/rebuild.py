"""Recovers shards and parity: from this arena, from a `UnitSource`, or computed from what the group still holds."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from functools import partial

from holdfast.smp_daemon.recovery.fetch import Fetcher, UnitSource, WantedUnit
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, ProtocolError, SmpUnavailable, Unrecoverable
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.messages import Recovered
from holdfast.smp_daemon.shared.plan import choose_sources
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.parity import ParityGathering
from holdfast.smp_daemon.storage.pool import SlotState
from holdfast.smp_daemon.storage.store import Store

log = get_log(__name__)


def recover(
    store: Store,
    sources: Sources,
    coord: str,
    method: str = "chain",
    check: bool = True,
    go_on: Callable[[], None] = lambda: None,
) -> Recovered:
    """Make sure that `store` holds the shard of `coord`, from the memory of other SMPs; see `hold_shard`.

    Args:
        method: how a lost shard is computed: ``decode`` fetches k units for each of its own; ``chain`` lets the helpers
            add these up, and fetches one.
        go_on: called before each unit that is fetched, by one thread at a time; what it raises is raised.

    Raises:
        Unrecoverable: too little is left to compute the shard from.
    """
    with fetcher_of(store, sources, by_chain=method == "chain") as fetcher:
        return hold_shard(store, fetcher, coord, check, go_on)


def hold_shard(
    store: Store, source: UnitSource, coord: str, check: bool, go_on: Callable[[], None] = lambda: None
) -> Recovered:
    """Make sure that `store` holds the shard of `coord`, which `source` gives. Blocks while bytes are transferred.

    Args:
        check: read a shard that is held already, and repair units that do not match their digests. If False, the
            caller has to check them.
        go_on: as for `recover`.

    Raises:
        DamagedSnapshot: the shard held here is damaged beyond repair and was dropped, or a unit does not match its
            digest.
    """
    key = ShardKey(source.snapshot, coord)
    if store.holdings.holds(key):
        if not check:
            return _recovered(store, key, "held", 0)
        damaged = store.holdings.damaged_units(key)
        for index in damaged:
            try:
                repair_unit(store, source, key, index)
            except (Unrecoverable, DamagedSnapshot) as error:
                store.holdings.drop(key)
                raise DamagedSnapshot(f"{key} is damaged and cannot be repaired: {error}") from error
        return _recovered(store, key, "repaired" if damaged else "held", source.bytes_received)
    store.state.keep_layout(source.layout)
    digests = [0] * -(-source.layout.shard_bytes(coord) // source.layout.unit_bytes)

    def checked(view: memoryview) -> list[int]:
        store.receiving.check_slot(key, source.layout, view)
        return digests

    def wanted(view: memoryview) -> Iterator[WantedUnit]:
        """Its units. All workers wait at the failpoint before the middle one."""
        for unit in source.shard(coord, view):
            store.counters.moved()  # for whoever waits for this shard
            go_on()
            if unit.index == len(digests) // 2:
                failpoint("rebuild.middle", source.snapshot.step)
            yield replace(unit, came=partial(digests.__setitem__, unit.index))

    with store.receiving.shard(key, source.layout, checked) as view:
        source.all(wanted(view), len(digests))
    return _recovered(store, key, source.how(coord), source.bytes_received)


def repair_units(store: Store, key: Key, damaged: Collection[int]) -> int:
    """Repair what can be repaired from the rest of the stripes, wherever it is now. Returns how many units are whole
    again. Blocks.

    The other units stay noted as damaged: their stripe may not be protected yet.
    """
    with store.changed:
        layouts = list(store.arena.layouts.values())
    inventories = gather_inventories(store.job, addresses_of(layouts), layouts, store.network)
    sources = choose_sources(inventories, key.snapshot)
    if sources is None:
        return 0
    repaired, last = 0, None
    with fetcher_of(store, sources) as fetcher:
        for index in damaged:
            try:
                repair_unit(store, fetcher, key, index)
                repaired += 1
            except (Unrecoverable, DamagedSnapshot, ProtocolError) as error:
                last = error
    if last is not None:
        left = len(damaged) - repaired
        log.warning("%d units of %s are not repaired: %s", left, key, last, extra=about(key.snapshot, units=left))
    return repaired


def repair_unit(store: Store, source: UnitSource, key: Key, index: int) -> None:
    """Get a damaged unit from `source`, which other SMPs compute from the rest of its stripe, and put it back in place.
    Blocks.

    Raises:
        Unrecoverable, DamagedSnapshot: the unit cannot be recovered.
        NotHeld: `key` is not held here any more.
    """
    _, record = store.holdings.open(key)
    unit = memoryview(bytearray(record.unit(index)[1]))
    source.one(source.lost_unit(key, index, unit, record.digests[index]))
    store.holdings.repair(key, index, unit)


def repair_parity(store: Store, sources: Sources, key: ParityKey, go_on: Callable[[], None] = lambda: None) -> int:
    """Compute the parity of a position from the shards of its group, so that the group can lose another node. Returns
    the bytes fetched. Blocks. `go_on`: as for `recover`.

    Raises:
        Unrecoverable, DamagedSnapshot: every SMP that was asked has answered, and what they hold is not enough.
        SmpUnavailable: too little was received, and some SMPs have not answered.
    """
    store.state.keep_layout(sources.layout)
    layout = sources.layout
    group = layout.group_of(key.tag)
    assert group is not None  # parity is lacking in this layout
    stripes = layout.stripes(group)
    units = [each for stripe in stripes.parity_stripes(key.position) for each in stripes.contributors(stripe)]
    with fetcher_of(store, sources) as fetcher:
        try:
            with store.receiving.parity(key, layout, group) as gathering:
                fetcher.all(_contributions(fetcher, gathering, group, go_on), len(units))
        except (Unrecoverable, DamagedSnapshot) as error:
            if fetcher.misses_somebody:
                raise SmpUnavailable(f"not all SMPs that hold some of {sources.snapshot} answer: {error}") from error
            raise
        failpoint("repair_parity.done", sources.snapshot.step)
        return fetcher.bytes_received


def _contributions(
    fetcher: Fetcher, gathering: ParityGathering, group: int, go_on: Callable[[], None]
) -> Iterator[WantedUnit]:
    """The data units that a node's parity is made of. Each is added to it as it comes."""
    layout = fetcher.sources.layout
    stripes, members = layout.stripes(group), layout.members(group)
    for stripe in stripes.parity_stripes(gathering.position):
        for _, contributor, piece in stripes.contributors(stripe):
            go_on()
            out = memoryview(bytearray(piece.length))
            coord = members[contributor].shards[piece.segment].coord
            unit = fetcher.shard_unit(coord, piece.offset // layout.unit_bytes, out)
            yield replace(unit, came=partial(gathering.accumulate, stripe, contributor, out))


def fetcher_of(store: Store, sources: Sources, *, by_chain: bool = True) -> Fetcher:
    """A fetcher for this SMP; see `Fetcher`."""
    return Fetcher(sources, store.counters, store.backend, by_chain=by_chain, network=store.network)


def _recovered(store: Store, key: ShardKey, how: str, bytes_fetched: int) -> Recovered:
    """The `Recovered` of a shard that is held. Raises `ProtocolError` if it was given up meanwhile."""
    with store.changed:
        _, record = store.holdings.open(key)
        pool = store.arena.shard_pool(key.coord)
        slot = pool.find(key.snapshot, SlotState.SEALED)
        assert slot is not None  # `open` has found it under this lock
        place = pool.place(slot)
    return Recovered(
        **place, how=how, bytes_fetched=bytes_fetched, unit_bytes=record.unit_bytes, digests=record.digests
    )


def lent_unit(store: Store, fetcher: Fetcher, coord: str, index: int) -> tuple[memoryview, int]:
    """Unit `index` of a shard, checked, and its digest: from here, or from wherever `fetcher` gets it. So a trainer
    reads parts of other coordinates' shards without a whole shard being brought here. Blocks meanwhile.

    Raises:
        ProtocolError: there is no such shard, or no such unit of it.
        Unrecoverable: no SMP gives the unit, and too little of its stripe is left.
        DamagedSnapshot: the computed unit does not match its digest.
    """
    layout = fetcher.layout
    offset, length = index * layout.unit_bytes, layout.shard_bytes(coord)
    if offset >= length:
        raise ProtocolError(f"there is no unit {index}: {coord} has {length} bytes")
    key = ShardKey(fetcher.snapshot, coord)
    if store.holdings.holds(key):
        try:
            unit, record = store.holdings.checked_unit(key, index)
            return unit, record.digests[index]
        except (DamagedSnapshot, ProtocolError):  # damaged, or released meanwhile: others may have the unit
            pass
    out = memoryview(bytearray(min(layout.unit_bytes, length - offset)))
    return out, fetcher.one(fetcher.shard_unit(coord, index, out))
