"""After a loss without a replacement: which groups the survivors form, and who takes over which shard.

Snapshots never change, so nothing here can spoil one: lost shards are computed again on survivors, parity is coded anew
in groups of survivors, and only when all of that is committed is the old parity dropped. If anything goes wrong before,
what was there still is, and it is planned again. Two sides of a torn network may both do it, or not be able to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ec import plan_groups
from smp_daemon.inventory import Inventory
from smp_daemon.layout import Layout, Node, Shard, SnapshotId
from smp_daemon.plan import choose_sources, missing_parities, newest_whole
from smp_daemon.sources import Sources


@dataclass(frozen=True, slots=True)
class Reform:
    """What is to be done.

    Attributes:
        sources: who holds what now, in the layout that still codes the snapshot.
        layout: of the same epoch, with a higher revision: survivors only, and the lost shards among them.
        nodes: names of those whose group changes.
    """

    sources: Sources
    layout: Layout
    nodes: tuple[str, ...]

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that is protected anew."""
        return self.sources.snapshot


def plan_reform(inventories: Sequence[Inventory]) -> Reform | None:
    """What the SMPs that answer should do to survive the next loss; None if they do already, or cannot.

    Groups that are whole are left alone, unless the survivors of the others are too few for k + m by themselves.
    A node that came back, with its memory or without, is taken into the groups that change.
    """
    snapshot = newest_whole(inventories)
    sources = choose_sources(inventories, snapshot) if snapshot is not None else None
    if snapshot is None or sources is None or not sources.layout.parity:
        return None
    layout = sources.layout
    held = {inv.node: {coord for s, coord in inv.shards if s == snapshot} for inv in inventories}
    known = {key: at for inv in inventories for key, at in inv.layouts.items() if key[0] == snapshot.epoch}
    nodes = {node.name: node for key in sorted(known) for node in known[key].nodes if node.name in held}
    lacking = {group for group, _ in missing_parities(sources)}
    whole = [g for g in range(len(layout.groups)) if g not in lacking and _is_whole(layout, g, held)]
    settled = {node.name for g in whole for node in layout.members(g)}
    pool = sorted(nodes.keys() - settled)
    if not pool:
        return None
    while len(pool) < layout.data + layout.parity and whole:
        joining = min(whole, key=lambda g: (len(layout.groups[g]), g))
        whole.remove(joining)
        pool = sorted({*pool, *(node.name for node in layout.members(joining))})
    if len(pool) < 2:
        return None
    kept = [node for g in whole for node in layout.members(g)]
    kept_coords = {shard.coord for node in kept for shard in node.shards}
    homeless = [Shard(c, layout.shard_bytes(c)) for c in layout.coords if c not in kept_coords]
    original = {s.coord: node.name for node in known[min(known)].nodes for s in node.shards}
    present = {s.coord: node.name for node in layout.nodes for s in node.shards}
    settling = _settle(pool, homeless, [original, present], held)
    members = [replace(nodes[name], shards=settling[name]) for name in pool]
    reformed = replace(
        layout,
        revision=max(revision for _, revision in known) + 1,
        nodes=(*kept, *members),
        groups=(*_regroup(layout, whole, kept), *_new_groups(layout, members, len(kept))),
    )
    return Reform(sources, reformed, tuple(pool))


def _is_whole(layout: Layout, group: int, held: dict[str, set[str]]) -> bool:
    """Whether the nodes of a group protect each other, and all answer and hold their shards."""
    return layout.protects(group) and all(
        node.name in held and all(shard.coord in held[node.name] for shard in node.shards)
        for node in layout.members(group)
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


def _regroup(layout: Layout, groups: Sequence[int], kept: Sequence[Node]) -> list[tuple[int, ...]]:
    """The same groups, with the nodes numbered as they stand in `kept`."""
    index = {node.name: i for i, node in enumerate(kept)}
    return [tuple(index[node.name] for node in layout.members(g)) for g in groups]


def _new_groups(layout: Layout, members: Sequence[Node], first: int) -> list[tuple[int, ...]]:
    domains = [node.domains for node in members]
    planned = plan_groups(len(members), layout.data + layout.parity, layout.parity, domains)
    return [tuple(first + i for i in group) for group in planned]
