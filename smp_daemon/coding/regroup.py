"""After a loss without a replacement, or before a node is taken away: which groups the others form, and who takes over
which shard.

Snapshots never change, so nothing here can spoil one: lost shards are computed again on survivors, parity is coded anew
in groups of survivors, and only when all of that is committed is the old parity dropped. If anything goes wrong before,
what was there still is, and it is planned again. Two sides of a torn network may both do it, or not be able to.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace

from holdfast.ec import plan_groups
from holdfast.smp_daemon.recovery.redundancy import tolerates
from holdfast.smp_daemon.shared.errors import Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plan import choose_sources, missing_parities, newest_protected, newest_whole
from holdfast.smp_daemon.shared.sources import Sources

PHASES = ("adopt", "encode", "release")
"""What the nodes of a regrouping are told to do, one after the other, each once all have done what is before it."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """What is to be done.

    Attributes:
        sources: who holds what now, in the layout that still codes the snapshot.
        layout: of the same epoch, with a higher revision: survivors only, and the lost shards among them.
        nodes: names of those whose group changes; if none does, of those that hold parity which is not needed any more.
    """

    sources: Sources
    layout: Layout
    nodes: tuple[str, ...]

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that is protected anew."""
        return self.sources.snapshot

    @property
    def phases(self) -> tuple[str, ...]:
        """Those of `PHASES` that are left to do."""
        return PHASES[-1:] if self.layout is self.sources.layout else PHASES


def plan_regroup(inventories: Sequence[Inventory]) -> Regrouping | None:
    """What the SMPs that answer should do to survive the next loss; None if they do already, or cannot.

    Groups that are whole are left alone, unless the survivors of the others are too few for k + m by themselves.
    A node that came back, with its memory or without, is taken into the groups that change; so is a spare, which no
    layout knows. A node that is leaving gives what it holds, and is in no group any more. If all that is left to do is
    to drop the old parity, because somebody died before that, so it is planned.
    """
    snapshot = newest_whole(inventories)
    sources = choose_sources(inventories, snapshot) if snapshot is not None else None
    if snapshot is None or sources is None:
        return None
    layout = sources.layout
    leaving = {inventory.node for inventory in inventories if inventory.leaving}
    departing = leaving & {node.name for node in layout.nodes}
    if not layout.parity and not departing:
        return None
    held = {inv.node: {coord for s, coord in inv.shards if s == snapshot} for inv in inventories}
    known = {key: at for inv in inventories for key, at in inv.layouts.items() if key[0] == snapshot.epoch}
    nodes = {node.name: node for key in sorted(known) for node in known[key].nodes if node.name in held}
    spares = {
        i.node: Node(i.node, i.host, i.control_port, i.bulk_port, (), more_bulk=i.more_bulk)
        for i in inventories
        if i.node not in nodes
    }
    lacking = {group for group, _ in missing_parities(sources)}
    whole = [g for g in range(len(layout.groups)) if g not in lacking and _is_whole(layout, g, held, leaving)]
    settled = {node.name for g in whole for node in layout.members(g)}
    pool = sorted(nodes.keys() - settled - leaving)
    if not pool and not departing:
        if layout.revision < max(revision for _, revision in known):
            return None
        staying = {node.name for node in layout.nodes} - leaving
        cluttered = [i.node for i in inventories if i.node in staying and is_cluttered(i.parities, snapshot, layout)]
        return Regrouping(sources, layout, tuple(cluttered)) if cluttered else None
    nodes |= spares
    pool = sorted({*pool, *spares} - leaving)
    while len(pool) < layout.data + layout.parity and whole:
        joining = min(whole, key=lambda g: (len(layout.groups[g]), g))
        whole.remove(joining)
        pool = sorted({*pool, *(node.name for node in layout.members(joining))})
    if len(pool) < (1 if departing else 2):
        return None
    kept = [node for g in whole for node in layout.members(g)]
    kept_coords = {shard.coord for node in kept for shard in node.shards}
    homeless = [Shard(c, layout.shard_bytes(c)) for c in layout.coords if c not in kept_coords]
    original = {s.coord: node.name for node in known[min(known)].nodes for s in node.shards}
    present = {s.coord: node.name for node in layout.nodes for s in node.shards}
    settling = _settle(pool, homeless, [original, present], held)
    members = [replace(nodes[name], shards=settling[name]) for name in pool]
    regrouped = replace(
        layout,
        revision=max(revision for _, revision in known) + 1,
        nodes=(*kept, *members),
        groups=(*_keep_groups(layout, whole, kept), *_new_groups(layout, members, len(kept))),
        left=tuple(sorted((departing | set(layout.left)) - {node.name for node in (*kept, *members)})),
    )
    return Regrouping(sources, regrouped, tuple(pool))


def is_cluttered(parities: Iterable[tuple[SnapshotId, str, int]], snapshot: SnapshotId, layout: Layout) -> bool:
    """Whether a node that holds these parities holds one of the snapshot for a group that the layout does not have."""
    return any(of == snapshot and layout.group_of(tag) is None for of, tag, _ in parities)


@dataclass(frozen=True, slots=True)
class Moved:
    """What those who stay hold of the newest snapshot, all of it whole.

    Attributes:
        snapshot: None: nobody ever held any.
        holders: names of the nodes that hold its shards.
        tolerates: how many of them may be lost, whichever they are.
    """

    snapshot: SnapshotId | None
    holders: tuple[str, ...]
    tolerates: int


def moved(inventories: Sequence[Inventory]) -> Moved | None:
    """What is safe without the nodes that are leaving; None if they still hold what nobody else does.

    That is so until every shard is held by those who stay, and the parity of every group is complete among them.

    Raises:
        Unrecoverable: the newest snapshot that was protected is not whole even with the nodes that are leaving.
    """
    snapshot = newest_whole(inventories)
    if snapshot is None:
        protected = newest_protected(inventories)
        if protected is None:
            return Moved(None, (), 0)
        raise Unrecoverable(
            f"{protected} was protected, and not all of it can be had from the nodes that answer: what this node holds "
            "of it is needed. Bring the others back first, or give the run up with `holdfast gc`"
        )
    staying = [inventory for inventory in inventories if not inventory.leaving]
    sources = choose_sources(staying, snapshot)
    if sources is None or any(coord not in sources.shards for coord in sources.layout.coords):
        return None
    if missing_parities(sources):
        return None
    names = {inventory.bulk: inventory.node for inventory in staying}
    holders = tuple(sorted({names[at] for at in sources.shards.values()}))
    return Moved(snapshot, holders, min(tolerates(sources, group) for group in range(len(sources.layout.groups))))


def _is_whole(layout: Layout, group: int, held: dict[str, set[str]], leaving: Collection[str]) -> bool:
    """Whether the nodes of a group protect each other, and all answer, stay, and hold their shards."""
    members = layout.members(group)
    if not layout.parity:  # then nobody is protected, and all that matters is who leaves
        return not any(node.name in leaving for node in members)
    return layout.protects(group) and all(
        node.name in held and node.name not in leaving and all(shard.coord in held[node.name] for shard in node.shards)
        for node in members
    )


def _settle(
    pool: Sequence[str], homeless: Sequence[Shard], homes: Sequence[dict[str, str]], held: dict[str, set[str]]
) -> dict[str, tuple[Shard, ...]]:
    """A node of `pool` for each shard: one of its `homes` that still holds it, else any holder, else the emptiest."""
    settled: dict[str, list[Shard]] = {name: [] for name in pool}
    lost = []
    for shard in homeless:
        at_home = [home[shard.coord] for home in homes if shard.coord in home]
        holder = next((n for n in (*at_home, *pool) if n in settled and shard.coord in held[n]), None)
        if holder is None:
            lost.append(shard)
        else:
            settled[holder].append(shard)
    for shard in sorted(lost, key=lambda shard: (-shard.bytes, shard.coord)):
        settled[min(pool, key=lambda name: (sum(s.bytes for s in settled[name]), name))].append(shard)
    return {name: tuple(sorted(shards, key=lambda s: s.coord)) for name, shards in settled.items()}


def _keep_groups(layout: Layout, groups: Sequence[int], kept: Sequence[Node]) -> list[tuple[int, ...]]:
    """The same groups, with the nodes numbered as they stand in `kept`."""
    index = {node.name: i for i, node in enumerate(kept)}
    return [tuple(index[node.name] for node in layout.members(g)) for g in groups]


def _new_groups(layout: Layout, members: Sequence[Node], first: int) -> list[tuple[int, ...]]:
    if not layout.parity:
        return [(first + i,) for i in range(len(members))]
    domains = [node.domains for node in members]
    planned = plan_groups(len(members), layout.data + layout.parity, layout.parity, domains)
    return [tuple(first + i for i in group) for group in planned]
