"""After a loss without a replacement: what the survivors plan, as a pure function, and what real SMPs then do."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import pytest

from holdfast.smp_daemon.coding.regroup import Regrouping, plan_regroup
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.messages import Adopt, Encode, Release
from holdfast.smp_daemon.shared.plan import parity_repairer, plan_restore
from holdfast.snapshot.resume.arrange import Protection, arrange
from tests.smp_kit import Ground, Run, SmpProcess, Trainer

pytestmark = pytest.mark.smps(HOLDFAST_REGROUP_AFTER="200ms")

SNAPSHOT = SnapshotId(3, 8)


def layout_of(nodes: int, data: int, parity: int, *, per_node: int = 1, least: int = 100) -> Layout:
    ranks = [
        Node(f"node{i // per_node}", f"10.0.0.{i // per_node}", 1, 2, (Shard(f"dp{i}", least + i),))
        for i in range(nodes * per_node)
    ]
    return arrange("job", SNAPSHOT.epoch, ranks, Protection(data, parity), 3)


def everything(layout: Layout, *, but: Collection[str] = (), trainers: int = 0) -> list[Inventory]:
    """The inventories of a layout's SMPs when its snapshot is protected, except those in `but`, which do not answer."""
    found = []
    for group, members in enumerate(layout.groups):
        for position, node in enumerate(layout.members(group)):
            parities = set()
            if layout.protects(group) and layout.stripes(group).parity_bytes(position):
                parities = {(SNAPSHOT, layout.tag(group), position)}
            found.append(
                Inventory(
                    node=node.name,
                    host=node.host,
                    control_port=node.control_port,
                    bulk_port=node.bulk_port,
                    epoch=SNAPSHOT.epoch,
                    protected=SNAPSHOT,
                    trainers=trainers,
                    layouts={(layout.epoch, layout.revision): layout},
                    shards=frozenset((SNAPSHOT, shard.coord) for shard in node.shards),
                    parities=frozenset(parities),
                )
            )
        assert len(members) == len(layout.members(group))
    return [inventory for inventory in found if inventory.node not in but]


def carried_out(inventories: Sequence[Inventory], regrouping: Regrouping) -> list[Inventory]:
    """The inventories after the regrouping."""
    after = {inventory.node: inventory for inventory in everything(regrouping.layout)}
    assert after.keys() <= {inventory.node for inventory in inventories}
    both = {key: layout for inventory in inventories for key, layout in inventory.layouts.items()}
    both[regrouping.layout.epoch, regrouping.layout.revision] = regrouping.layout
    return [replace(after.get(inv.node, inv), layouts=both) for inv in inventories]


def planned(inventories: Sequence[Inventory]) -> Regrouping:
    regrouping = plan_regroup(inventories)
    assert regrouping is not None
    return regrouping


def regrouped(*, without: str) -> tuple[Layout, list[Inventory]]:
    """A layout of four nodes, and what the others hold once they have made good the loss of one."""
    layout = layout_of(4, 3, 1)
    survivors = everything(layout, but={without})
    return layout, carried_out(survivors, planned(survivors))


class TestThePlan:
    @pytest.mark.parametrize(
        ("layout", "lost"),
        [
            pytest.param(layout_of(8, 3, 1), [], id="nothing is lost"),
            pytest.param(layout_of(4, 3, 0), ["node1"], id="there is no parity"),
            pytest.param(layout_of(4, 3, 1), ["node1", "node2"], id="beyond parity"),
            pytest.param(layout_of(2, 1, 1), ["node0"], id="one survivor"),
        ],
    )
    def test_where_nothing_can_be_made_good_there_is_none(self, layout: Layout, lost: list[str]) -> None:
        assert plan_regroup(everything(layout, but=lost)) is None

    @pytest.mark.parametrize(("nodes", "data", "parity"), [(4, 3, 1), (4, 2, 2), (5, 2, 1), (6, 4, 2), (3, 1, 2)])
    def test_every_loss_within_parity_leads_to_groups_of_survivors_that_hold_everything(
        self, nodes: int, data: int, parity: int
    ) -> None:
        layout = layout_of(nodes, data, parity)
        for count in range(1, parity + 1):
            for lost in combinations([node.name for node in layout.nodes], count):
                if nodes - count < 2:
                    continue
                regrouping = planned(everything(layout, but=lost))
                assert {node.name for node in regrouping.layout.nodes} == {n.name for n in layout.nodes} - set(lost)
                assert sorted(regrouping.layout.coords) == sorted(layout.coords)
                assert regrouping.layout.revision == 1
                assert all(regrouping.layout.protects(g) for g in range(len(regrouping.layout.groups)))

    def test_once_carried_out_nothing_is_left_to_do_and_another_may_be_lost(self) -> None:
        layout = layout_of(5, 4, 1)
        survivors = everything(layout, but={"node2"})
        after = carried_out(survivors, planned(survivors))
        assert plan_regroup(after) is None
        for lost in after:
            rest = [inventory for inventory in after if inventory is not lost]
            assert plan_restore(rest, layout.coords) is not None
            again = planned(rest)
            assert again.layout.revision == 2
            assert plan_regroup(carried_out(rest, again)) is None

    def test_who_still_holds_the_old_parity_is_told_to_drop_it_and_nothing_else(self) -> None:
        layout, after = regrouped(without="node2")
        before = {inventory.node: inventory.parities for inventory in everything(layout, but={"node2"})}
        regrouping = planned([replace(i, parities=i.parities | before[i.node]) for i in after])
        assert regrouping.phases == (Release,)
        assert set(regrouping.nodes) == {name for name, parities in before.items() if parities} != set()
        assert regrouping.layout.revision == 1
        assert plan_regroup(after) is None

    def test_old_parity_is_kept_while_new_parity_is_missing(self) -> None:
        layout, after = regrouped(without="node2")
        before = {inventory.node: inventory.parities for inventory in everything(layout, but={"node2"})}
        half = [replace(i, parities=before[i.node] | (i.parities if i.node != "node0" else set())) for i in after]
        assert planned(half).phases == (Adopt, Encode, Release)
        back = [*half, *(i for i in everything(layout) if i.node == "node2")]
        found = plan_regroup(back)
        assert found is None or Adopt in found.phases

    def test_lost_shards_go_to_the_emptiest_survivors_and_the_others_stay_where_they_are(self) -> None:
        layout = layout_of(4, 3, 1, per_node=3)
        regrouping = planned(everything(layout, but={"node1"}))
        homes = {shard.coord: node.name for node in regrouping.layout.nodes for shard in node.shards}
        stayed = {shard.coord: node.name for node in layout.nodes if node.name != "node1" for shard in node.shards}
        assert {coord: homes[coord] for coord in stayed} == stayed
        assert sorted(homes[coord] for coord in ("dp3", "dp4", "dp5")) == ["node0", "node2", "node3"]

    def test_groups_that_are_whole_are_left_alone(self) -> None:
        layout = layout_of(12, 2, 1)
        regrouping = planned(everything(layout, but={"node4"}))
        untouched = {layout.tag(g) for g in range(4) if "node4" not in {n.name for n in layout.members(g)}}
        kept = untouched & {regrouping.layout.tag(g) for g in range(len(regrouping.layout.groups))}
        assert len(kept) == 2
        assert len(regrouping.nodes) == 5

    def test_survivors_too_few_for_their_code_join_another_group(self) -> None:
        layout = layout_of(4, 1, 1)
        regrouping = planned(everything(layout, but={"node0"}))
        assert regrouping.nodes == ("node1", "node2", "node3")
        assert [len(group) for group in regrouping.layout.groups] == [3]

    def test_a_node_that_came_back_gets_its_shards_back(self) -> None:
        layout, after = regrouped(without="node3")
        (back,) = (inventory for inventory in everything(layout) if inventory.node == "node3")
        regrouping = planned([*after, back])
        assert regrouping.layout.node("node3").shards == layout.node("node3").shards
        assert len(regrouping.layout.nodes) == 4

    def test_a_node_that_came_back_empty_is_a_member_without_shards(self) -> None:
        layout, after = regrouped(without="node3")
        (back,) = (inventory for inventory in everything(layout) if inventory.node == "node3")
        everybody = [*after, replace(back, shards=frozenset(), parities=frozenset())]
        regrouping = planned(everybody)
        assert regrouping.layout.node("node3").shards == ()
        assert plan_regroup(carried_out(everybody, regrouping)) is None
        assert parity_repairer(regrouping.layout, 0, 3) == "dp0"

    def test_new_groups_respect_failure_domains(self) -> None:
        layout = layout_of(9, 2, 1)
        racked = replace(
            layout, nodes=tuple(replace(n, domains=(f"rack={i % 3}",)) for i, n in enumerate(layout.nodes))
        )
        regrouping = planned(everything(racked, but={"node0", "node3", "node6"}))
        for members in (regrouping.layout.members(g) for g in range(len(regrouping.layout.groups))):
            racks = [label for node in members for label in node.domains]
            assert len(set(racks)) == min(len(racks), 2)

    def test_a_snapshot_that_was_only_sealed_is_protected_if_all_of_it_is_there(self) -> None:
        layout = layout_of(3, 2, 1)
        sealed = [replace(inv, parities=frozenset(), protected=None) for inv in everything(layout)]
        regrouping = planned(sealed)
        assert regrouping.layout.groups == layout.groups
        assert plan_regroup(carried_out(sealed, regrouping)) is None


# ---------------------------------------------------------------------- real SMPs


def leave(run: Run) -> None:
    """End all trainers."""
    for trainer in run:
        trainer.client.close()


def stops(count: int, *points: str) -> dict[int, list[tuple[str, int | None]]]:
    return {i: [(point, None) for point in points] for i in range(count)}


def come_back(run: Run, smps: Sequence[SmpProcess], lost: Collection[int]) -> None:
    """Replace the lost nodes, attach trainers everywhere, and compare every shard to the last byte."""
    for i in lost:
        smps[i].rules = ()
        smps[i].launch().wait_ready()
    trainers = {
        coord: Trainer(next(smp for smp in smps if smp.name == run.layout.nodes[rank].name), coord, 3000 + rank)
        for rank, coord in enumerate(run.trainers)
    }
    for trainer in trainers.values():
        trainer.client.join(run.epoch + 1)  # stops the survivors if they are regrouping again
    plan = plan_restore([trainer.client.inventory() for trainer in trainers.values()], trainers)
    assert plan is not None
    assert plan.snapshot == run.protected
    for trainer in trainers.values():
        assert trainer.recover(plan).view == trainer.image(plan.snapshot)
    leave(Run(list(trainers.values())))


def started(
    ground: Ground, nodes: int, protect: str, *points: str, at: Mapping[int, str] = {}, elements: int = 3000
) -> tuple[list[SmpProcess], Run]:
    """SMPs that hold a protected snapshot, without trainers. They stop at `points`; some ``at`` another one."""
    rules = stops(nodes, *points) | {i: [(point, None)] for i, point in at.items()}
    smps, run = ground.job([[elements + i] for i in range(nodes)], rules=rules, protect=protect)
    run.protect(1)
    run.protect(2)
    leave(run)
    return smps, run


class TestSurvivors:
    @pytest.mark.parametrize(("nodes", "protect"), [(4, "3+1"), (5, "3+1"), (3, "copies:1")])
    @pytest.mark.proves("regroup")
    def test_protect_themselves_anew_so_that_another_node_may_be_lost(
        self, ground: Ground, nodes: int, protect: str
    ) -> None:
        smps, run = started(ground, nodes, protect, "regroup.done")
        smps[1].lose()
        for i in range(nodes):
            if i != 1:
                ground.points.wait(f"node{i}", "regroup.done", 2).go()
        smps[2].lose()
        come_back(run, smps, [1, 2])

    @pytest.mark.parametrize("point", ["regroup.adopt", "regroup.encode"])
    def test_lose_another_within_parity_while_they_do(self, ground: Ground, point: str) -> None:
        smps, run = started(ground, 5, "3+2", point)
        smps[1].lose()
        ground.points.wait("node3", point, 2)
        smps[3].lose()
        come_back(run, smps, [1, 3])

    def test_go_on_when_the_one_in_charge_is_lost_too(self, ground: Ground) -> None:
        smps, run = started(ground, 6, "4+2", "regroup.done", at={0: "regroup.encode"})
        smps[5].lose()
        ground.points.wait("node0", "regroup.encode", 2)
        smps[0].lose()
        finish(ground, smps, [1, 2, 3, 4])
        smps[1].lose()
        smps[2].lose()
        come_back(run, smps, [0, 1, 2, 5])

    def test_do_nothing_while_a_trainer_is_connected(self, ground: Ground) -> None:
        smps, run = ground.job(
            [[3000]] * 3,
            rules=stops(3, "regroup.adopt") | {0: [("regroup.declined", 1), ("regroup.adopt", None)]},
            protect="2+1",
        )
        run.protect(1)
        run.protect(2)
        run["dp0"].client.close()
        run["dp1"].client.close()
        smps[1].lose()
        ground.points.wait("node0", "regroup.declined", 1).go()
        run["dp2"].client.close()
        ground.points.wait("node0", "regroup.adopt", 2).go()
        ground.points.wait("node2", "regroup.adopt", 2).go()

    @pytest.mark.parametrize("point", ["regroup.adopt", "regroup.encode"])
    def test_give_way_to_trainers_that_start_again(self, ground: Ground, point: str) -> None:
        smps, run = started(ground, 4, "3+1", point)
        smps[1].lose()
        held = [ground.points.wait(f"node{i}", point, 2) for i in (0, 2, 3)]
        come_back(run, smps, [1])
        for each in held:
            each.go()
        trainers = [Trainer(smp, f"dp{i}", 3000 + i) for i, smp in enumerate(smps)]
        again = Run(trainers, protect="3+1").start(run.epoch + 2)
        again.protect(3)
        assert {trainer.client.counters()["regroups"] for trainer in again} == {0}

    def test_take_a_returned_node_in(self, ground: Ground) -> None:
        smps, run = started(ground, 4, "3+1", "regroup.done")
        smps[3].kill()
        finish(ground, smps, [0, 1, 2])
        smps[3].launch().wait_ready()
        finish(ground, smps, [0, 1, 2, 3])
        assert (run.protected, "dp3") in smps[3].client().inventory().shards
        leave(run)
        smps[0].lose()
        come_back(run, smps, [0])

    def test_use_the_memory_of_free_slots_before_any_more(self, ground: Ground) -> None:
        smps, run = started(ground, 4, "3+1", "regroup.done", elements=200_000)
        before = [reserved(smp) for smp in smps]
        smps[1].lose()
        finish(ground, smps, [0, 2, 3])
        # node0 took the lost shard and about as much new parity; it had one free slot of each kind.
        assert reserved(smps[0]) - before[0] < run.layout.shard_bytes("dp1")
        assert all(reserved(smps[i]) <= before[i] for i in (2, 3))


def finish(ground: Ground, smps: Sequence[SmpProcess], nodes: Sequence[int]) -> None:
    """Wait until every one of `nodes` has completed a regrouping."""
    for held in [ground.points.wait(f"node{i}", "regroup.done", 2) for i in nodes]:
        held.go()


def reserved(smp: SmpProcess) -> int:
    """Bytes of memory reserved by slots."""
    slots = [path for path in smp.arena.iterdir() if path.suffix in (".safetensors", ".parity")]
    return sum(path.stat().st_blocks * 512 for path in slots)
