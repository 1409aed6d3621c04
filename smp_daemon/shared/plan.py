"""Which snapshot to restore, and where each of its bytes comes from. Pure functions of the SMPs' inventories."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import StateMismatch, Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.sources import Sources, sources_of
from holdfast.smp_daemon.shared.starts import Choice

RESHARD = (
    ", or, if only the number of data-parallel ranks has changed, with elastic=True or HOLDFAST_ELASTIC=1, which cuts "
    "the snapshot anew"
)


@dataclass(frozen=True, slots=True)
class RestorePlan:
    """What to restore.

    Attributes:
        sources: which SMPs hold which parts of the chosen snapshot.
        decoded: coordinates whose shards no SMP holds, to be computed from parity.
        repair: (group, position) of parities that no SMP holds, to be recomputed.
    """

    sources: Sources
    decoded: tuple[str, ...]
    repair: tuple[tuple[int, int], ...]

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot to restore."""
        return self.sources.snapshot


def plan_restore(
    inventories: Sequence[Inventory],
    coords: Collection[str] | None,
    without: Collection[SnapshotId] = frozenset(),
    choice: Choice | None = None,
    incomplete: Mapping[SnapshotId, str] | None = None,
) -> RestorePlan | None:
    """Plan to restore the newest snapshot whose every byte is held or can be decoded.

    None if there is no such snapshot and none was ever protected.

    Args:
        inventories: one per SMP that answers.
        coords: coordinates of the ranks to restore; None: any.
        without: snapshots to skip, as they turned out not to be recoverable and were never reported as protected.
        choice: which snapshots may be restored; None: any.
        incomplete: snapshots that lack state in every copy, and what they lack. They are skipped. If the protected one
            is among them, older ones may be restored: nothing can bring it back, and the caller says so.

    Raises:
        Unrecoverable: a snapshot was protected, and neither it nor a younger one can be recovered. An older one is
            not chosen then: that would silently undo training that was promised to be safe.
        StateMismatch: the snapshot has other coordinates than `coords`.
    """
    protected = newest_protected(inventories, choice)
    known = incomplete or {}
    reasons: list[str] = []
    for snapshot in candidates(inventories, None if protected in known else protected):
        if choice is not None and not choice.admits(snapshot):
            continue
        if snapshot in known:
            reasons.append(f"{snapshot}: {known[snapshot]}")
            continue
        if snapshot in without and snapshot != protected:
            continue
        sources = choose_sources(inventories, snapshot)
        if sources is None:
            reasons.append(f"{snapshot}: no SMP knows the layout of its epoch")
            continue
        missing = undecodable(sources)
        if missing:
            reasons.extend(f"{snapshot}: {reason}" for reason in missing)
            continue
        if coords is not None:
            check_world(sources.layout, coords, RESHARD)
        return RestorePlan(
            sources,
            tuple(c for c in sources.layout.coords if c not in sources.shards),
            tuple(missing_parities(sources)),
        )
    if protected is None:
        return None
    how = "chosen" if choice is not None and protected == choice.snapshot else "protected"
    raise Unrecoverable(
        f"{protected} was {how}, and {'is not complete' if protected in known else 'too much of it is lost'}. "
        + "; ".join(reasons or ["no SMP that answers holds any of it"])
    )


def plan_persisted(snapshot: SnapshotId, layout: Layout, coords: Collection[str]) -> RestorePlan:
    """Plan to restore every shard from storage. Raises `StateMismatch` if the snapshot has other coordinates."""
    check_world(layout, coords)
    return RestorePlan(Sources(snapshot, layout, {}, {}, persisted=True), (), ())


def newest_protected(inventories: Sequence[Inventory], choice: Choice | None = None) -> SnapshotId | None:
    """The newest snapshot that any SMP was told is protected; None if there is none.

    With a choice, only snapshots that it admits count, and the chosen one counts as protected.
    """
    known = [inventory.protected for inventory in inventories if inventory.protected]
    if choice is not None:
        known = [choice.snapshot, *(snapshot for snapshot in known if choice.admits(snapshot))]
    return max(known, default=None)


def candidates(inventories: Sequence[Inventory], protected: SnapshotId | None) -> list[SnapshotId]:
    """Every snapshot of which any SMP holds a part and that is not older than `protected`, the newest first."""
    found = {s for inv in inventories for s, _ in inv.shards} | {s for inv in inventories for s, _, _ in inv.parities}
    return sorted((s for s in found if protected is None or s >= protected), reverse=True)


def newest_whole(inventories: Sequence[Inventory]) -> SnapshotId | None:
    """The newest snapshot whose every byte is held or can be computed, not older than the newest protected one."""
    return next(_whole(inventories, newest_protected(inventories)), None)


def whole_snapshots(inventories: Sequence[Inventory]) -> list[SnapshotId]:
    """All snapshots whose every byte is held or can be computed, however old, the newest first."""
    return list(_whole(inventories, None))


def _whole(inventories: Sequence[Inventory], protected: SnapshotId | None) -> Iterator[SnapshotId]:
    for snapshot in candidates(inventories, protected):
        sources = choose_sources(inventories, snapshot)
        if sources is not None and not undecodable(sources):
            yield snapshot


def choose_sources(inventories: Sequence[Inventory], snapshot: SnapshotId) -> Sources | None:
    """The sources of a snapshot in the best layout of its epoch; None if no SMP knows a layout of that epoch.

    The best layout is one in which every byte can be recovered and no parity is missing, else one in which every byte
    can be recovered, else the newest.
    """
    known = {key: layout for inv in inventories for key, layout in inv.layouts.items() if key[0] == snapshot.epoch}
    choices = [sources_of(inventories, snapshot, known[key]) for key in sorted(known, reverse=True)]
    return max(choices, key=_merit, default=None)


def _merit(sources: Sources) -> tuple[bool, bool]:
    whole = not undecodable(sources)
    return whole, whole and not missing_parities(sources)


def undecodable(sources: Sources) -> list[str]:
    """Why the snapshot cannot be recovered, group by group; empty if it can."""
    layout = sources.layout
    reasons = []
    for group in range(len(layout.groups)):
        members = layout.members(group)
        lost = {
            (position, segment)
            for position, node in enumerate(members)
            for segment, shard in enumerate(node.shards)
            if shard.coord not in sources.shards
        }
        if not lost:
            continue
        parities = {p for p in range(len(members)) if sources.parity_holder(group, p) is None}
        if layout.protects(group) and layout.stripes(group).decodable(lost, parities):
            continue
        nodes = ", ".join(sorted({members[position].name for position, _ in lost}))
        _, count = layout.code(group)
        reasons.append(
            f"group {group} lost shards of {nodes} and parity of {len(parities)} nodes, and has {count} parity "
            f"unit{'s' * (count != 1)} a stripe"
        )
    return reasons


def missing_parities(sources: Sources) -> list[tuple[int, int]]:
    """(group, position) of every parity that no SMP holds."""
    layout = sources.layout
    return [
        (group, position)
        for group in range(len(layout.groups))
        for position in range(len(layout.groups[group]))
        if sources.parity_holder(group, position) is None and layout.has_parity(group, position)
    ]


def parity_repairer(layout: Layout, group: int, position: int) -> str:
    """The coordinate whose node recomputes that parity: one of the lost node's, whose new node has replaced it."""
    own = layout.members(group)[position].shards
    return own[0].coord if own else layout.coords[0]


def check_world(layout: Layout, coords: Collection[str], otherwise: str = "") -> None:
    """Raises `StateMismatch` unless a layout has exactly these coordinates. `otherwise`: another remedy to name."""
    wanted, held = set(coords), set(layout.coords)
    if wanted != held:
        raise StateMismatch(
            f"the snapshot is of {len(held)} ranks and this job has {len(wanted)}; "
            f"not in the snapshot: {sorted(wanted - held)[:8]}; not in this job: {sorted(held - wanted)[:8]}. "
            f"Start with the same parallel sizes{otherwise}"
        )
