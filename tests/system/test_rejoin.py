"""What an SMP restores on its node when it starts in the arena of a dead one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.leftovers import find_leftovers, remove
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.recovery.inventories import gather_inventories
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.records import PART
from tests.deadlines import DEADLINE_S
from tests.smp_kit import (
    JOB,
    Ground,
    Run,
    SmpProcess,
    Trainer,
    flip_a_byte,
    parities_by_xor,
    parity_file,
    parity_units,
    record_of,
    run_on,
    shard_file,
)

pytestmark = pytest.mark.smps(HOLDFAST_REJOIN="1")

SHORT_S = 2.0


def rejoined(ground: Ground, smp: SmpProcess) -> None:
    """Start an SMP, and wait until it has rejoined."""
    smp.rules = [("rejoin.done", None)]
    smp.launch().wait_ready()
    ground.points.wait_any(smp.name, "rejoin.done").go()


def started(ground: Ground) -> tuple[list[SmpProcess], Run, SnapshotId]:
    """SMPs that hold a protected snapshot; that of node1 is killed."""
    smps, run = ground.job([[90_000], [70_000], [80_000]], protect="2+1")
    snapshot = run.protect(1)
    smps[1].kill()
    return smps, run, snapshot


def no_parity(shard: Path, parity: Path) -> None:
    record_of(parity).unlink()


def no_shard(shard: Path, parity: Path) -> None:
    record_of(shard).write_text("not a record")


def damage(shard: Path, parity: Path) -> None:
    flip_a_byte(shard)
    flip_a_byte(parity, 0)


@pytest.mark.parametrize("spoil", [no_parity, no_shard, damage])
def test_what_is_missing_or_damaged_is_computed_again(ground: Ground, spoil: Callable[[Path, Path], None]) -> None:
    smps, run, snapshot = started(ground)
    tag = run.layout.tag(0)
    spoil(shard_file(smps[1], snapshot, "dp1"), parity_file(smps[1], snapshot, tag, 1))
    rejoined(ground, smps[1])
    assert shard_file(smps[1], snapshot, "dp1").read_bytes() == run["dp1"].image(snapshot)
    assert parity_units(smps[1], snapshot, tag, 1) == parities_by_xor(run, 0, snapshot)[1]


def test_who_lacks_nothing_asks_nobody(ground: Ground) -> None:
    smps, run, _ = started(ground)
    smps[0].kill()
    smps[2].kill()
    rejoined(ground, smps[1])
    run.trainers["dp1"] = Trainer(smps[1], "dp1", 70_000)
    assert run["dp1"].client.counters()["bytes_sent"] == 0


def test_a_newer_epoch_is_left_alone(ground: Ground) -> None:
    smps, run, snapshot = started(ground)
    record_of(shard_file(smps[1], snapshot, "dp1")).unlink()
    smps[1].rules = [("rejoin.before", None), ("receive.taken", None)]
    smps[1].launch().wait_ready()
    held = ground.points.wait_any("node1", "rejoin.before")
    trainer = Trainer(smps[1], "dp1", 70_000)
    trainer.client.join(2)
    held.go()
    plan = run.plan(*(t.client.inventory() for t in (run["dp0"], run["dp2"], trainer)))
    doing = ground.meanwhile(trainer.recover, plan)
    ground.points.wait_any("node1", "receive.taken").go()  # the trainer's recovery, and no other
    assert doing.result(DEADLINE_S).how == "rebuilt"


@pytest.mark.parametrize("point", ["rebuild.middle", "receive.done"])
def test_what_is_received_gives_way_to_the_trainer_that_writes_it(ground: Ground, point: str) -> None:
    smps, run, snapshot = started(ground)
    record_of(shard_file(smps[1], snapshot, "dp1")).unlink()
    smps[1].rules = [(point, None), ("rejoin.done", None)]
    smps[1].launch().wait_ready()
    held = ground.points.wait_any("node1", point)
    trainer = Trainer(smps[1], "dp1", 70_000)
    trainer.client.join(1)
    trainer.write(snapshot)
    held.go()
    trainer.seal(snapshot)
    ground.points.wait_any("node1", "rejoin.done").go()
    assert shard_file(smps[1], snapshot, "dp1").read_bytes() == trainer.image(snapshot)
    assert trainer.recover(run.plan(*(t.client.inventory() for t in (run["dp0"], trainer, run["dp2"])))).how == "held"


def test_others_that_ask_while_it_starts_are_answered_once_it_knows_who_it_is(ground: Ground) -> None:
    smps, *_ = started(ground)
    smps[1].rules = [("start.bound", None)]
    smps[1].launch()
    held = ground.points.wait_any("node1", "start.bound")
    answer = ground.meanwhile(gather_inventories, JOB, [smps[1].control])
    held.go()
    smps[1].wait_ready()
    [inventory] = answer.result(DEADLINE_S)
    assert inventory.node == "node1"


# ---------------------------------------------------------------------- an end that was interrupted


def test_what_a_job_that_had_ended_left_is_nothing_to_the_next_of_that_name(ground: Ground) -> None:
    smps = ground.smps(2)
    run_on(smps, [[3000], [3000]]).protect(1)
    smps[0].kill()
    (smps[0].arena / "node.json").unlink()  # the first file that an ending SMP removes
    (smps[0].arena / f"node.json{PART}").write_text("{")
    smps[0].launch().wait_ready()
    assert sorted(path.name for path in smps[0].arena.iterdir()) == ["board", "smp.json", "smp.log", "smp.sock"]
    smps[1].lose().launch().wait_ready()
    run_on(smps, [[3000], [3000]]).protect(1)


def test_what_says_whose_an_arena_was_is_left_to_the_last_and_found(ground: Ground) -> None:
    smp = ground.smp()
    smp.kill()
    for path in list(smp.arena.iterdir()):
        if path.name != "smp.json":
            path.unlink()
    [found] = find_leftovers(smp.arena.parent)
    assert (found.path, found.job) == (smp.arena, JOB)
    remove(found)
    assert not smp.arena.exists()


def test_what_was_being_written_when_it_died_is_removed(ground: Ground) -> None:
    smps, *_ = started(ground)
    part = Path(smps[1].arena / f"layout-1-0.json{PART}")
    part.write_text('{"cut')
    smps[1].rules = []
    smps[1].launch().wait_ready()
    assert not part.exists()


def test_an_smp_that_was_missed_by_itself_before_it_listened_starts(ground: Ground) -> None:
    smps, *_ = started(ground)
    smps[1].rules = [("start.adopted", None)]
    smps[1].launch()
    held = ground.points.wait_any("node1", "start.adopted")
    with PeerClient(JOB) as peers:
        with pytest.raises(HoldfastError, match="unavailable, "):
            peers.ping(smps[1].control, SHORT_S)  # from now on the channel knows that nobody answers
        answer = ground.meanwhile(lambda: peers.ping(smps[1].control, DEADLINE_S, starting=True))
        held.go()
        smps[1].wait_ready()
        assert answer.result(DEADLINE_S).node == "node1"
