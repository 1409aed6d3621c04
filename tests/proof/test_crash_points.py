"""An SMP is killed at every named point. Trainers keep training, nothing that was protected is lost, and nothing is
left behind.

SMPs are killed one after another in the same arena; each is told at its start at which point it will die. The sample
has all points in a few such chains; `make test-all` starts anew for each point, and kills both at the first pass and at
later ones.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest

from holdfast.chaos.faults import FAILPOINTS, PERSIST_FAILPOINTS, SMP_FAILPOINTS, TRAINER_FAILPOINTS
from holdfast.chaos.launcher import Launcher
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import SmpUnavailable
from holdfast.smp_daemon.shared.layout import SnapshotId
from tests.deadlines import DEADLINE_S
from tests.proof.chaos.scenario import built_in
from tests.proof.crash_kit import Job, held_whole, job, next_life
from tests.smp_kit import (
    Ground,
    SmpProcess,
    Trainer,
    flip_a_byte,
    parities_by_xor,
    parity_units,
    playground,
    run_on,
    shard_file,
)
from tests.system.test_regroup import come_back, leave

pytestmark = pytest.mark.cluster

STARTING = (
    *("arena.made", "adopt.before", "adopt.board", "adopt.slot", "adopt.done", "start.adopted", "start.bound"),
    *("record.smp.before", "record.smp.part", "record.smp.done", "start.serving", "adopt.verify", "rejoin.before"),
    "rejoin.done",
)
"""Reached by an SMP that starts where another one died."""

TRAINING = (
    *("seal.released", "seal.before", "seal.digested", "seal.committed", "seal.done"),
    *("record.shard.before", "record.shard.part", "record.shard.done"),
    *("record.parity.before", "record.parity.part", "record.parity.done"),
    *("record.node.before", "record.node.part", "record.node.done"),
    *("encode.before", "encode.middle", "encode.done", "parity.taken", "parity.accumulated", "parity.complete"),
    *("parity.committed", "parity.announced", "parity.told", "outcome.protected", "slot.freed"),
)
"""Reached with every snapshot."""

GROWING = (
    *(
        "fence.marked",
        "join.fenced",
        "join.noted",
        "join.done",
        "configure.reserved",
        "configure.done",
        "slot.opened",
        "slot.made",
    ),
    *("record.layout.before", "record.layout.part", "record.layout.done", "slot.removed", "layout.removed"),
)
"""Reached when the layout changes."""

REFUSING = ("outcome.failed",)
"""Reached when a trainer has something sealed that is no slot."""

RECOVERING = (
    *(
        "receive.taken",
        "rebuild.middle",
        "receive.checked",
        "receive.done",
        "repair_parity.taken",
        "repair_parity.accumulated",
        "repair_parity.done",
    ),
    *("repair.before", "repair.done"),
)
"""Reached by the SMP of a node that replaces a lost one."""

REGROUPING = (
    *("regroup.declined", "regroup.planned", "regroup.adopt", "regroup.encode", "regroup.release", "drop.done"),
    "regroup.done",
)
"""Reached by survivors when nobody replaces a lost node."""

RESERVING = ("reserve.slice",)
"""Reached by an SMP that reserves a lot of memory: see `tests.system.test_reserving`."""

FINISHING = ("finish.told", "finish.closing", "arena.emptied", "arena.removed")
"""Reached when a job ends well."""

WITH_TRAINERS = {"starting": STARTING, "training": TRAINING, "growing": GROWING}


@pytest.fixture
def ground(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ground]:
    monkeypatch.setenv("HOLDFAST_REJOIN", "1")
    with playground(own_python=request.node.get_closest_marker("slow") is not None) as made:
        yield made


@pytest.mark.proves("every-failpoint")
def test_every_point_has_its_test() -> None:
    here = [*STARTING, *TRAINING, *GROWING, *REFUSING, *RECOVERING, *REGROUPING, *RESERVING, *FINISHING]
    assert sorted([*here, *PERSIST_FAILPOINTS]) == sorted(SMP_FAILPOINTS)  # scenarios test these
    assert set(FAILPOINTS) == {*here, *TRAINER_FAILPOINTS, *PERSIST_FAILPOINTS}
    written = {fault.point for scenario in built_in() for fault in scenario.faults}
    assert written >= set(PERSIST_FAILPOINTS)


# ---------------------------------------------------------------------- while trainers train


def kill_at(made: Job, chain: Sequence[str], times: int = 1) -> None:
    """Kill the victim at one point after another. Each time, its arena must hold what was protected, whole."""
    for point, following in zip(chain, [*chain[1:], None], strict=True):
        for turn in range(1, times + 1):
            if point in GROWING:
                made.grow()
            held = made.await_point(point)
            if turn < times:
                held.go()
        promised = made.protected()
        made.victim.kill()
        newest = max((snapshot.step for snapshot in held_whole(made.victim.arena)), default=0)
        assert newest >= promised, f"killed at {point}: step {promised} was protected, and is not here"
        next_life(made.victim, [(following, None)] if following else [])
    made.victim.wait_ready()
    made.await_protected(made.protected() + 2)


def survive(ground: Ground, launcher: Launcher, chain: Sequence[str], times: int = 1) -> None:
    """A job whose SMP dies at each of these points, whose trainers then die once, and which ends well."""
    with job(ground, launcher) as made:
        made.launch()
        made.train()
        made.await_protected(2)
        next_life(made.victim, [(chain[0], None)])
        kill_at(made, chain, times)
        assert len(made.of("started")) == 2, "the trainers were restarted"
        made.kill_trainers()
        promised = made.protected()
        made.train()
        made.wait(lambda: len(made.of("started")) == 4, "the job did not come back")
        assert min(event["step"] for event in made.of("started")[2:]) >= promised
        made.finish()
        assert made.victim.wait_end() == made.other.wait_end() == 0
        assert not made.victim.arena.exists() and not made.other.arena.exists()


@pytest.mark.parametrize("chain", WITH_TRAINERS)
def test_trainers_train_on_while_their_smp_dies_again_and_again(ground: Ground, launcher: Launcher, chain: str) -> None:
    survive(ground, launcher, WITH_TRAINERS[chain])


@pytest.mark.slow
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("point", [*TRAINING, *GROWING])
@pytest.mark.proves("an-smp-dies")
def test_trainers_train_on_when_their_smp_dies(ground: Ground, launcher: Launcher, point: str, times: int) -> None:
    survive(ground, launcher, [point], times)


@pytest.mark.slow
@pytest.mark.parametrize("point", STARTING)
@pytest.mark.parametrize("first", ["seal.digested", "record.shard.part", "parity.complete", "record.node.part"])
def test_a_successor_dies_while_it_starts(ground: Ground, launcher: Launcher, first: str, point: str) -> None:
    survive(ground, launcher, [first, point, point])


@pytest.mark.parametrize("point", FINISHING)
def test_a_job_leaves_nothing_when_its_smp_dies_while_it_ends(ground: Ground, launcher: Launcher, point: str) -> None:
    with job(ground, launcher, rules=[(point, None)], start=True) as made:
        made.launch()
        made.train()
        made.await_protected(2)
        made.order_end()
        made.await_point(point)
        made.victim.kill()
        made.finish()
        assert made.other.wait_end() == 0
        assert not made.victim.arena.exists() and not made.other.arena.exists()


# ---------------------------------------------------------------------- while data is recovered


def call_and_kill(ground: Ground, smp: SmpProcess, call: Any, *arguments: Any) -> None:
    """Make a call that takes its SMP to the point at which it stops, and kill the SMP there."""
    [(point, _)] = smp.rules
    done: Future[Any] = ground.meanwhile(call, *arguments)
    ground.points.wait_any(smp.name, point)
    smp.kill()
    error = done.exception(DEADLINE_S)
    assert error is None or isinstance(error, SmpUnavailable)


def test_what_a_trainer_had_taken_is_not_held_when_the_smp_dies_too(ground: Ground) -> None:
    smps = ground.smps(2)
    run = run_on(smps, [[3000], [3000]])
    older = run.protect(1)
    for point in REFUSING:
        next_life(smps[0], [(point, None)])
        smps[0].wait_ready()
        trainer = run.trainers["dp0"] = Trainer(smps[0], "dp0")
        trainer.client.join(1)
        trainer.write(SnapshotId(1, 2), [older], older)[:] = bytes(trainer.form.total_bytes)
        call_and_kill(ground, smps[0], trainer.seal, SnapshotId(1, 2))
    next_life(smps[0], [])
    smps[0].wait_ready()
    run.trainers["dp0"] = Trainer(smps[0], "dp0")
    run["dp0"].client.join(1)
    inventory = run["dp0"].client.inventory()
    assert inventory.shards == {(older, "dp0")} and inventory.protected == older
    run.protected = older
    run.protect(3)


def recovered(ground: Ground, chain: Sequence[str]) -> None:
    """A replacement whose SMP dies at each of these points. In the end it holds shard and parity, bit for bit."""
    smps = ground.smps(3)
    run = run_on(smps, [[90_000], [70_000], [80_000]], protect="2+1")
    snapshot = run.protect(1)
    smps[2].lose()
    spare = ground.prepare("spare")
    for point in chain:
        next_life(spare, [(point, None)])
        if point.startswith("repair."):  # a unit of the shard is damaged, which the SMP finds at its start
            ground.points.wait_any("spare", point)
            spare.kill()
            continue
        spare.wait_ready()
        trainer = run.trainers["dp2"] = Trainer(spare, "dp2", 80_000)
        if point.startswith("repair_parity") and point != "repair_parity.taken":
            ground.points.wait_any("spare", point)  # it does this without a request
            spare.kill()
        else:
            plan = run.plan(*(each.client.inventory() for each in run))
            trainer.client.join(2)
            if point == "repair_parity.taken":
                assert trainer.recover(plan).how == "held"
                call_and_kill(ground, spare, trainer.client.repair_parity, plan.sources, 0, 2)
            else:
                call_and_kill(ground, spare, trainer.recover, plan)
        if point == "repair_parity.done":
            flip_a_byte(shard_file(spare, snapshot, "dp2"))
    next_life(spare, [("rejoin.done", None)])
    spare.wait_ready()
    ground.points.wait_any("spare", "rejoin.done").go()
    trainer = run.trainers["dp2"] = Trainer(spare, "dp2", 80_000)
    plan = run.plan(*(each.client.inventory() for each in run))
    assert (plan.snapshot, plan.decoded, plan.repair) == (snapshot, (), ())
    found = trainer.recover(plan)
    assert (found.how, bytes(found.view)) == ("held", trainer.image(snapshot))
    assert parity_units(spare, snapshot, run.layout.tag(0), 2) == parities_by_xor(run, 0, snapshot)[2]


def test_a_replacement_dies_again_and_again(ground: Ground) -> None:
    recovered(ground, RECOVERING)


def regrouped(ground: Ground, chain: Sequence[str]) -> None:
    """Survivors, one of which dies at each of these points. In the end they protect the snapshots again."""
    smps = ground.smps(4)
    run = run_on(smps, [[3000 + i] for i in range(4)], protect="3+1")
    run.protect(1)
    run.protect(2)
    smps[1].lose()
    victim = smps[0]
    for point in chain:
        next_life(victim, [(point, None)])
        if point != "regroup.declined":
            leave(run)
        ground.points.wait_any(victim.name, point)
        victim.kill()
    leave(run)
    next_life(victim, [])
    victim.wait_ready()
    come_back(run, smps, [1])


@pytest.mark.parametrize("chain", [REGROUPING[:-1], REGROUPING[-1:]], ids=["before-the-end", "at-the-end"])
def test_a_survivor_dies_again_and_again(ground: Ground, monkeypatch: pytest.MonkeyPatch, chain: Sequence[str]) -> None:
    monkeypatch.setenv("HOLDFAST_REGROUP_AFTER", "200ms")
    regrouped(ground, chain)


def test_a_client_is_told_when_an_smp_left_something(ground: Ground) -> None:
    smp = ground.smp(rules=[("finish.closing", None)])
    client = SmpClient(smp.arena, smp.job)
    client.join(1)
    done = ground.meanwhile(client.finish, 1)
    ground.points.wait_any("node0", "finish.closing")
    smp.kill()
    with pytest.raises(SmpUnavailable, match=r"left .* behind"):
        done.result(DEADLINE_S)
