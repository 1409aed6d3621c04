"""Jobs on nodes of real size: what a seed draws of them, and how long things may take there. Pure."""

from __future__ import annotations

import random
from dataclasses import replace

from holdfast.smp_daemon.shared import limits
from tests.proof.sim.costs import GB, draw_costs
from tests.proof.sim.plan import DrawnFault, Gap, SeedPlan, draw

NODE_GB = (76, 76, 160, 320, 640)
"""How much state a node has."""

WORLDS = (*((2, 1),) * 8, *((3, 1),) * 6, *((4, 1),) * 3, *((2, 2),) * 3, (3, 2), (2, 8))
"""The number of nodes, and of ranks on each. Most are small, so that many seeds can be run."""

WHOLE = (16, 8)
IN_OUTLINE = ((128, 1), (256, 1))
OF_WHOLE, OF_OUTLINES = 1 / 250, 1 / 500
"""The share of seeds with 16 whole nodes, and with hundreds of nodes that have one rank each."""

UNIT_BYTES = 512
UNITS = (3, 5)
"""Units of a rank's state, at least and at most."""

FAULTS = (
    *("kill-smp", "kill-smp", "kill-smp", "lose-node", "lose-node", "kill-trainer", "kill-trainers"),
    *("pause-smp", "partition", "slow-node"),
)
OF_CALM = 0.3
"""The share of seeds in which no fault strikes."""

OF_LEAVING = 0.2
"""The share of seeds, of those that would just stop, at whose end a node is drained while the job trains, or lost for
good, so that the others regroup."""

OF_REFUSED, REFUSAL = 1 / 20, "HOLDFAST_SCRUB=fast is not a rate"
"""The share of seeds in which a setting is wrong at first, and what the SMP says of it."""

MOST_PARITY, MOST_DATA = 2, 3
"""Of all schemes that seeds draw. No node holds more parity than data."""

TIMES = 4.0
"""How many times as long as bytes over rates say protection may take to be back: what can be done at the same time is
added up there, but a rate that several share may be shared unevenly."""

DELAYS_S = 240.0
"""What no byte takes: deadlines after which something is given up, and pauses before it is tried again."""


def draw_sized(seed: int) -> SeedPlan:
    """The plan of `seed` on nodes of real size: at most one fault strikes."""
    pick, plan = random.Random(f"sized {seed}"), draw(seed)
    share = pick.random()
    nodes, mates = pick.choice(WORLDS)
    if share < OF_WHOLE:
        nodes, mates = WHOLE
    elif share < OF_WHOLE + OF_OUTLINES:
        nodes, mates = pick.choice(IN_OUTLINE)
    ranks = tuple(node for node in range(nodes) for _ in range(mates))
    length = pick.randint(UNITS[0] * UNIT_BYTES, UNITS[1] * UNIT_BYTES)
    plan = replace(
        plan,
        nodes=nodes,
        ranks=ranks,
        lengths=tuple(length - pick.randrange(64) for _ in ranks),
        unit_bytes=UNIT_BYTES,
        costs=draw_costs(pick, pick.choice(NODE_GB) * GB // (mates * length)),
        state=None,
        beside=True,
        steps=pick.choice((2, 3)),
        every=1,
        step_s=pick.choice((1.0, 10.0)),
        persist_s=0.0,
        capacity=64,
        flip_chance=0.0,
        break_chance=0.0,
        regroup_after_s=0.0,
        lives=((),),
        gaps=(Gap(0.0, True),),
        quiet=1,
        final="stop" if nodes * mates > 32 else pick.choice(("stop", "stop", "lose", "finish")),
    )
    leaving = random.Random(f"leaving {seed}")
    if plan.final == "stop" and len(ranks) <= 32 and leaving.random() < OF_LEAVING:
        after_s, final = leaving.choice(((0.0, "drain"), (30.0, "regroup")))
        plan = replace(plan, regroup_after_s=after_s, final=final)
    if pick.random() < OF_REFUSED:
        plan = replace(plan, refused=REFUSAL)
    return plan if pick.random() < OF_CALM else replace(plan, lives=((_fault(plan, pick),),))


def _fault(plan: SeedPlan, pick: random.Random) -> DrawnFault:
    """One fault, while memory is reserved or while snapshots are taken."""
    begin_s = reserve_s(plan) if pick.random() < 0.7 else 0.0
    span_s = plan.steps * protect_s(plan) if begin_s else reserve_s(plan)
    return DrawnFault(pick.choice(FAULTS), at_s=begin_s + pick.random() * span_s)


def _node_bytes(plan: SeedPlan) -> int:
    """Simulated bytes of the slots of the largest node."""
    slots = [length + UNIT_BYTES for length in plan.lengths]
    return max(sum(slot for slot, node in zip(slots, plan.ranks, strict=True) if node == of) for of in set(plan.ranks))


def reserve_s(plan: SeedPlan) -> float:
    """How long a node takes to reserve all slots, and its trainers to map them, in seconds."""
    assert plan.costs is not None
    count = (plan.slots + plan.generations - 1) * _node_bytes(plan)
    return 2 * plan.costs.whole_s("populate", count) + plan.costs.whole_s("map", count)


def copy_s(plan: SeedPlan) -> float:
    """How long the longest copy takes; 0: bytes cost nothing."""
    if plan.costs is None:
        return 0.0
    return plan.costs.whole_s("copy", max(plan.lengths))


def protect_s(plan: SeedPlan) -> float:
    """How long a snapshot takes from its copy until it is protected."""
    assert plan.costs is not None
    count = _node_bytes(plan)
    return copy_s(plan) + plan.costs.whole_s("digest", count) + MOST_PARITY * plan.costs.whole_s("network", count)


def is_slow(plan: SeedPlan) -> bool:
    """Whether a snapshot takes longer until it is protected than holdfast expects of any machine. Called during a
    run, in which holdfast expects it of simulated bytes."""
    count = _node_bytes(plan)
    return plan.costs is not None and protect_s(plan) > limits.slowest_s(count)


def rebuild_s(plan: SeedPlan) -> float:
    """How long it takes to compute all that a node has lost, and to load it."""
    assert plan.costs is not None
    count = _node_bytes(plan)
    network = (MOST_DATA + MOST_PARITY) * plan.costs.whole_s("network", count)
    return network + 3 * plan.costs.whole_s("digest", count) + copy_s(plan)


def back_s(plan: SeedPlan) -> float:
    """How long after a start protection may be back, in seconds, whatever was lost before; 0: bytes cost nothing."""
    if plan.costs is None:
        return 0.0
    started = plan.costs.starting_s(len(plan.ranks) // plan.nodes + 1)
    snapshots = 2 * (protect_s(plan) + plan.step_s)
    return TIMES * (started + reserve_s(plan) + rebuild_s(plan) + snapshots) + DELAYS_S
