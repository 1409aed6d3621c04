"""Which snapshot a restart goes back to: every loss, at every half-finished moment, against an oracle.

The oracle knows nothing of `ec` or of `shared.plan`. It deals units out to stripes as the promise says, and asks for
the newest snapshot in which every byte is held, or in a stripe that has lost no more units than it has parities.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, permutations, product

import pytest

from holdfast.smp_daemon.shared.errors import StateMismatch, Unrecoverable
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.plan import RestorePlan, choose_sources, newest_whole, parity_repairer, plan_restore

UNIT = 10
OLD = SnapshotId(1, 10)
NEW = SnapshotId(2, 12)


@dataclass(frozen=True)
class Job:
    """Lengths of each node's shards, and the nodes of each group. By default a stripe has as much data as there is room
    for, and one parity."""

    lengths: tuple[tuple[int, ...], ...]
    groups: tuple[tuple[int, ...], ...]
    data: int = 7
    parity: int = 1

    @property
    def nodes(self) -> range:
        return range(len(self.lengths))

    @cached_property
    def shards(self) -> tuple[str, ...]:
        return tuple(coord for node in self.nodes for coord in self.shards_of(node))

    def shards_of(self, node: int) -> list[str]:
        return [f"n{node}s{segment}" for segment in range(len(self.lengths[node]))]

    def layout(self, epoch: int) -> Layout:
        """The layout of an epoch. Each epoch places the same job on the machines in another order."""
        nodes = tuple(
            Node(
                machine(node, epoch, len(self.lengths)),
                "host",
                1,
                2,
                tuple(Shard(coord, n) for coord, n in zip(self.shards_of(node), lengths, strict=True)),
            )
            for node, lengths in enumerate(self.lengths)
        )
        return Layout("run", epoch, 0, nodes, self.groups, self.data, self.parity, UNIT, 3)

    @cached_property
    def stripes(self) -> list[list[Stripe]]:
        """The stripes of each group."""
        return [list(self._deal(group)) for group in self.groups]

    def _deal(self, group: Sequence[int]) -> Iterator[Stripe]:
        """Stripes are placed on neighbours, parity first. Each starts where the parity of the one before ends, or one
        further on once a round would repeat itself."""
        parity = self.parity_of(group)
        data = min(self.data, len(group) - parity)
        if not parity:
            return
        hands = [
            [c for c, n in zip(self.shards_of(node), self.lengths[node], strict=True) for _ in range(-(-n // UNIT))]
            for node in group
        ]
        start, started = 0, set[int]()
        while any(hands):
            while start in started:
                start = (start + 1) % len(group)
            started.add(start)
            seats = [(start + i) % len(group) for i in range(parity + data)]
            yield Stripe(
                frozenset(f"p{group[at]}" for at in seats[:parity]),
                tuple(hands[at].pop(0) for at in seats[parity:] if hands[at]),
            )
            start = (start + parity) % len(group)
            if len(started) == len(group):
                start, started = 0, set()

    def parity_of(self, group: Sequence[int]) -> int:
        """Parities per stripe. Each needs another node to be of any use."""
        return min(self.parity, len(group) - 1)

    @cached_property
    def parities(self) -> tuple[str, ...]:
        """The parity slots that are not empty, named after their nodes."""
        return tuple(sorted({holder for group in self.stripes for stripe in group for holder in stripe.holders}))

    def lossy_groups(self, held: Collection[str]) -> list[int]:
        """The groups that cannot be recovered if only the shards and parities in `held` are left."""
        return [g for g in range(len(self.groups)) if not self._can_be_had(g, held)]

    def _can_be_had(self, g: int, held: Collection[str]) -> bool:
        if not self.stripes[g]:
            return all(coord in held for node in self.groups[g] for coord in self.shards_of(node))
        for stripe in self.stripes[g]:
            lost = [unit for unit in stripe.units if unit not in held]
            if lost and len(lost) + len(stripe.holders.difference(held)) > len(stripe.holders):
                return False
        return True


@dataclass(frozen=True)
class Stripe:
    """The parity slots that hold its parities, and the shards of its data units."""

    holders: frozenset[str]
    units: tuple[str, ...]


def machine(node: int, epoch: int, count: int) -> str:
    return f"m{(node + epoch) % count}"


JOBS = {
    "two nodes": Job(((25,), (25,)), ((0, 1),)),
    "two nodes, one short": Job(((5,), (35,)), ((0, 1),)),
    "two shards a node": Job(((25, 5), (10, 21)), ((0, 1),)),
    "three nodes": Job(((30,), (30,), (30,)), ((0, 1, 2),)),
    "three uneven nodes": Job(((5,), (31,), (12,)), ((0, 1, 2),)),
    "a node alone": Job(((15,), (15,), (15, 3)), ((0, 2), (1,))),
    "three nodes of two": Job(((10, 10), (25, 5), (4, 4)), ((2, 0, 1),)),
    "four nodes": Job(((30,), (30,), (30,), (30,)), ((0, 1, 2, 3),)),
    "four uneven nodes": Job(((4,), (60,), (12,), (9,)), ((0, 1, 2, 3),)),
    "four nodes of one or two": Job(((10, 5), (12,), (3, 13), (20,)), ((1, 3, 0, 2),)),
    "two groups": Job(((12,), (12,), (25,), (3,)), ((0, 1), (2, 3))),
    "two mixed groups": Job(((12,), (12,), (25,), (3,)), ((3, 0), (2, 1))),
    "two parities": Job(((30,), (12,), (25,), (7,)), ((0, 1, 2, 3),), parity=2),
    "two parities, two shards a node": Job(((10, 5), (12,), (3, 13)), ((2, 0, 1),), parity=2),
    "two copies": Job(((30,), (12,), (25,)), ((0, 1, 2),), data=1, parity=2),
    "a wide group": Job(((30,), (12,), (25,), (7,)), ((0, 1, 2, 3),), data=2),
    "a wide group of copies": Job(((30,), (12,), (25,), (7,)), ((2, 0, 1, 3),), data=1),
    "a wide group with two parities": Job(((21,), (12,), (5,), (7,)), ((0, 2, 1, 3),), data=1, parity=2),
    "room for one parity of two": Job(((12,), (25,)), ((0, 1),), parity=2),
    "two parities and a node alone": Job(((12,), (12,), (25,), (3,)), ((3,), (2, 1, 0)), parity=2),
}


def subsets(items: Sequence[str]) -> Iterator[frozenset[str]]:
    return map(frozenset, chain.from_iterable(combinations(items, n) for n in range(len(items) + 1)))


@dataclass(frozen=True)
class Holding:
    """The parts of one snapshot that exist before anything is lost."""

    snapshot: SnapshotId
    parts: frozenset[str]


class World:
    """Every machine of a job, with its inventory; any of them may be lost.

    Attributes:
        protected: the newest snapshot that was protected.
        told: the machines that know `protected`; None if all do.
    """

    def __init__(
        self,
        job: Job,
        holdings: Sequence[Holding],
        protected: SnapshotId | None,
        told: Collection[str] | None = None,
    ) -> None:
        self.job = job
        self.holdings = holdings
        self.protected = protected
        self.told = told
        self.layouts = {(held.snapshot.epoch, 0): LAYOUTS[job, held.snapshot.epoch] for held in holdings}
        self.inventories = {name: self._inventory(name) for name in sorted(f"m{node}" for node in job.nodes)}

    def _inventory(self, name: str) -> Inventory:
        shards, parities = [], []
        for held in self.holdings:
            layout = self.layouts[held.snapshot.epoch, 0]
            for part in self.parts_on(held, {name}):
                if part.startswith("p"):
                    group, position = self.place(int(part[1:]))
                    parities.append((held.snapshot, layout.tag(group), position))
                else:
                    shards.append((held.snapshot, part))
        index = int(name[1:])
        protected = self.protected if self.knows(name) else None
        return Inventory(name, "host", 1, index, 2, protected, 0, self.layouts, frozenset(shards), frozenset(parities))

    def knows(self, name: str) -> bool:
        return self.told is None or name in self.told

    def parts_on(self, held: Holding, machines: Collection[str]) -> frozenset[str]:
        """The parts of a snapshot that are on some machines."""
        return frozenset(p for p in held.parts if self.machine_of(p, held.snapshot.epoch) in machines)

    def machine_of(self, part: str, epoch: int) -> str:
        node = int(part[1:]) if part.startswith("p") else int(part[1 : part.index("s")])
        return machine(node, epoch, len(self.job.lengths))

    def place(self, node: int) -> tuple[int, int]:
        return next((g, group.index(node)) for g, group in enumerate(self.job.groups) if node in group)

    def check_loss(self, lost: Collection[str]) -> str:
        """Plan after losing the machines in `lost`, and compare with the promise. Return the outcome."""
        left = [inventory for name, inventory in self.inventories.items() if name not in lost]
        expected = self.promised([inventory.node for inventory in left])
        try:
            plan = plan_restore(left, self.job.shards)
        except Unrecoverable as error:
            assert expected == "unrecoverable", f"{expected} was promised after losing {lost}"
            self.check_message(str(error), {inventory.node for inventory in left})
            return "unrecoverable"
        if plan is None:
            assert expected == "nothing"
            return "nothing"
        assert plan.snapshot == expected, f"{plan.snapshot} instead of {expected} after losing {lost}"
        self.check_sources(plan, {inventory.node for inventory in left})
        return "old" if expected == OLD else "new"

    def promised(self, left: Collection[str]) -> SnapshotId | str:
        protected = self.protected if any(self.knows(name) for name in left) else None
        for held in sorted(self.holdings, key=lambda held: held.snapshot, reverse=True):
            old = protected is not None and held.snapshot < protected
            if not old and not self.job.lossy_groups(self.parts_on(held, left)):
                return held.snapshot
        return "nothing" if protected is None else "unrecoverable"

    def check_sources(self, plan: RestorePlan, left: Collection[str]) -> None:
        """Every byte that is left is listed with its machine; the rest is decoded or repaired."""
        held = next(held for held in self.holdings if held.snapshot == plan.snapshot)
        parts = self.parts_on(held, left)
        epoch = plan.snapshot.epoch
        address = {part: ("host", int(self.machine_of(part, epoch)[1:])) for part in parts}
        named = {
            f"p{self.job.groups[g][p]}": where
            for g, held_by in plan.sources.parities.items()
            for p, where in held_by.items()
        }
        assert {**plan.sources.shards, **named} == address
        assert plan.sources.layout == self.layouts[epoch, 0]
        assert plan.decoded == tuple(coord for coord in self.job.shards if coord not in parts)
        repaired = [f"p{self.job.groups[g][p]}" for g, p in plan.repair]
        assert sorted(repaired) == [part for part in self.job.parities if part not in parts]

    def check_message(self, message: str, left: Collection[str]) -> None:
        """The message names the protected snapshot, and each lost group with its nodes."""
        assert self.protected is not None
        assert message.startswith(f"{self.protected} was protected")
        held = next(held for held in self.holdings if held.snapshot == self.protected)
        parts = self.parts_on(held, left)
        for g in self.job.lossy_groups(parts):
            nodes = {
                self.machine_of(coord, self.protected.epoch)
                for node in self.job.groups[g]
                for coord in self.job.shards_of(node)
                if coord not in parts
            }
            assert f": group {g} lost shards of {', '.join(sorted(nodes))} " in message
            count = self.job.parity_of(self.job.groups[g])
            assert f"has {count} parity unit" in message


LAYOUTS = {(job, epoch): job.layout(epoch) for job in JOBS.values() for epoch in (1, 2)}


def whole(job: Job, snapshot: SnapshotId) -> Holding:
    return Holding(snapshot, frozenset({*job.shards, *job.parities}))


def check_every_loss(worlds: Iterator[World]) -> dict[str, int]:
    outcomes: dict[str, int] = {}
    for world in worlds:
        for lost in subsets(sorted(world.inventories)):
            outcome = world.check_loss(lost)
            outcomes[outcome] = outcomes.get(outcome, 0) + 1
    return outcomes


def endings(job: Job) -> set[str]:
    """The possible ends when too much is lost. In a single group of m + 1 machines, any that is left can continue."""
    lonely = all(len(group) == job.parity_of(group) + 1 for group in job.groups) and len(job.groups) == 1
    return {"nothing"} if lonely else {"nothing", "unrecoverable"}


each_job = pytest.mark.parametrize("job", JOBS.values(), ids=JOBS.keys())


@each_job
def test_every_loss_at_every_moment_of_a_newer_snapshot(job: Job) -> None:
    """Thousands of cases: any of the newer one's shards sealed, any of its parities complete, any machines lost."""
    parts = (*job.shards, *job.parities)
    outcomes = check_every_loss(World(job, [whole(job, OLD), Holding(NEW, some)], OLD) for some in subsets(parts))
    assert sum(outcomes.values()) == 2 ** (len(parts) + len(job.nodes))
    assert outcomes.keys() == {"new", "old"} | endings(job)


@each_job
def test_every_loss_at_every_moment_of_the_first_snapshot(job: Job) -> None:
    parts = (*job.shards, *job.parities)
    outcomes = check_every_loss(World(job, [Holding(NEW, some)], None) for some in subsets(parts))
    assert outcomes.keys() == {"new", "nothing"}


@each_job
def test_every_loss_once_the_newer_snapshot_is_protected_never_goes_back_to_the_older(job: Job) -> None:
    outcomes = check_every_loss(iter([World(job, [whole(job, OLD), whole(job, NEW)], NEW)]))
    assert outcomes.keys() == {"new"} | endings(job)


@each_job
def test_every_loss_after_a_release_freed_part_of_the_older_snapshot(job: Job) -> None:
    parts = (*job.shards, *job.parities)
    worlds = (World(job, [Holding(OLD, some), whole(job, NEW)], NEW) for some in subsets(parts))
    assert check_every_loss(worlds).keys() == {"new"} | endings(job)


@each_job
def test_every_loss_when_only_some_smps_were_told_what_is_protected(job: Job) -> None:
    machines = sorted(f"m{node}" for node in job.nodes)
    begun = Holding(NEW, frozenset(job.shards))
    worlds = (World(job, [whole(job, OLD), begun], OLD, told) for told in subsets(machines))
    assert check_every_loss(worlds).keys() >= {"new", "old", "nothing"}


@each_job
def test_as_many_machines_of_each_group_as_it_has_parities_may_go(job: Job) -> None:
    world = World(job, [whole(job, OLD), whole(job, NEW)], OLD)
    losses = []
    for group in job.groups:
        machines = [world.machine_of(f"p{node}", NEW.epoch) for node in group]
        losses.append([lost for lost in subsets(machines) if len(lost) <= job.parity_of(group)])
    for lost in product(*losses):
        assert world.check_loss(frozenset().union(*lost)) == "new"


def test_survivors_that_hold_nothing_of_what_was_protected_say_so() -> None:
    job = JOBS["two nodes"]
    empty = World(job, [Holding(OLD, frozenset())], OLD).inventories.values()
    with pytest.raises(Unrecoverable, match=r"step 10 .* holds any"):
        plan_restore(list(empty), job.shards)


def test_a_snapshot_whose_layout_nobody_knows_is_passed_over() -> None:
    job = JOBS["two nodes"]
    world = World(job, [whole(job, OLD), whole(job, NEW)], OLD)
    forgetful = [replace(i, layouts={(1, 0): world.layouts[1, 0]}) for i in world.inventories.values()]
    plan = plan_restore(forgetful, job.shards)
    assert plan is not None and plan.snapshot == OLD
    ignorant = [replace(i, layouts={}) for i in forgetful]
    with pytest.raises(Unrecoverable, match=r"step 10 .*the layout"):
        plan_restore(ignorant, job.shards)


def two_nodes() -> tuple[Job, list[Inventory]]:
    """A job, and what its two nodes hold of one protected snapshot."""
    job = JOBS["two nodes"]
    return job, list(World(job, [whole(job, NEW)], NEW).inventories.values())


def test_a_layout_that_only_one_smp_knows_is_enough() -> None:
    job, (first, second) = two_nodes()
    plan = plan_restore([replace(first, layouts={}), second], job.shards)
    assert plan is not None and plan.decoded == ()


@pytest.mark.parametrize("job", [JOBS["three uneven nodes"], JOBS["three nodes of two"], JOBS["two mixed groups"]])
def test_however_shards_are_dealt_to_machines_nothing_is_lost(job: Job) -> None:
    """Ranks are renumbered at a restart: the machine of a shard does not tell which shard it is."""
    world = World(job, [whole(job, NEW)], NEW)
    inventories = list(world.inventories.values())
    shards = sorted(chain.from_iterable(i.shards for i in inventories))
    parities = sorted(chain.from_iterable(i.parities for i in inventories))
    for order in permutations(range(len(shards))):
        dealt = [shards[i] for i in order]
        moved = [
            replace(
                inv, shards=frozenset(dealt[i :: len(inventories)]), parities=frozenset(parities[i :: len(inventories)])
            )
            for i, inv in enumerate(inventories)
        ]
        plan = plan_restore(moved, job.shards)
        assert plan is not None
        assert (plan.decoded, plan.repair) == ((), ())
        assert plan.sources.shards == {c: inv.bulk for inv in moved for _, c in inv.shards}
        tags = {plan.sources.layout.tag(g): g for g in range(len(job.groups))}
        expected = {(tags[t], p): inv.bulk for inv in moved for _, t, p in inv.parities}
        named = plan.sources.parities.items()
        assert {(g, p): where for g, held in named for p, where in held.items()} == expected


@pytest.mark.parametrize(
    ("coords", "message"),
    [
        (["n0s0", "n1s0", "n2s0"], r"2 ranks .* 3; .*snapshot: \['n2s0'\]; .*job: \[\]"),
        (["n0s0"], r"2 ranks .* 1; .*snapshot: \[\]; .*job: \['n1s0'\]"),
        (["n0s0", "other"], r"snapshot: \['other'\]; .*job: \['n1s0'\]"),
        ([f"x{i}" for i in range(10)], r"snapshot: \['x0',( 'x\d',?){7}\];"),  # a long list is cut
    ],
)
def test_a_job_of_other_coordinates_is_refused(coords: list[str], message: str) -> None:
    with pytest.raises(StateMismatch, match=message):
        plan_restore(two_nodes()[1], coords)


def test_the_order_of_coordinates_and_of_inventories_does_not_matter() -> None:
    job = JOBS["three nodes of two"]
    inventories = list(World(job, [whole(job, OLD), whole(job, NEW)], OLD).inventories.values())[1:]
    plans = [plan_restore(order, job.shards[::step]) for order in permutations(inventories) for step in (1, -1)]
    assert plans[0] is not None
    assert all(plan == plans[0] for plan in plans)


def test_lost_parity_is_repaired_by_whoever_has_the_first_shard_of_the_lost_node() -> None:
    job = JOBS["four nodes of one or two"]
    layout = LAYOUTS[job, 1]
    healers = {layout.groups[0][p]: parity_repairer(layout, 0, p) for p in range(4)}
    assert healers == {node: f"n{node}s0" for node in job.nodes}
    assert parity_repairer(layout, 0, 3) == "n2s0" != job.shards[0]


def test_the_parity_of_a_node_without_shards_is_repaired_by_one_rank_that_all_agree_on() -> None:
    first, second = SECOND.nodes
    bare = replace(SECOND, nodes=(replace(first, shards=first.shards + second.shards), replace(second, shards=())))
    assert parity_repairer(bare, 0, 1) == bare.coords[0] == first.shards[0].coord


# ---------------------------------------------------------------------- groups that were regrouped


FIRST = LAYOUTS[JOBS["three nodes"], 2]
SECOND = replace(
    FIRST,
    revision=1,
    nodes=(replace(FIRST.nodes[0], shards=FIRST.nodes[0].shards + FIRST.nodes[2].shards), FIRST.nodes[1]),
    groups=((0, 1),),
)
"""The layout without the third node, whose shard the first has."""
COORDS = FIRST.coords


def inventory(node: str, shards: str, *parities: tuple[Layout, int], knows: Sequence[Layout] = ()) -> Inventory:
    """`shards`: digits, 0 to 2, of the nodes whose shards it has; `parities`: (layout, position) of each parity."""
    return Inventory(
        node,
        "host",
        1,
        int(node[1:]),
        layouts={(layout.epoch, layout.revision): layout for layout in knows or (FIRST, SECOND)},
        shards=frozenset((NEW, f"n{i}s0") for i in shards),
        parities=frozenset((NEW, layout.tag(0), position) for layout, position in parities),
    )


def plan_of(*inventories: Inventory) -> tuple[int, tuple[str, ...], tuple[tuple[int, int], ...]]:
    """(revision, decoded, repair) of the plan."""
    plan = plan_restore(inventories, COORDS)
    assert plan is not None
    return plan.sources.layout.revision, plan.decoded, plan.repair


def test_parity_of_either_layout_serves_and_the_one_with_all_of_it_is_taken() -> None:
    old = [(FIRST, p) for p in range(3)]
    new = [(SECOND, p) for p in range(2)]
    assert plan_of(inventory("m0", "02", new[0]), inventory("m1", "1", new[1])) == (1, (), ())
    assert plan_of(inventory("m0", "02", old[0]), inventory("m1", "1", old[1]), inventory("m2", "", old[2])) == (
        0,
        (),
        (),
    )
    assert plan_of(inventory("m0", "02", old[0], new[0]), inventory("m1", "1", old[1], new[1])) == (1, (), ())


def test_of_two_layouts_that_serve_equally_the_newer_is_taken() -> None:
    everything = [(FIRST, p) for p in range(3)] + [(SECOND, p) for p in range(2)]
    assert plan_of(inventory("m0", "012", *everything)) == (1, (), ())
    assert plan_of(inventory("m0", "012")) == (1, (), ((0, 0), (0, 1)))


def test_a_regrouping_that_came_to_nothing_takes_nothing_away() -> None:
    """The new layout is known, but its parity is not coded yet when another node is lost."""
    survivor = inventory("m0", "0", (FIRST, 0))
    assert plan_of(survivor, inventory("m1", "1", (FIRST, 1))) == (0, ("n2s0",), ((0, 2),))
    assert plan_of(survivor, inventory("m2", "2", (FIRST, 2))) == (0, ("n1s0",), ((0, 1),))


def test_what_only_the_new_layout_can_decode_is_decoded_by_it() -> None:
    left = inventory("m1", "1", (SECOND, 1), (FIRST, 1))
    assert plan_of(left) == (1, ("n0s0", "n2s0"), ((0, 0),))
    with pytest.raises(Unrecoverable):
        plan_restore([replace(left, layouts={(2, 0): FIRST}, protected=NEW)], COORDS)


def test_a_layout_of_another_epoch_says_nothing() -> None:
    held = inventory("m0", "012", knows=[replace(SECOND, epoch=NEW.epoch + 1)])
    assert plan_restore([held], COORDS) is None
    assert newest_whole([held]) is None
    assert choose_sources([held], NEW) is None


def test_the_newest_that_is_whole_is_found_without_knowing_the_ranks() -> None:
    job = JOBS["four nodes"]
    world = World(job, [whole(job, OLD), whole(job, NEW)], OLD)
    inventories = list(world.inventories.values())
    assert newest_whole(inventories) == newest_whole(inventories[1:]) == NEW
    assert newest_whole(inventories[2:]) is None
    begun = World(job, [whole(job, OLD), Holding(NEW, frozenset(job.shards[:2]))], OLD)
    assert newest_whole(list(begun.inventories.values())) == OLD
    replaced = World(job, [whole(job, OLD), Holding(NEW, frozenset(job.shards[:2]))], NEW)
    assert newest_whole(list(replaced.inventories.values())) is None, "nothing older than what was promised"
