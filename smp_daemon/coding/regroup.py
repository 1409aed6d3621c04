"""Plans which groups the remaining nodes form, and which node takes over which shard.

This happens after a loss without a replacement, and before a node is taken away. Snapshots never change, so a
regrouping cannot damage one: survivors rebuild the lost shards and encode parity in their new groups, and the old
parity is dropped only when all of that is committed. After an earlier failure everything that was held is still there,
and a new plan is made. Both sides of a partitioned network may regroup, or neither may be able to.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from holdfast.ec import plan_groups
from holdfast.smp_daemon.recovery.reconcile import clutter
from holdfast.smp_daemon.recovery.redundancy import tolerates
from holdfast.smp_daemon.shared.errors import Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.messages import Adopt, Encode, Phase, Release
from holdfast.smp_daemon.shared.plan import choose_sources, missing_parities, newest_protected, newest_whole
from holdfast.smp_daemon.shared.sources import Sources

PHASES: tuple[type[Phase], ...] = (Adopt, Encode, Release)
"""The orders of a regrouping. Each is given once all nodes have carried out the one before."""


@dataclass(frozen=True, slots=True)
class Regrouping:
    """A planned regrouping.

    Attributes:
        sources: who holds what now, in the layout that the snapshot is still encoded in.
        layout: the new layout, of the same epoch with a higher revision: remaining nodes only, which take over the lost
            shards. If only old parity is to be dropped, the layout of `sources`.
        nodes: names of the nodes whose group changes or, if none does, of the nodes that hold old parity.
    """

    sources: Sources
    layout: Layout
    nodes: tuple[str, ...]

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot to protect again."""
        return self.sources.snapshot

    @property
    def phases(self) -> tuple[type[Phase], ...]:
        """The orders of `PHASES` that remain to be given."""
        return PHASES[-1:] if self.layout is self.sources.layout else PHASES


def plan_regroup(inventories: Sequence[Inventory]) -> Regrouping | None:
    """Plan how the SMPs that answer can survive the next loss; None if they can already, or if there is no way.

    Whole groups are left alone, unless the other groups have fewer than k + m survivors. A node that came back, with or
    without its memory, joins the groups that change, and so does a spare, which no layout names. A leaving node serves
    what it holds, but is in no new group. If only old parity remains to be dropped, because an earlier regrouping was
    interrupted before its last phase, the plan is just that.
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
    grouped = {node.name for g in whole for node in layout.members(g)}
    pool = sorted(nodes.keys() - grouped - leaving)
    if not pool and not departing:
        if layout.revision < max(revision for _, revision in known):
            return None
        staying = {node.name for node in layout.nodes} - leaving
        cluttered = [i.node for i in inventories if i.node in staying and clutter(i.parities, snapshot, layout)]
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
    rehomed = _rehome(pool, homeless, [original, present], held)
    members = [replace(nodes[name], shards=rehomed[name]) for name in pool]
    index = {node.name: i for i, node in enumerate(kept)}
    whole_groups = [tuple(index[node.name] for node in layout.members(g)) for g in whole]
    regrouped = replace(
        layout,
        revision=max(revision for _, revision in known) + 1,
        nodes=(*kept, *members),
        groups=(*whole_groups, *_new_groups(layout, members, len(kept))),
        left=tuple(sorted((departing | set(layout.left)) - {node.name for node in (*kept, *members)})),
    )
    return Regrouping(sources, regrouped, tuple(pool))


@dataclass(frozen=True, slots=True)
class Drained:
    """What the nodes that stay hold, so that those that leave may be taken away.

    Attributes:
        snapshot: the newest, which they hold whole; None: none is held whole, and none was ever protected.
        holders: names of the nodes that hold its shards.
        tolerates: how many more nodes may be lost, whichever they are.
    """

    snapshot: SnapshotId | None
    holders: tuple[str, ...]
    tolerates: int


def moved(inventories: Sequence[Inventory]) -> Drained | None:
    """What is safe without the leaving nodes; None if they are still needed.

    They are needed until the nodes that stay hold every shard and the complete parity of every group.

    Raises:
        Unrecoverable: the newest protected snapshot is not whole even with the leaving nodes.
    """
    snapshot = newest_whole(inventories)
    if snapshot is None:
        protected = newest_protected(inventories)
        if protected is None:
            return Drained(None, (), 0)
        raise Unrecoverable(
            f"{protected} was protected, but the nodes that answer, this one included, cannot restore all of it, so "
            "this node must stay. Bring the others back first, or give the run up with `holdfast give-up`"
        )
    staying = [inventory for inventory in inventories if not inventory.leaving]
    sources = choose_sources(staying, snapshot)
    if sources is None or any(coord not in sources.shards for coord in sources.layout.coords):
        return None
    if missing_parities(sources):
        return None
    names = {inventory.bulk: inventory.node for inventory in staying}
    holders = tuple(sorted({names[at] for at in sources.shards.values()}))
    return Drained(snapshot, holders, min(tolerates(sources, group) for group in range(len(sources.layout.groups))))


def _is_whole(layout: Layout, group: int, held: dict[str, set[str]], leaving: Collection[str]) -> bool:
    """Whether the nodes of a group protect each other, and all of them answer, stay and hold their shards."""
    members = layout.members(group)
    if not layout.parity:  # nothing is protected: only leaving nodes matter
        return not any(node.name in leaving for node in members)
    return layout.protects(group) and all(
        node.name in held and node.name not in leaving and all(shard.coord in held[node.name] for shard in node.shards)
        for node in members
    )


def _rehome(
    pool: Sequence[str], homeless: Sequence[Shard], homes: Sequence[dict[str, str]], held: dict[str, set[str]]
) -> dict[str, tuple[Shard, ...]]:
    """Give each homeless shard to a node of `pool`; returns the shards of each node.

    A shard goes to one of its `homes` that still holds it, else to any holder, else to the node with the fewest bytes.
    """
    rehomed: dict[str, list[Shard]] = {name: [] for name in pool}
    lost = []
    for shard in homeless:
        at_home = [home[shard.coord] for home in homes if shard.coord in home]
        holder = next((n for n in (*at_home, *pool) if n in rehomed and shard.coord in held[n]), None)
        if holder is None:
            lost.append(shard)
        else:
            rehomed[holder].append(shard)
    for shard in sorted(lost, key=lambda shard: (-shard.bytes, shard.coord)):
        rehomed[min(pool, key=lambda name: (sum(s.bytes for s in rehomed[name]), name))].append(shard)
    return {name: tuple(sorted(shards, key=lambda s: s.coord)) for name, shards in rehomed.items()}


def _new_groups(layout: Layout, members: Sequence[Node], first: int) -> list[tuple[int, ...]]:
    if not layout.parity:
        return [(first + i,) for i in range(len(members))]
    domains = [node.domains for node in members]
    planned = plan_groups(len(members), layout.data + layout.parity, layout.parity, domains)
    return [tuple(first + i for i in group) for group in planned]
