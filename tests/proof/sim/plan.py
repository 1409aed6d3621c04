"""What a seed determines: a job, how its machines behave, and which faults strike when. Pure."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from holdfast.chaos.faults import FAILPOINTS, PERSIST_FAILPOINTS
from holdfast.snapshot.step.ledger import ProtectEvery
from tests.proof.sim.costs import Costs

OF_MODULES = 1 / 40
"""The share of seeds whose trainers have real modules."""

OF_STORAGE = 1 / 20
STORED_FINALS = ("stop", "lose", "lose too many", "lose too many")
OF_RUNS = 1 / 12
"""The share of seeds in which machines go and come back, so that runs of the job meet."""

OF_BESIDE = 1 / 4
OF_MANY_RANKS = 1 / 1000
MANY_RANKS = ((8, 2), (8, 8), (16, 2), (16, 4), (32, 1), (64, 1))
"""The number of nodes, and of ranks on each."""

RESERVING = "reserve.slice"
POINTS_HERE = (
    *(point for point in FAILPOINTS if point not in (*PERSIST_FAILPOINTS, RESERVING)),
    "seal.digest",
)
"""All failpoints at which a process may be killed, except those in persisting and in reserving in the background."""

RECOVERY = ("restore.before", "restore.middle", "rebuild.middle", "repair_parity.done")
"""Points that only a restarted job reaches. They are struck more often in every life but the first."""

REGROUP = ("regroup.adopt", "regroup.encode", "regroup.done", "regroup.declined")
"""Points that only survivors without trainers reach."""

PROTECTIONS = ("auto", "1+1", "2+1", "2+2", "3+1", "copies:2")

KINDS = (
    "kill-trainer",
    "kill-trainers",
    "kill-smp",
    "lose-node",
    "lose-nodes",
    "pause-smp",
    "zombie-trainer",
    "partition",
    "slow-node",
    "flip-stored",
    "grow-state",
)
"""Kinds of faults from `tests.proof.chaos.faults`. Each seed draws its faults from a few kinds, so that some seeds
have many of one kind. The order of this tuple is part of what each seed determines."""


@dataclass(frozen=True, slots=True)
class DrawnFault:
    """One fault.

    Attributes:
        kind: a kind of the catalogue; with `point`, ``kill-process`` or ``lose-node``.
        awaits: how many awaits after the beginning of the life it strikes; ignored if `point` is set.
        at_s: if greater than 0, it strikes so many simulated seconds after the beginning of the life instead.
        point, nth: strikes when processes come to this failpoint for the n-th time in the life; hits the process that
            comes, or its node.
    """

    kind: str
    awaits: int = 0
    point: str = ""
    nth: int = 1
    at_s: float = 0.0


KINDS_OF_STATE = (
    "buffers",
    "dropout",
    "numpy",
    "python",
    "own generator",
    "loader",
    "schedule",
    "average",
    "clamped",
    "written by data",
    "written in a step",
    "other memory",
    "plain values",
    "extra state",
    "bfloat16",
    "strided",
    "frozen",
    "thaws",
    "scaler",
    "evaluation",
    "two optimizers",
)
"""Kinds of state of a script with real modules, see `tests.proof.sim.modules`. Each seed draws some of them."""

LATE = "late value"
"""One more: the state of a parameter gains a value that is no tensor. A third of the seeds have it."""

NOT_PLAIN = {"loader", "two optimizers"}
"""With these, a loop must say where its steps begin: else it is refused. The loader draws an order now and then."""

OPTIMIZERS = ("sgd", "adamw", "rmsprop", "adagrad")
PROTECT_EVERY: tuple[ProtectEvery, ...] = (1, 1, 1, 2, 2, 3, "auto", "auto")
PACES = ("steady", "steady", "auto", "auto")
LOOPS = ("counted", "counted", "data", "probes")


@dataclass(frozen=True, slots=True)
class DrawnState:
    """The state and the loop of trainers with real modules.

    Attributes:
        kinds: some of `KINDS_OF_STATE`, and perhaps `LATE`.
        optimizer: one of `OPTIMIZERS`.
        replicated: whether all ranks hold the same weights, and average gradients.
        declared: whether the loop says where its steps begin.
        thaws: the step after which a frozen layer is trained, if `kinds` has ``thaws``: this adds optimizer state. Or
            the one from which on there is a value more, if it has `LATE`.
        sizes: the number of ranks of each life in turn, on the same nodes; empty: as many as the plan says.
        pace: one of `PACES`. ``steady`` takes a snapshot every `SeedPlan.every` steps, ``auto`` as often as holdfast
            does by default.
        loop: one of `LOOPS`. ``counted`` counts its turns, and ``data`` goes through a shuffled `DataLoader` by
            ``snap.data``. ``probes`` also runs forward between two steps, in training mode and with gradients, and then
            writes to weights.
    """

    kinds: tuple[str, ...]
    optimizer: str
    replicated: bool
    declared: bool
    thaws: int
    sizes: tuple[int, ...]
    pace: str
    loop: str = "counted"

    @property
    def gives_up(self) -> bool:
        """Whether snapshots may rightly be given up, with the reason named: the loop writes to what is being copied."""
        return "written in a step" in self.kinds or (self.loop == "probes" and not self.declared)

    @property
    def grows_late(self) -> bool:
        """Whether any step may add optimizer state: as a layer thaws, as a scaler stops skipping steps, or `LATE`."""
        return not {"thaws", "scaler", LATE}.isdisjoint(self.kinds)


MOVES = (
    "all go",
    "some go",
    "swap",
    "mix",
    "mix",
    "all come",
    "all lost",
    "give up",
    "choose",
    "damage a node",
    "damage storage",
    "lose memory",
)
"""What happens to machines, memory and runs between two lives.

``all go``, ``some go``: nodes are cut off with their memory. ``swap``: those that are here go, and the others come
back. ``mix``: of all nodes, some drawn ones are here, some are gone, and perhaps some are lost. ``all come``: all come
back that there is a place for. ``all lost``: those that are here lose their memory. ``give up``, ``choose``: the next
start gets ``HOLDFAST_GIVE_UP`` or ``HOLDFAST_RUN``. ``damage a node``: one of its small files is damaged. ``damage
storage``: of every persisted snapshot, one file is damaged. ``lose memory``: all nodes, wherever they are, are lost."""

WITHOUT_STORAGE = tuple(move for move in MOVES if move not in ("damage storage", "lose memory"))

RUN_SEQUENCES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("all go",), ("mix",)),
    (("all go",), ("swap",), ("mix",)),
    (("all go", "give up"), ("mix",)),
    (("some go",), ("swap",), ("all come",)),
    (("some go",), ("all go",), ("mix",)),
    (("some go", "give up"), ("swap",), ("mix",)),
    (("give up",), ("choose",)),
    (("all go",), ("choose", "mix")),
    (("damage a node",), ("damage a node", "some go")),
)
"""What happens after each life, in histories in which faults were found. Others are drawn freely."""

STORED_SEQUENCES: tuple[tuple[tuple[str, ...], ...], ...] = (
    (("damage storage", "lose memory"),),
    (("give up",), ("lose memory", "choose")),
    (("all go", "give up"), ("mix",), ("lose memory",)),
    (("lose memory",), ("damage storage", "all go")),
    (("all go",), ("swap",), ("mix",)),
    (("all go",), ("swap",), ("some go",)),
)
"""The same, with storage."""


@dataclass(frozen=True, slots=True)
class Gap:
    """What surrounds a life.

    Attributes:
        seconds: the pause after it.
        replace: whether lost nodes are replaced before it.
        moves: some of `MOVES`, after it.
    """

    seconds: float
    replace: bool
    moves: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SeedPlan:
    """Everything that is drawn before a run begins. The order of turns is drawn during the run.

    Attributes:
        ranks: by rank, the number of the node that it starts on.
        lengths: bytes of each rank's state.
        chance: probability that a task gives way at an await.
        latency_s, capacity, flip_chance, break_chance: see `tests.proof.sim.network.Network`.
        step_s: longest time that a training step takes, in seconds.
        persist_s: shortest time between persisted snapshots, in seconds; 0: none is persisted.
        state: the state of real modules; None: a few bytes instead, which is a hundred times as fast.
        lives, gaps: the faults of each start of the job, and what surrounds it.
        quiet: how many snapshots must become protected once the faults are over; 0: the job must only come back.
        final: what is done after that; one of `FINALS`, or ``drain``.
        generations: how many protected snapshots are kept.
        links: number of connections from an SMP to each of its peers.
        protect_every: which of the snapshots are protected.
        order, span, turns: how tasks take turns, see `tests.proof.sim.turns`; `turns` is the seed of that order.
        beside: whether memory is reserved in the background, however little it is.
        refused: why no SMP can be started at first; empty: it can.
        costs: what work on bytes costs; None: nothing, see `tests.proof.sim.sized`.
    """

    seed: int
    nodes: int
    ranks: tuple[int, ...]
    lengths: tuple[int, ...]
    protect: str
    slots: int
    every: int
    unit_bytes: int
    rebuild: str
    regroup_after_s: float
    chance: float
    latency_s: float
    capacity: int
    flip_chance: float
    break_chance: float
    steps: int
    step_s: float
    persist_s: float
    state: DrawnState | None
    lives: tuple[tuple[DrawnFault, ...], ...]
    gaps: tuple[Gap, ...]
    quiet: int
    final: str
    generations: int
    protect_every: ProtectEvery
    order: str
    span: int
    turns: int
    links: int = 1
    beside: bool = False
    costs: Costs | None = None
    refused: str = ""

    @property
    def scale(self) -> int:
        """How many real bytes a simulated one stands for."""
        return self.costs.scale if self.costs is not None else 1

    @property
    def moves(self) -> bool:
        """Whether anything but a fault happens to machines, memory or runs."""
        return any(gap.moves for gap in self.gaps)


OF_DRAINS = 1 / 8
"""The share of seeds at whose end a node is drained while the job trains, of those that would just stop there."""

FINALS = ("stop", "stop", "stop", "finish", "lose", "lose", "lose twice", "lose too many", "regroup")


@dataclass(frozen=True, slots=True)
class Size:
    """How much a seed does. A value is drawn from each tuple, except from `opening`.

    Attributes:
        nodes, lives, faults, steps, units: number of nodes, lives, faults per life, steps per life, bytes per unit.
        every, regroup_after_s, finals, chances, capacities: values of the plan.
        mates: ranks per node, if there are fewer than four nodes; otherwise there is one.
        quiet: how many snapshots are taken after the faults are over.
        opening: faults that the first life has in addition.
        later: points that are struck more often in every life but the first, with `REGROUPING` in all lives.
        gaps: seconds that pass after a life.
        replaced: probability that lost nodes are replaced.
        hazard: how many times likelier damaged and lost messages are than in the longest seeds.
        span: how many awaits after the beginning of a life its faults strike, at most.
    """

    nodes: tuple[int, ...]
    mates: tuple[int, ...]
    lives: tuple[int, ...]
    faults: tuple[int, ...]
    steps: tuple[int, ...]
    every: tuple[int, ...]
    units: tuple[int, ...]
    regroup_after_s: tuple[float, ...]
    finals: tuple[str, ...]
    chances: tuple[float, ...]
    capacities: tuple[int, ...]
    hazard: int
    quiet: tuple[int, ...]
    span: int
    opening: tuple[DrawnFault, ...] = ()
    later: tuple[str, ...] = RECOVERY
    gaps: tuple[float, ...] = (0.0, 1.0, 5.0, 90.0)
    replaced: float = 0.7


SMALL = Size(
    nodes=(2, 2, 2, 2, 2, 2, 2, 3),
    mates=(1,),
    lives=(1, 1, 1, 1, 1, 2),
    faults=(1, 1, 1, 2),
    steps=(1, 1, 2),
    every=(1, 1, 1, 2),
    units=(256, 512, 512),
    regroup_after_s=(0.0, 0.0, 0.0, 30.0),
    finals=("stop", "stop", "stop", "stop", "finish", "lose", "lose twice", "lose too many"),
    chances=(0.01, 0.02, 0.05, 0.1),
    capacities=(2, 64, 64),
    hazard=4,
    quiet=(0, 0, 1),
    span=600,
)
MEDIUM = Size(
    nodes=(2, 3, 3, 4),
    mates=(1, 1, 2),
    lives=(1, 1, 2),
    faults=(1, 2),
    steps=(1, 2, 3),
    every=(1, 1, 2),
    units=(200, 256, 512),
    regroup_after_s=(0.0, 30.0),
    finals=FINALS,
    chances=(0.01, 0.05, 0.2),
    capacities=(2, 8, 64),
    hazard=2,
    quiet=(1,),
    span=1200,
)
LARGE = Size(
    nodes=(2, 2, 2, 3, 3, 3, 4, 5, 6),
    mates=(1, 1, 1, 2),
    lives=(1, 1, 1, 2, 3),
    faults=(0, 1, 1, 2, 3),
    steps=(2, 3, 4),
    every=(1, 1, 2),
    units=(128, 200, 256, 512),
    regroup_after_s=(0.0, 30.0, 30.0),
    finals=FINALS,
    chances=(0.01, 0.05, 0.2),
    capacities=(2, 8, 64),
    hazard=1,
    quiet=(2,),
    span=1500,
)
RECOVERING = replace(
    SMALL,
    nodes=(2, 2, 3),
    lives=(2,),
    faults=(1,),
    steps=(2,),
    every=(1,),
    finals=("stop", "stop", "lose"),
    opening=(DrawnFault("lose-node", awaits=900),),
)
REGROUPING = replace(
    RECOVERING,
    nodes=(3, 3, 4),
    regroup_after_s=(30.0,),
    opening=(DrawnFault("lose-node", awaits=1500), DrawnFault("kill-trainers", awaits=1520)),
    later=(*REGROUP, *RECOVERY),
    gaps=(90.0, 90.0, 5.0),
    replaced=0.2,
)
SIZES = (SMALL,) * 50 + (RECOVERING,) * 5 + (REGROUPING,) + (MEDIUM,) * 3 + (LARGE,)
"""Most seeds are short, so that many can be run; one in sixty does everything at length. `RECOVERING` and `REGROUPING`
first lose a node, so that faults can strike at what follows."""


def draw(seed: int) -> SeedPlan:
    """The plan of `seed`."""
    plan = replace(_with_memory(_draw(seed)), links=random.Random(f"links {seed}").choice((1, 1, 2, 3)))
    pick = random.Random(f"state {seed}")
    which = pick.random()
    if which < OF_MODULES:
        return with_modules(plan, pick)
    if which < OF_MODULES + OF_MANY_RANKS:
        return with_many_ranks(plan, pick)
    moving = random.Random(f"runs {seed}")
    if moving.random() < OF_RUNS:
        return with_runs(plan, moving)
    if plan.final == "stop" and random.Random(f"drain {seed}").random() < OF_DRAINS:
        plan = replace(plan, final="drain")
    reserving = random.Random(f"reserving {seed}")
    if reserving.random() < OF_BESIDE:
        plan = beside_training(plan, reserving)
    return with_storage(plan, pick) if which < OF_MODULES + OF_MANY_RANKS + OF_STORAGE else plan


def _with_memory(plan: SeedPlan) -> SeedPlan:
    """The same plan with two slots in some seeds. In more than half of all seeds, not every snapshot is protected."""
    pick = random.Random(f"memory {plan.seed}")
    slots = 2 if pick.random() < 0.3 else plan.slots
    return replace(plan, slots=slots, protect_every=pick.choice(PROTECT_EVERY))


def beside_training(plan: SeedPlan, pick: random.Random) -> SeedPlan:
    """The same plan with memory reserved in the background; in half of the seeds an SMP dies while it reserves."""
    fault = DrawnFault("kill-process", point=RESERVING, nth=pick.choice((1, 2, 3, 5, 8)))
    first, *others = plan.lives
    lives = ((fault, *first), *others) if pick.random() < 0.5 else plan.lives
    return replace(plan, beside=True, lives=lives)


def with_storage(plan: SeedPlan, pick: random.Random) -> SeedPlan:
    """The same plan with snapshots persisted; in half of the seeds a process dies while it persists one."""
    fault = DrawnFault("kill-process", point=pick.choice(PERSIST_FAILPOINTS), nth=pick.choice((1, 2, 3)))
    first, *others = plan.lives
    lives = ((*first, fault), *others) if pick.random() < 0.5 else plan.lives
    persist_s = pick.choice((0.1, 0.1, 30.0))
    return replace(plan, persist_s=persist_s, lives=lives, steps=max(plan.steps, 3), final=pick.choice(STORED_FINALS))


def with_runs(plan: SeedPlan, pick: random.Random) -> SeedPlan:
    """The same plan with lives after which machines go and come back, and hardly any other fault."""
    stored = pick.random() < 0.3
    if pick.random() < 0.7:
        sequence = pick.choice(STORED_SEQUENCES if stored else RUN_SEQUENCES)
    else:
        drawn = pick.choices(MOVES if stored else WITHOUT_STORAGE, k=pick.choice((2, 3, 4)))
        sequence = tuple((move,) for move in drawn)
    lives = plan.lives[0][-1:] if pick.random() < 0.3 else ()
    struck = pick.randrange(len(sequence))
    return replace(
        plan,
        steps=pick.choice((1, 2, 3, 4) if stored else (1, 1, 2, 3)),
        every=1,
        quiet=1,
        flip_chance=0.0,
        break_chance=0.0,
        persist_s=0.1 if stored else 0.0,
        lives=tuple(lives if number == struck else () for number in range(len(sequence))),
        gaps=tuple(Gap(pick.choice((0.0, 1.0, 8.0, 90.0)), True, moves) for moves in sequence),
        final=pick.choice(("stop", "stop", "stop", "lose", "finish")),
    )


def with_many_ranks(plan: SeedPlan, pick: random.Random) -> SeedPlan:
    """The same plan for a large job. It does little, as each of its steps takes long."""
    nodes, mates = pick.choice(MANY_RANKS)
    ranks = tuple(node for node in range(nodes) for _ in range(mates))
    lengths = tuple(pick.randint(40, 400) for _ in ranks)
    return replace(plan, nodes=nodes, ranks=ranks, lengths=lengths, steps=min(plan.steps, 2), quiet=1)


def with_modules(plan: SeedPlan, pick: random.Random) -> SeedPlan:
    """The same plan with trainers that have real modules, whose state is drawn."""
    count = pick.randint(1, len(KINDS_OF_STATE) // 2)
    replicated = pick.random() < 0.5
    elastic = replicated and pick.random() < 0.5
    state = DrawnState(
        kinds=tuple(sorted(pick.sample(KINDS_OF_STATE, count))),
        optimizer=pick.choice(OPTIMIZERS),
        replicated=replicated,
        declared=pick.random() < 0.5,
        thaws=pick.choice((1, 2, 3)),
        sizes=tuple(pick.randint(1, plan.nodes + 1) for _ in range(3)) if elastic else (),
        pace=pick.choice(PACES),
        loop=pick.choice(LOOPS[:-2] if elastic else LOOPS),  # only as many ranks find their place in the data
    )
    if NOT_PLAIN.intersection(state.kinds):
        state = replace(state, declared=True)
    if state.loop == "probes" and replicated:  # else a rank may see no write to its share
        state = replace(state, declared=True)
    if state.loop == "probes" and not state.declared:  # a restart is refused if forward draws, too
        state = replace(state, kinds=tuple(kind for kind in state.kinds if kind != "dropout"))
    if state.thaws == 3:
        state = replace(state, kinds=(*state.kinds, LATE))
    slots = max(3, plan.slots) if state.sizes else plan.slots
    return replace(plan, state=state, slots=slots, unit_bytes=pick.choice((1024, 4096)), beside=False)


def _draw(seed: int) -> SeedPlan:
    pick = random.Random(f"plan {seed}")
    size = pick.choice(SIZES)
    nodes = pick.choice(size.nodes)
    ranks = tuple(node for node in range(nodes) for _ in range(pick.choice(size.mates) if nodes < 4 else 1))
    kinds = pick.sample(KINDS, pick.randint(2, len(KINDS)))
    lives = tuple(
        (() if life else size.opening)
        + tuple(
            _fault(pick, size, kinds, later=life > 0 or size is REGROUPING) for _ in range(pick.choice(size.faults))
        )
        for life in range(pick.choice(size.lives))
    )
    return SeedPlan(
        seed=seed,
        nodes=nodes,
        ranks=ranks,
        lengths=tuple(pick.randint(40, 400) for _ in ranks),
        protect=pick.choice(PROTECTIONS),
        slots=pick.choice((3, 3, 3, 4)),
        every=pick.choice(size.every),
        unit_bytes=pick.choice(size.units),
        rebuild=pick.choice(("chain", "decode")),
        regroup_after_s=pick.choice(size.regroup_after_s),
        chance=pick.choice(size.chances),
        latency_s=pick.choice((0.0, 0.0002, 0.01)),
        capacity=pick.choice(size.capacities),
        flip_chance=pick.choice((0.0, 0.0, 0.02)) * size.hazard,
        break_chance=pick.choice((0.0, 0.0, 0.01)) * size.hazard,
        steps=pick.choice(size.steps),
        step_s=pick.choice((0.0, 0.0, 0.05)),
        persist_s=0.0,
        state=None,
        lives=lives,
        gaps=tuple(Gap(pick.choice(size.gaps), pick.random() < size.replaced) for _ in lives),
        final=pick.choice(size.finals),
        quiet=pick.choice(size.quiet),
        generations=pick.choice((1, 1, 1, 2, 3)),
        protect_every=1,
        order=pick.choice(("uniform", "uniform", "uniform", "priorities")),
        span=2 * size.span,
        turns=seed,
    )


def _fault(pick: random.Random, size: Size, kinds: Sequence[str], *, later: bool) -> DrawnFault:
    if pick.random() < 0.5:
        kind = pick.choice(("kill-process", "kill-process", "kill-process", "lose-node"))
        if later and pick.random() < 0.5:
            return DrawnFault(kind, point=pick.choice(size.later))
        return DrawnFault(kind, point=pick.choice(POINTS_HERE), nth=pick.choice((1, 1, 2, 3, 5)))
    return DrawnFault(pick.choice(kinds), awaits=int(pick.random() ** 2 * size.span))
