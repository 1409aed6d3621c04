"""What one SMP holds, as it tells its trainers. Plain data; restore planning works on nothing else."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.starts import Record


@dataclass(frozen=True, slots=True)
class Inventory:
    """The holdings of the SMP of `node`.

    Attributes:
        host, control_port, bulk_port: where it listens.
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
    control_port: int
    bulk_port: int
    epoch: int = 0
    protected: SnapshotId | None = None
    trainers: int = 0
    layouts: dict[tuple[int, int], Layout] = field(default_factory=dict)
    shards: frozenset[tuple[SnapshotId, str]] = frozenset()
    parities: frozenset[tuple[SnapshotId, str, int]] = frozenset()
    never_acknowledged: frozenset[SnapshotId] = frozenset()
    leaving: bool = False
    record: Record = field(default_factory=Record)

    @property
    def bulk(self) -> tuple[str, int]:
        """Where it serves raw bytes."""
        return (self.host, self.bulk_port)

    def to_json(self, known: Collection[str] = ()) -> dict[str, Any]:
        """A JSON object that `from_json` reads back. Of layouts whose digests are `known` it has no more than those: in
        a large job they are most of it."""
        layouts = self.layouts.values()
        return {
            "node": self.node,
            "host": self.host,
            "control_port": self.control_port,
            "bulk_port": self.bulk_port,
            "epoch": self.epoch,
            "protected": list(self.protected) if self.protected else None,
            "trainers": self.trainers,
            "layouts": [each.digest if known and each.digest in known else each.to_json() for each in layouts],
            "shards": sorted([*snapshot, coord] for snapshot, coord in self.shards),
            "parities": sorted([*snapshot, tag, position] for snapshot, tag, position in self.parities),
            "unpromised": sorted(map(list, self.never_acknowledged)),
            "leaving": self.leaving,
            "record": self.record.to_json(),
        }

    @classmethod
    def from_json(cls, data: Any, known: Mapping[str, Layout] | None = None) -> Inventory:
        """Raises `ProtocolError` if `data` is not what `to_json` makes. `known`: layouts by their digests."""
        try:
            layouts = [
                (known or {})[each] if isinstance(each, str) else Layout.from_json(each) for each in data["layouts"]
            ]
            return cls(
                node=str(data["node"]),
                host=str(data["host"]),
                control_port=int(data["control_port"]),
                bulk_port=int(data["bulk_port"]),
                epoch=int(data["epoch"]),
                protected=SnapshotId(*map(int, data["protected"])) if data["protected"] else None,
                trainers=int(data["trainers"]),
                layouts={(layout.epoch, layout.revision): layout for layout in layouts},
                shards=frozenset((SnapshotId(int(e), int(s)), str(c)) for e, s, c in data["shards"]),
                parities=frozenset((SnapshotId(int(e), int(s)), str(t), int(p)) for e, s, t, p in data["parities"]),
                never_acknowledged=frozenset(SnapshotId(int(e), int(s)) for e, s in data["unpromised"]),
                leaving=bool(data["leaving"]),
                record=Record.from_json(data["record"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not an inventory: {error!r}") from error


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
    epoch: int = 0
    snapshots: frozenset[SnapshotId] = frozenset()
    others: tuple[str, ...] = ()
    problem: str = ""

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {
            "place": self.place,
            "epoch": self.epoch,
            "snapshots": sorted(map(list, self.snapshots)),
            "others": list(self.others),
            "problem": self.problem,
        }

    @classmethod
    def from_json(cls, data: Any) -> Persisted:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            return cls(
                str(data["place"]),
                int(data["epoch"]),
                frozenset(SnapshotId(int(e), int(s)) for e, s in data["snapshots"]),
                tuple(str(reason) for reason in data["others"]),
                str(data["problem"]),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ProtocolError(f"not what is persisted: {error!r}") from error
