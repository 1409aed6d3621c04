"""What a seed stands for: a job, how its machines behave, and which faults strike when. Pure."""

from __future__ import annotations

import random
from dataclasses import dataclass

from chaos.sim.seams import RECORDS
from smp_daemon.points import POINTS

POINTS_HERE = (
    *(point for point in POINTS if point != "restore.middle"),
    "seal.digest",
    "seal.digested",
    *(f"record.{kind}.{when}" for kind in RECORDS for when in ("before", "part", "done")),
)
"""Every named place at which a process may be killed. The loading of tensors, and with it ``restore.middle``, is not
part of the control plane."""

PROTECTIONS = ("auto", "1+1", "2+1", "2+2", "3+1", "copies:2")

KINDS = (
    "kill trainer",
    "kill all trainers",
    "kill SMP",
    "lose node",
    "lose several nodes",
    "freeze SMP",
    "zombie trainer",
    "cut host",
    "slow node",
    "flip stored bit",
    "grow state",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault.

    Attributes:
        awaits: after so many awaits of its life it strikes; ignored if `point` is set.
        point, nth: or at the n-th time that somebody comes to this named point, whom it then strikes.
    """

    kind: str
    awaits: int = 0
    point: str = ""
    nth: int = 1


@dataclass(frozen=True, slots=True)
class Gap:
    """What happens between two lives: `seconds` pass, with or without a replacement for lost nodes."""

    seconds: float
    replace: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """All that is drawn before a run begins; the order of turns is drawn while it runs.

    Attributes:
        ranks: by rank, the number of the node it starts on.
        lengths: of each rank's state, in bytes.
        chance: how likely a task gives way at an await.
        step_s: most that a training step takes.
        lives, gaps: the faults of each start of the job, and what follows it.
        final: what is done in the quiet that follows; one of `FINALS`.
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
    reform_after_s: float
    chance: float
    latency_s: float
    capacity: int
    flip_chance: float
    break_chance: float
    steps: int
    step_s: float
    lives: tuple[tuple[Fault, ...], ...]
    gaps: tuple[Gap, ...]
    final: str


FINALS = ("stop", "stop", "stop", "finish", "lose", "lose", "lose twice", "lose too many", "reform")


def draw(seed: int) -> Plan:
    """The plan of `seed`."""
    pick = random.Random(f"plan {seed}")
    nodes = pick.choice((2, 2, 2, 3, 3, 3, 4, 5, 6))
    ranks = tuple(node for node in range(nodes) for _ in range(pick.choice((1, 1, 1, 2)) if nodes < 4 else 1))
    lives = tuple(
        tuple(_fault(pick) for _ in range(pick.choice((0, 1, 1, 2, 3)))) for _ in range(pick.choice((1, 1, 1, 2, 3)))
    )
    return Plan(
        seed=seed,
        nodes=nodes,
        ranks=ranks,
        lengths=tuple(pick.randint(40, 400) for _ in ranks),
        protect=pick.choice(PROTECTIONS),
        slots=pick.choice((3, 3, 3, 4)),
        every=pick.choice((1, 1, 2)),
        unit_bytes=pick.choice((128, 200, 256, 512)),
        rebuild=pick.choice(("chain", "decode")),
        reform_after_s=pick.choice((0.0, 30.0, 30.0)),
        chance=pick.choice((0.01, 0.05, 0.2)),
        latency_s=pick.choice((0.0, 0.0002, 0.01)),
        capacity=pick.choice((2, 8, 64)),
        flip_chance=pick.choice((0.0, 0.0, 0.02)),
        break_chance=pick.choice((0.0, 0.0, 0.01)),
        steps=pick.randint(2, 4),
        step_s=pick.choice((0.0, 0.0, 0.05)),
        lives=lives,
        gaps=tuple(Gap(pick.choice((0.0, 1.0, 5.0, 90.0)), pick.random() < 0.7) for _ in range(len(lives))),
        final=pick.choice(FINALS),
    )


def _fault(pick: random.Random) -> Fault:
    if pick.random() < 0.5:
        kind = pick.choice(("kill here", "kill here", "kill here", "lose here"))
        return Fault(kind, point=pick.choice(POINTS_HERE), nth=pick.choice((1, 1, 2, 3, 5)))
    return Fault(pick.choice(KINDS), awaits=int(pick.random() ** 2 * 1500))
