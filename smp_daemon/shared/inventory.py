"""What one SMP holds, as it tells its trainers. Plain data; restore planning works on nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import Address, Count, Port, from_plain, to_plain
from holdfast.smp_daemon.shared.starts import Record


@dataclass(frozen=True, slots=True)
class Inventory:
    """The holdings of the SMP of `node`.

    Attributes:
        host, control_port, bulk_port: where it listens.
        more_bulk: where else it serves raw bytes, if its node has several network cards.
        epoch: the newest epoch it has seen; 0 if none.
        protected: the newest snapshot that the whole job agreed is protected, as far as this SMP was told.
        trainers: how many are connected to it.
        layouts: by (epoch, revision), for every epoch that it holds bytes of.
        shards: sealed shards, as (snapshot, coordinate).
        parities: complete parity slots, as (snapshot, tag of the group, position).
        never_acknowledged: of the snapshots that it holds, those that were certainly never reported as protected: this
            node took part, and was not done with them.
        leaving: it is being drained: others may read what it holds, and shall count on it for nothing.
        record: how the job was started last, and how that ended here.
    """

    node: str
    host: str
    control_port: Port
    bulk_port: Port
    epoch: Count = 0
    protected: SnapshotId | None = None
    trainers: Count = 0
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    shards: frozenset[tuple[SnapshotId, str]] = frozenset()
    parities: frozenset[tuple[SnapshotId, str, int]] = frozenset()
    never_acknowledged: frozenset[SnapshotId] = frozenset()
    leaving: bool = False
    record: Record = field(default_factory=Record)
    more_bulk: tuple[Address, ...] = ()

    @property
    def control(self) -> tuple[str, int]:
        """Where it answers what is small, and what names it."""
        return (self.host, self.control_port)

    @property
    def bulk(self) -> Address:
        """Where it serves raw bytes."""
        return (self.host, self.bulk_port)

    @property
    def bulk_addresses(self) -> tuple[Address, ...]:
        """Everywhere that it does, one address for each network card: `bulk` first."""
        return (self.bulk, *self.more_bulk)

    def to_plain(self, known: Collection[str] = ()) -> dict[str, Any]:
        """What `read` reads back. Of layouts whose digests are `known` it has no more than those: in a large job they
        are most of it."""
        layouts = [each.digest if each.digest in known else to_plain(each) for each in self.layouts.values()]
        return {**to_plain(replace(self, layouts={})), "layouts": layouts}

    @classmethod
    def read(cls, data: object, known: Mapping[str, Layout] | None = None) -> Inventory:
        """As `plain.from_plain`. `known`: layouts by their digests."""
        told = data if isinstance(data, dict) else {}
        try:
            layouts = [(known or {})[each] if isinstance(each, str) else Layout.read(each) for each in told["layouts"]]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not an inventory: its layouts: {error!r}") from error
        inventory = from_plain(cls, told | {"layouts": {}}, "an inventory")
        return replace(inventory, layouts={(layout.epoch, layout.revision): layout for layout in layouts})


@dataclass(frozen=True, slots=True)
class Persisted:
    """What an SMP sees at the place where snapshots are persisted.

    Attributes:
        place: its name; empty if this SMP has no persist tier.
        epoch: the newest epoch of which there is anything; 0 if there is nothing.
        snapshots: those that are whole.
        others: why each of the others is not.
        problem: why nothing could be seen; empty if it could.
    """

    place: str
    epoch: Count = 0
    snapshots: frozenset[SnapshotId] = frozenset()
    others: tuple[str, ...] = ()
    problem: str = ""
