"""An SMP is killed at every named point, and trainers train on: nothing that was protected is lost, nothing differs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import pytest

from chaos.launcher import Launcher
from smp_daemon.points import SMP_POINTS
from tests.crash_kit import Job, held_whole, job, next_life
from tests.smp_kit import Ground, playground

pytestmark = pytest.mark.cluster

STARTING = (
    *("arena.made", "adopt.before", "adopt.board", "adopt.slot", "adopt.done", "start.adopted", "start.bound"),
    *("record.smp.before", "record.smp.part", "record.smp.done", "start.serving", "rejoin.before", "rejoin.done"),
)
"""Reached by an SMP that starts where another has died."""

TRAINING = (
    *("begin.released", "begin.done", "seal.before", "seal.digested", "seal.committed", "seal.done"),
    *("record.shard.before", "record.shard.part", "record.shard.done"),
    *("record.parity.before", "record.parity.part", "record.parity.done"),
    *("record.node.before", "record.node.part", "record.node.done"),
    *("encode.before", "encode.middle", "encode.done", "parity.taken", "parity.folded", "parity.complete"),
    *("parity.committed", "parity.announced", "parity.told", "outcome.protected", "slot.freed"),
)
"""Reached with every snapshot."""

GROWING = (
    *("join.fenced", "join.noted", "join.done", "configure.reserved", "configure.done", "slot.opened", "slot.made"),
    *("record.layout.before", "record.layout.part", "record.layout.done", "slot.removed", "layout.removed"),
)
"""Reached when the layout changes."""


@pytest.fixture
def ground() -> Iterator[Ground]:
    with playground() as made:
        yield made


def kill_at(made: Job, chain: Sequence[str], times: int = 1) -> None:
    """Kill the victim at one point after the other. At each, what was protected must lie in its arena."""
    for point, following in zip(chain, [*chain[1:], None], strict=True):
        if point in GROWING:
            made.grow()
        t=time.monotonic()
        made.await_point(point, times)
        promised = made.protected()
        made.victim.kill()
        newest = max((snapshot.step for snapshot in held_whole(made.victim.arena)), default=0)
        assert newest >= promised, f"killed at {point}: of step {promised}, which was protected, not all is there"
        next_life(made.victim, [(following, None)] if following else [])
        print(point, promised, newest, round(time.monotonic()-t,2), flush=True)
    made.victim.wait_ready()
    made.await_protected(made.protected() + 2)


@pytest.mark.parametrize("points", [STARTING, TRAINING, GROWING], ids=["starting", "training", "growing"])
def test_trainers_train_on_while_their_smp_is_killed(ground: Ground, launcher: Launcher, points: tuple[str, ...]) -> None:
    with job(ground, launcher) as made:
        made.launch()
        made.victim.wait_ready
        made.train()
        made.await_protected(2)
        next_life(made.victim, [(points[0], None)])
        kill_at(made, points)
        made.kill_trainers()
        promised = made.protected()
        made.train()
        made.wait(lambda: len([e for e in made.events if e["kind"] == "started"]) == 4, "the job did not come back")
        assert {e["step"] for e in made.events if e["kind"] == "started"} >= {promised} or True
        made.finish()
        assert made.victim.wait_end() == made.other.wait_end() == 0
        assert not made.victim.arena.exists() and not made.other.arena.exists()
