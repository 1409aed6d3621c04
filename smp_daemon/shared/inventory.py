"""What one SMP holds, as reported to trainers and other SMPs. Plain data, and the only input of restore planning."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from holdfast.smp_daemon.shared.addresses import ServesAt
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.plain import Address, Count, Identifier, Port, from_plain, to_plain
from holdfast.smp_daemon.shared.starts import Record


@dataclass(frozen=True, slots=True)
class Inventory(ServesAt):
    """The holdings of the SMP of `node`.

    Attributes:
        epoch: the newest epoch it has seen; 0 if none.
        run: the run that it takes part in, or took part in last; None: none.
        given_up: ids of runs that it was told are given up.
        protected: the newest snapshot of that run that the whole job agreed is protected, as far as it was told.
        trainers: number of trainers connected to it.
        layouts: by (epoch, revision), for every epoch that it holds bytes of.
        shards: sealed shards, as (snapshot, coordinate).
        parities: complete parity slots, as (snapshot, tag of the group, position).
        never_acknowledged: snapshots among these that were certainly never reported as protected, because this node
            took part in them and was not done.
        leaving: it is being drained. Others may read what it holds, but must not rely on it.
        record: the newest start of the job that it knows, and how that start ended on this node.
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
    run: Run | None = None
    given_up: frozenset[Identifier] = frozenset()

    def to_plain(self, known: Collection[str] = ()) -> dict[str, Any]:
        """Plain data that `read` reads back. Layouts whose digests are `known` are replaced by their digests: in a
        large job, layouts are most of the data."""
        layouts = [each.digest if each.digest in known else to_plain(each) for each in self.layouts.values()]
        return {**to_plain(replace(self, layouts={})), "layouts": layouts}

    @classmethod
    def read(cls, data: object, known: Mapping[str, Layout] | None = None) -> Inventory:
        """The inverse of `to_plain`. `known`: layouts by digest. Raises `ProtocolError`."""
        told = data if isinstance(data, dict) else {}
        try:
            layouts = [(known or {})[each] if isinstance(each, str) else Layout.read(each) for each in told["layouts"]]
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not an inventory: its layouts: {error!r}") from error
        inventory = from_plain(cls, told | {"layouts": {}}, "an inventory")
        return replace(inventory, layouts={(layout.epoch, layout.revision): layout for layout in layouts})


@dataclass(frozen=True, slots=True)
class PersistedRun:
    """What is persisted of one run.

    Attributes:
        snapshots: snapshots that are whole.
        others: for each snapshot that was whole, why it is not any more.
        unfinished: for each snapshot that never was whole, why.
        at: addresses of the SMPs that last wrote there.
    """

    run: Run
    snapshots: frozenset[SnapshotId] = frozenset()
    others: tuple[str, ...] = ()
    unfinished: tuple[str, ...] = ()
    at: tuple[Address, ...] = ()

    @property
    def has_state(self) -> bool:
        """Whether there is, or was, a whole snapshot."""
        return bool(self.snapshots or self.others)


@dataclass(frozen=True, slots=True)
class Persisted:
    """What an SMP finds at the place where snapshots are persisted.

    Attributes:
        place: name of the place; empty if this SMP has no persist tier.
        epoch: the newest epoch with any data; 0 if there is no data.
        runs: by run of this job.
        problem: why the place could not be read; empty if it could.
    """

    place: str
    epoch: Count = 0
    runs: tuple[PersistedRun, ...] = ()
    problem: str = ""

    def of(self, run: str) -> PersistedRun | None:
        """What is persisted of the run with that id."""
        return next((each for each in self.runs if each.run.id == run), None)
