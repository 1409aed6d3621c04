"""Which SMPs hold which parts of a snapshot: all that an SMP needs to recover its bytes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import Address as Address


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the bytes of `snapshot` are.

    Attributes:
        layout: a layout of the snapshot's epoch.
        shards: by coordinate, the SMP that holds that shard.
        parities: by group of `layout`, then by position, the SMP that holds that parity.
        persisted: whether to read it from storage instead of memory.
    """

    snapshot: SnapshotId
    layout: Layout
    shards: dict[str, Address]
    parities: dict[int, dict[int, Address]]
    persisted: bool = False

    def holders(self, coord: str) -> tuple[Address, ...]:
        """The SMPs that are known to hold a shard."""
        address = self.shards.get(coord)
        return () if address is None else (address,)

    def parity_holder(self, group: int, position: int) -> Address | None:
        """The SMP that is known to hold that parity, or None."""
        return self.parities.get(group, {}).get(position)


def sources_of(inventories: Iterable[Inventory], snapshot: SnapshotId, layout: Layout) -> Sources:
    """The `Sources` of `snapshot` among these SMPs: for each shard and parity the first holder by node name."""
    shards: dict[str, Address] = {}
    parities: dict[int, dict[int, Address]] = {}
    for inventory in sorted(inventories, key=lambda inventory: inventory.node):
        for held, coord in inventory.shards:
            if held == snapshot:
                shards.setdefault(coord, inventory.bulk)
        for held, tag, position in inventory.parities:
            group = layout.group_of(tag)
            if held == snapshot and group is not None:
                parities.setdefault(group, {}).setdefault(position, inventory.bulk)
    return Sources(snapshot, layout, shards, parities)


def as_laid_out(snapshot: SnapshotId, layout: Layout) -> Sources:
    """The `Sources` of `snapshot` once each node has its shards in `layout`, and parity is yet to be computed."""
    return Sources(snapshot, layout, {shard.coord: node.bulk for node in layout.nodes for shard in node.shards}, {})
