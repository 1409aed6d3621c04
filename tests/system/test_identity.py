"""Which run a start goes on with, and whose bytes are believed: pure functions, and real SMPs that hold two runs."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from holdfast.smp_daemon.shared.belief import Claim, believe
from holdfast.smp_daemon.shared.errors import ConfigError, NotOurs, ProtocolError, Unrecoverable
from holdfast.smp_daemon.shared.identity import (
    MAX_FOLLOWED,
    Run,
    epoch_text,
    first_after,
    is_run_id,
    next_epoch,
    run_id,
    starts_until,
)
from holdfast.smp_daemon.shared.inventory import Inventory, PersistedRun
from holdfast.smp_daemon.shared.layout import Layout, Node, Shard, SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT
from holdfast.smp_daemon.shared.plan import plan_restore
from holdfast.smp_daemon.shared.records import ShardRecord
from holdfast.smp_daemon.shared.runs import (
    GIVE_UP_ENV,
    RUN_ENV,
    SAME_TIME_S,
    new_run,
    own_inventories,
    own_run,
    runs_in_reach,
    taken_up,
)
from holdfast.smp_daemon.shared.starts import Record, Start
from holdfast.snapshot.resume.choice import StartOptions
from holdfast.snapshot.resume.entering import check_nothing_is_left, reach_of
from tests.deadlines import await_that
from tests.smp_kit import JOB, Ground, SmpProcess, run_on
from tests.smp_kit import Run as JobOfRun

OLD, NEW = Run("0000aaaa", 1000), Run("0000bbbb", 2000)
STEP = 11


# ---------------------------------------------------------------------- names


def test_two_starts_that_know_nothing_of_each_other_begin_different_epochs() -> None:
    seed = 20261125
    drawn = random.Random(seed)
    epochs = {next_epoch(0, drawn.getrandbits(32)) for _ in range(1000)}
    assert len(epochs) == 1000, seed
    assert {starts_until(epoch) for epoch in epochs} == {1}


@pytest.mark.parametrize("drawn", [0, 1, (1 << 31) - 1, (1 << 32) - 1, 1 << 40])
def test_an_epoch_is_above_all_that_its_start_knows_of(drawn: int) -> None:
    epoch = 0
    for start in range(1, 50):
        later = next_epoch(epoch, drawn)
        assert later > epoch and later >= first_after(epoch) and starts_until(later) == start
        epoch = later + 1000  # changes of layout count on within the start
        assert starts_until(epoch) == start
    assert next_epoch(((1 << 21) - 2) << 32, drawn) <= MAX_COUNT, "two million starts"


def test_an_epoch_is_shown_with_its_tag() -> None:
    assert epoch_text(next_epoch(next_epoch(0, 5), 0x7F3A)) == "2-00007f3a"
    assert epoch_text(7) == "7", "one that no start has drawn"


def test_a_run_has_an_id_of_eight_digits() -> None:
    assert run_id(0xABC) == "00000abc" and run_id(1 << 32) == "00000000"
    assert is_run_id(run_id(12345))
    assert not any(map(is_run_id, ("", "abc", "0000000G", "000000000", "../../..")))


# ---------------------------------------------------------------------- the rule


def layout(run: Run, epoch: int, nodes: str) -> Layout:
    each = tuple(Node(name, f"10.0.0.{ord(name)}", 1, 2, (Shard(f"dp{i}", 100),)) for i, name in enumerate(nodes))
    return Layout("job", epoch, 0, each, (tuple(range(len(nodes))),), 1, 1, 64, 3, run=run)


def inventory(
    node: str, at: Layout, step: int | None = STEP, *, run: Run | None = None, protected: bool = True
) -> Inventory:
    """What the SMP of `node` holds: its own shard of a step, and parity. `run`: the run that it takes part in now."""
    position = [each.name for each in at.nodes].index(node)
    snapshot = SnapshotId(at.epoch, step or 0)
    run = run or at.run
    return Inventory(
        node,
        f"10.0.0.{ord(node)}",
        1,
        2,
        epoch=at.epoch,
        run=run,
        protected=snapshot if protected and step is not None and run.id == at.run.id else None,
        layouts={(at.epoch, 0): at},
        shards=frozenset({(snapshot, f"dp{position}")} if step is not None else ()),
        parities=frozenset({(snapshot, at.tag(0), position)} if step is not None else ()),
        record=Record(Start(at.epoch, 0, run=run)),
    )


def test_the_run_that_was_begun_last_goes_on() -> None:
    old, new = layout(OLD, next_epoch(0, 1), "ab"), layout(NEW, next_epoch(0, 2), "mn")
    held = [inventory("m", new), inventory("b", old, step=99)]
    seen = runs_in_reach(held)
    assert [each.run for each in seen] == [NEW, OLD]
    assert seen[1].nodes == ("b",) and seen[1].snapshots == (SnapshotId(old.epoch, 99),)
    own = own_run(seen)
    assert own is not None and own.run == NEW
    plan = plan_restore(own_inventories(held, NEW), None)
    assert plan is not None and plan.snapshot == SnapshotId(new.epoch, STEP)
    assert set(plan.sources.shards.values()) == {held[0].bulk}, "nothing of another run is used"


def test_what_another_run_was_promised_is_no_promise_of_this_one() -> None:
    """The newest protected snapshot of an older run must not make this run's look lost, nor be restored."""
    old, new = layout(OLD, next_epoch(next_epoch(0, 1), 1), "abc"), layout(NEW, next_epoch(0, 2), "amn")
    held = [inventory("a", new, step=3), inventory("m", new, step=3), inventory("b", old, step=14)]
    plan = plan_restore(own_inventories(held, NEW), None)
    assert plan is not None and plan.snapshot == SnapshotId(new.epoch, 3)


@pytest.mark.parametrize("apart_s", [0, SAME_TIME_S - 1, SAME_TIME_S])
def test_runs_that_never_met_and_began_together_are_refused_by_name(apart_s: int) -> None:
    other = Run("0000cccc", NEW.begun_s - apart_s)
    held = [inventory("a", layout(other, next_epoch(0, 1), "ab")), inventory("m", layout(NEW, next_epoch(0, 2), "mn"))]
    seen = runs_in_reach(held)
    if apart_s == SAME_TIME_S:
        own = own_run(seen)
        assert own is not None and own.run == NEW
        return
    with pytest.raises(ConfigError, match=RUN_ENV) as caught:
        own_run(seen)
    assert other.id in str(caught.value) and NEW.id in str(caught.value) and GIVE_UP_ENV in str(caught.value)
    for chosen in (other, NEW):
        own = own_run(seen, chosen.id)
        assert own is not None and own.run == chosen
        own = own_run(seen, gone={chosen.id})
        assert own is not None and own.run != chosen


def test_a_run_without_a_snapshot_is_no_rival() -> None:
    other = Run("0000cccc", NEW.begun_s)
    held = [inventory("a", layout(other, next_epoch(0, 1), "ab"), None), inventory("m", layout(NEW, 2 << 32, "mn"))]
    own = own_run(runs_in_reach(held))
    assert own is not None and own.run == NEW


def test_a_run_that_is_not_in_reach_cannot_be_chosen() -> None:
    seen = runs_in_reach([inventory("a", layout(OLD, next_epoch(0, 1), "ab"))])
    with pytest.raises(ConfigError, match=f"{RUN_ENV}=0000dddd"):
        own_run(seen, "0000dddd")
    with pytest.raises(ConfigError, match=RUN_ENV):
        own_run(seen, OLD.id, {OLD.id})


@pytest.mark.parametrize("now_s", [0.0, 1500.0, 9e9])
def test_a_new_run_is_newer_than_all_that_it_met_whatever_the_clock_says(now_s: float) -> None:
    held = [inventory("a", layout(OLD, 1 << 32, "ab")), inventory("m", layout(NEW, 2 << 32, "mn"))]
    run = new_run("0000dddd", runs_in_reach(held), {"0000eeee"}, now_s)
    assert run.begun_s > NEW.begun_s and set(run.follows) == {OLD.id, NEW.id, "0000eeee"}
    own = own_run(runs_in_reach([*held, inventory("x", layout(run, 3 << 32, "xy"))]))
    assert own is not None and own.run == run, "not ambiguous either"


@pytest.mark.parametrize("identity", ["00000000", "ffffffff"])
def test_a_run_is_newer_than_one_that_was_given_up_out_of_reach_in_the_same_second(identity: str) -> None:
    run = new_run(identity, [], {OLD.id}, OLD.begun_s)
    held = [inventory("a", layout(OLD, 1 << 32, "ab")), inventory("m", layout(run, 2 << 32, "mn"))]
    own = own_run(runs_in_reach(held))
    assert own is not None and own.run == run
    again = taken_up(OLD, runs_in_reach(held), (), OLD.begun_s)
    own = own_run(runs_in_reach([inventory("a", layout(again, 3 << 32, "ab")), held[1]]))
    assert own is not None and own.run == again, "it was chosen since"


def test_a_run_that_was_chosen_is_the_newest_from_then_on() -> None:
    held = [inventory("a", layout(OLD, 1 << 32, "ab")), inventory("m", layout(NEW, 2 << 32, "mn"))]
    seen = runs_in_reach(held)
    again = taken_up(OLD, seen, (), 0.0)
    assert again.id == OLD.id and again.begun_s > NEW.begun_s and NEW.id in again.follows
    own = own_run(runs_in_reach([held[1], inventory("a", layout(again, 3 << 32, "ab")), held[0]]))
    assert own is not None and own.run == again
    assert taken_up(NEW, seen, (), 1e12) == NEW, "the newest stays as it is"


def test_a_run_on_storage_stays_given_up_if_its_successor_left_nothing_but_its_name_there() -> None:
    """The successor lost its memory before it had persisted a snapshot."""
    persisted = PersistedRun(OLD, frozenset({SnapshotId(1 << 32, STEP)}))
    after = reach_of([], [persisted], StartOptions(give_up=(OLD.id,))).begun(0xDDDD, 5e3)
    assert reach_of([], [persisted], StartOptions()).run == OLD
    reach = reach_of([], [persisted, PersistedRun(after)], StartOptions())
    assert reach.run == after and reach.gone == {OLD.id}
    check_nothing_is_left(reach, ())


def test_a_run_that_was_given_up_stays_so_although_its_successor_is_given_up_too() -> None:
    held = [inventory("a", layout(OLD, 1 << 32, "ab"))]
    after = reach_of(held, (), StartOptions(give_up=(OLD.id,))).begun(0xDDDD, 5e3)
    assert after.over == (OLD.id,)
    both = [held[0], inventory("m", layout(after, 2 << 32, "mn"))]
    assert reach_of(both, (), StartOptions()).run == after
    reach = reach_of(both, (), StartOptions(give_up=(after.id,)))
    assert reach.run is None and not reach.others
    assert set(reach.begun(0xEEEE, 6e3).over) == {OLD.id, after.id}


def test_a_run_that_was_given_up_can_be_chosen_again_for_good() -> None:
    held = [inventory("a", layout(OLD, 1 << 32, "ab"))]
    after = reach_of(held, (), StartOptions(give_up=(OLD.id,))).begun(0xDDDD, 5e3)
    both = [held[0], inventory("m", layout(after, 2 << 32, "mn"))]
    chosen = reach_of(both, (), StartOptions(run=OLD.id)).continued(6e3)
    assert chosen.id == OLD.id and chosen.begun_s > after.begun_s
    again = reach_of([*both, inventory("x", layout(chosen, 3 << 32, "xy"))], (), StartOptions())
    assert again.run == chosen


def test_a_run_that_was_only_seen_is_missed_if_the_newer_one_never_had_a_snapshot() -> None:
    """Nobody has said that the older one is over: its nodes were away when the newer one began."""
    empty = reach_of([inventory("a", layout(OLD, 1 << 32, "ab"), None)], (), StartOptions()).begun(0xDDDD, 5e3)
    assert OLD.id in empty.follows and not empty.over
    held = [inventory("b", layout(OLD, 1 << 32, "ab")), inventory("m", layout(empty, 2 << 32, "mn"), None)]
    with pytest.raises(ConfigError, match=f"{RUN_ENV}={OLD.id}"):
        check_nothing_is_left(reach_of(held, (), StartOptions()), ())


def test_what_a_run_has_followed_is_bounded() -> None:
    seen = runs_in_reach([inventory("a", layout(replace(OLD, follows=("0000ffff",) * 400), 1 << 32, "ab"))])
    assert len(new_run("0000dddd", seen, [f"{i:08x}" for i in range(400)], 0).follows) == MAX_FOLLOWED


# ---------------------------------------------------------------------- never from nothing


def test_where_there_is_nothing_a_job_begins() -> None:
    reach = reach_of([], (), StartOptions())
    check_nothing_is_left(reach, ())
    assert reach.run is None and reach.begun(0xABC, 1e9) == Run("00000abc", 10**9)


def test_another_runs_state_needs_a_choice_before_a_job_begins() -> None:
    held = [inventory("a", layout(OLD, 1 << 32, "ab")), inventory("m", layout(NEW, 2 << 32, "mn"), None)]
    with pytest.raises(ConfigError, match=f"{RUN_ENV}={OLD.id}") as caught:
        check_nothing_is_left(reach_of(held, (), StartOptions()), ())
    assert f"{GIVE_UP_ENV}={OLD.id}" in str(caught.value)
    check_nothing_is_left(reach_of(held, (), StartOptions(give_up=(OLD.id,))), ())
    told = [replace(held[0], given_up=frozenset({OLD.id})), held[1]]
    check_nothing_is_left(reach_of(told, (), StartOptions()), ())


def test_what_is_persisted_and_cannot_be_read_is_not_nothing() -> None:
    damaged = PersistedRun(OLD, others=("step 5: its manifest is damaged",))
    with pytest.raises(Unrecoverable, match=f"{GIVE_UP_ENV}={OLD.id}"):
        check_nothing_is_left(reach_of([], [damaged], StartOptions()), ["its manifest is damaged"])
    check_nothing_is_left(reach_of([], [damaged], StartOptions(give_up=(OLD.id,))), ())
    unfinished = PersistedRun(OLD, unfinished=("step 5: not all of its nodes have written their part",))
    check_nothing_is_left(reach_of([], [unfinished], StartOptions()), ())


@pytest.mark.parametrize(("run", "give_up"), [("newest", ()), ("", ("all",)), ("0000aaaa", ("0000aaaa",))])
def test_what_is_no_id_is_refused(run: str, give_up: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match=r"HOLDFAST_(RUN|GIVE_UP)"):
        StartOptions(run=run, give_up=give_up)


# ---------------------------------------------------------------------- belief


def claim() -> Claim:
    return Claim.of_shard(SnapshotId(1 << 32, 5), "dp0", layout(OLD, 1 << 32, "ab"))


@pytest.mark.parametrize(
    "change",
    [
        {"run": NEW.id},
        {"snapshot": SnapshotId((1 << 32) + 1, 5)},
        {"snapshot": SnapshotId(1 << 32, 6)},
        {"part": "dp1"},
        {"bytes": 99},
        {"unit_bytes": 32},
    ],
    ids=lambda change: next(iter(change)),
)
def test_bytes_that_differ_in_anything_are_not_believed(change: dict[str, object]) -> None:
    believe(claim(), claim())
    believe(replace(claim(), unit_bytes=None), claim())
    with pytest.raises(NotOurs):
        believe(replace(claim(), **change), claim())  # type: ignore[arg-type]


def test_a_layout_of_another_epoch_says_nothing_of_a_snapshot() -> None:
    at = layout(OLD, 1 << 32, "ab")
    with pytest.raises(NotOurs):
        Claim.of_shard(SnapshotId(2 << 32, 5), "dp0", at)
    with pytest.raises(NotOurs):
        Claim.of_parity(SnapshotId(1 << 32, 5), "anothertag", 0, at)
    with pytest.raises(ProtocolError):
        Claim.of_shard(SnapshotId(1 << 32, 5), "dp7", at)


def test_a_commit_record_claims_what_it_names() -> None:
    record = ShardRecord(SnapshotId(1 << 32, 5), "dp0", 100, 64, (1, 2), run=OLD.id)
    said = Claim.of_record(record)
    believe(said, claim())
    assert said == replace(claim(), job=None), "of all that a layout says, a record does not name the job"


# ---------------------------------------------------------------------- real SMPs


def two_runs(smps: Sequence[SmpProcess]) -> tuple[JobOfRun, JobOfRun]:
    """Two starts that knew nothing of each other, each on two nodes of its own, stopped after the same step."""
    old = run_on(smps[:2], [[900], [900]], epoch=next_epoch(0, 1), identity=OLD)
    new = run_on(smps[2:], [[900], [900]], epoch=next_epoch(0, 2), identity=NEW)
    for run in (old, new):
        run.protect(STEP)
    return old, new


def test_a_node_of_another_run_gives_none_of_its_bytes(ground: Ground) -> None:
    """The next start has one node of each run. It restores the newer one, whole, on both."""
    old, new = two_runs(ground.smps(4))
    stays, comes = new["dp0"], old["dp1"]
    held = [stays.client.inventory(), comes.client.inventory()]
    own = own_run(runs_in_reach(held))
    assert own is not None and own.run == NEW
    plan = plan_restore(own_inventories(held, NEW), ["dp0", "dp1"])
    assert plan is not None and plan.snapshot == new.snapshot(STEP)
    epoch = next_epoch(max(each.epoch for each in held), 3)
    for trainer in (stays, comes):
        trainer.client.join(epoch, Start(epoch, STEP, run=NEW))
    shard = comes.client.recover(plan.sources, "dp1")
    assert shard.how == "rebuilt" and bytes(shard.view) == new["dp1"].image(plan.snapshot)
    assert bytes(stays.client.recover(plan.sources, "dp0").view) == new["dp0"].image(plan.snapshot)
    after = comes.client.inventory()
    assert after.run == NEW and after.protected is None, "it was promised nothing of this run"
    assert {layout.run.id for layout in after.layouts.values()} == {OLD.id, NEW.id}


def test_a_run_that_is_given_up_is_dropped_and_stays_known_as_old(ground: Ground) -> None:
    from holdfast.cli.main import main

    smps = ground.smps(4)
    old, new = two_runs(smps)
    smp = smps[0]
    at = f"{smp.control[0]}:{smp.control[1]}"
    assert main(["give-up", "--job", old.job, "--at", at]) != 0, "its trainers are connected"
    for trainer in old:
        trainer.client.close()
    assert main(["give-up", "0000dddd", "--job", old.job, "--at", at]) != 0
    assert main(["give-up", OLD.id, "--job", old.job, "--at", at]) == 0
    held = smp.client().inventory()
    assert held.given_up == {OLD.id} and not held.shards and not held.parities
    smp.restart()
    assert smp.client().inventory().given_up == {OLD.id}, "a successor knows it, too"
    assert new["dp0"].client.inventory().shards, "other runs are left alone"


def test_two_runs_at_one_place_are_told_of_each_other(ground: Ground, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither saw the other as it began. Each has a folder of its own, and the one that notes its run last says so."""
    (ground.base / "place").mkdir()
    monkeypatch.setenv("HOLDFAST_PERSIST", str(ground.base / "place"))
    first, second = ground.smps(2)
    run_on([first], [[900]], epoch=next_epoch(0, 1), identity=OLD)
    place = ground.base / "place"
    await_that(lambda: (place / f"{JOB}.{OLD.id}.json").exists())
    run_on([second], [[900]], epoch=next_epoch(0, 2), identity=NEW)
    await_that(lambda: (place / f"{JOB}.{NEW.id}.json").exists())
    await_that(lambda: f"run {OLD.id} of this" in (second.arena / "smp.log").read_text())
