"""Who holds what of a snapshot: all that an SMP needs to get bytes of it back."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId

Address = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Sources:
    """Where the bytes of `snapshot` are.

    Attributes:
        layout: a layout of the snapshot's epoch.
        shards: by coordinate, the SMP that holds that shard.
        parities: by (group of `layout`, position), the SMP that holds that parity.
        persisted: whether it is read from where it was persisted, not from memory.
    """

    snapshot: SnapshotId
    layout: Layout
    shards: dict[str, Address]
    parities: dict[tuple[int, int], Address]
    persisted: bool = False

    def holders(self, coord: str) -> tuple[Address, ...]:
        """Who hold a shard, as far as is known."""
        address = self.shards.get(coord)
        return () if address is None else (address,)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "snapshot": list(self.snapshot),
            "layout": self.layout.to_json(),
            "shards": self.shards,
            "parities": [[*place, *address] for place, address in self.parities.items()],
            "persisted": self.persisted,
        }

    @classmethod
    def from_json(cls, data: Any) -> Sources:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            epoch, step = data["snapshot"]
            return cls(
                SnapshotId(int(epoch), int(step)),
                Layout.from_json(data["layout"]),
                {str(coord): (str(host), int(port)) for coord, (host, port) in data["shards"].items()},
                {(int(g), int(p)): (str(host), int(port)) for g, p, host, port in data["parities"]},
                data["persisted"] is True,
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError(f"not the sources of a snapshot: {error!r}") from error


def sources_of(inventories: Iterable[Inventory], snapshot: SnapshotId, layout: Layout) -> Sources:
    """Who holds what of `snapshot`, of those who were asked: the first, by node name, of every shard and parity."""
    shards: dict[str, Address] = {}
    parities: dict[tuple[int, int], Address] = {}
    for inventory in sorted(inventories, key=lambda inventory: inventory.node):
        for held, coord in inventory.shards:
            if held == snapshot:
                shards.setdefault(coord, inventory.bulk)
        for held, tag, position in inventory.parities:
            group = layout.group_of(tag)
            if held == snapshot and group is not None:
                parities.setdefault((group, position), inventory.bulk)
    return Sources(snapshot, layout, shards, parities)
