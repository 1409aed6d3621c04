"""Only one snapshot in several is protected, the others are only sealed: what SMPs then do, and what is restored."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.strategies import InMemoryCode
from benchmarks.played_slots import play
from holdfast import InMemorySnapshot
from holdfast.cli.status import gather
from holdfast.planner.periods import slots_needed
from holdfast.smp_daemon.recovery import reconciler
from holdfast.smp_daemon.recovery.reconciler import Reconciler
from holdfast.smp_daemon.shared.board import Board, RepairState, SnapshotOutcome
from holdfast.smp_daemon.shared.errors import SmpUnavailable, Unrecoverable
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, get_log
from holdfast.smp_daemon.shared.settings import MTBF
from holdfast.smp_daemon.shared.system import MACHINE
from holdfast.smp_daemon.storage.holdings import ParityKey
from holdfast.snapshot.delays import Delays
from holdfast.snapshot.interval.control import IntervalController
from holdfast.snapshot.options import Options
from holdfast.snapshot.resume.arrange import arrange
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery, parity_slots
from tests.deadlines import DEADLINE_S
from tests.smp_kit import PROTECTED, Crash, Run, playground, run_on
from tests.system.test_hook import half_a_step, small, train

# ---------------------------------------------------------------------- SMPs


@pytest.fixture
def job() -> Iterator[Run]:
    with playground() as ground:
        yield run_on(ground.smps(3), [[3000], [2000], [2500]], slots=4)


def take(run: Run, step: int, keep: list[SnapshotId], with_parity: list[SnapshotId], *, encode: bool) -> SnapshotId:
    snapshot = run.snapshot(step)
    for trainer in run:
        slot = trainer.begin(snapshot, keep, run.protected, with_parity)
        slot[:] = trainer.image(snapshot)
    run.seal(snapshot, encode=encode)
    return snapshot


def with_parity(run: Run) -> set[SnapshotId]:
    return {snapshot for trainer in run for snapshot, _, _ in trainer.client.inventory().parities}


@pytest.mark.proves("sent-to-nobody")
def test_what_is_only_sealed_is_sent_to_nobody_and_lies_beside_what_is_protected(job: Run) -> None:
    first = job.protect(1)
    sent = [trainer.client.counters()["bytes_sent"] for trainer in job]
    sealed = take(job, 2, [first], [first], encode=False)
    younger = take(job, 3, [first, sealed], [first], encode=False)
    assert [trainer.client.counters()["bytes_sent"] for trainer in job] == sent
    assert with_parity(job) == {first}
    second = take(job, 4, [first, younger], [first], encode=True)
    assert job.outcomes(second) == {PROTECTED} and with_parity(job) == {first, second}
    inventories = job.inventories()
    assert {snapshot for inventory in inventories for snapshot, _ in inventory.shards} == {first, younger, second}
    assert all(younger in inventory.never_acknowledged for inventory in inventories)


@pytest.mark.proves("sealed-comes-back")
def test_after_a_crash_what_is_sealed_comes_back_and_after_a_loss_what_is_protected(job: Run) -> None:
    first = job.protect(1)
    sealed = take(job, 2, [first], [first], encode=False)
    inventories = job.inventories()
    plan = job.plan(*inventories)
    assert (plan.snapshot, plan.decoded) == (sealed, ())
    after_a_loss = job.plan(*inventories[:2])
    assert (after_a_loss.snapshot, after_a_loss.decoded) == (first, ("dp2",))


def test_what_is_kept_without_parity_frees_it_and_is_encoded_no_further(job: Run) -> None:
    first = job.protect(1)
    second = job.protect(2)
    take(job, 3, [first, second], [second], encode=False)
    assert with_parity(job) == {second}
    assert {snapshot for t in job for snapshot, _ in t.client.inventory().shards} == {first, second, job.snapshot(3)}


def test_only_as_many_parity_slots_are_reserved_as_are_asked_for() -> None:
    with playground() as ground:
        smps, job = ground.job([[3000], [3000], [3000]], slots=2)
        ranks, protection = [trainer.rank() for trainer in job], job._protect
        layout = arrange(job.job, 2, ranks, protection, 4, 2)
        job.join(2)
        job.configure(layout)
        for smp in smps:
            shards, parities = (len(list(smp.arena.glob(f"*.*.{kind}"))) for kind in ("safetensors", "parity"))
            assert (shards, parities) == (4, 2)


# ---------------------------------------------------------------------- one process


def life(steps: int, arena: Path, **options: Any) -> tuple[int, list[tuple[int | None, int | None]]]:
    """Train for `steps` steps and crash. Return where it began, and the sealed and protected step after each step."""
    model, optim = small()
    seen: list[tuple[int | None, int | None]] = []
    began = -1
    with pytest.raises(Crash):
        with InMemorySnapshot(model, optim, max_repeats=0, arena=arena, **options) as snap:
            began = snap.step
            for _ in range(steps):
                train(snap, model, optim, 1)
                seen.append((snap.sealed_step, snap.protected_step))
            half_a_step(snap, model)
            raise Crash
    return began, seen


@pytest.mark.proves("sealed-comes-back")
@pytest.mark.parametrize("slots", [2, 3, 4])
def test_a_job_seals_every_step_protects_one_of_three_and_goes_on_from_the_newest(arena: Path, slots: int) -> None:
    began, seen = life(7, arena, slots=slots, protect_every=3)
    assert began == 0
    assert [protected for _, protected in seen] == [None, 1, 1, 1, 4, 4, 4]
    # With two slots the next snapshot, which has already begun, takes the slot of the one that is only sealed.
    assert [sealed for sealed, _ in seen][1:] == ([1, 1, 1, 4, 4, 4] if slots == 2 else [1, 2, 3, 4, 5, 6])
    assert life(1, arena, slots=slots, protect_every=3)[0] == 7
    assert len(list((arena / "test").glob("*.safetensors"))) == slots


def test_with_auto_the_next_is_protected_when_none_is_being_encoded(arena: Path) -> None:
    _, seen = life(5, arena, slots=4, protect_every="auto")
    assert [protected for _, protected in seen] == [None, 1, 2, 3, 4]


def test_both_are_told(arena: Path) -> None:
    life(4, arena, protect_every=9)
    [(_, overview)] = gather(arena)
    told = overview.to_json()
    assert told["after_a_crash"]["step"] == 4 and told["after_a_crash"]["age_s"] >= 0
    assert told["after_a_loss"] is None, "there is no other node"


# ---------------------------------------------------------------------- what it costs


def test_the_longer_the_way_back_of_a_lost_node_the_more_often_a_snapshot_is_taken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(MTBF.variable, "10000s")
    wanted = []
    for every in (1, 8):
        intervals = IntervalController("auto", None, every, None, step=None, notes={})
        now_s, overlapped = 0.0, False
        for step in range(10**6, 10**6 + 50):
            intervals.observe(step, now_s := now_s + (1.5 if overlapped else 1.0), 0.0, overlapped)
            overlapped = intervals.rule.is_due(step, True)
            if overlapped:
                intervals.begun(step, True)
        wanted.append(intervals.wanted())
    assert wanted[0] == pytest.approx(math.sqrt(2 * 0.5 * 10_000), abs=1)
    assert wanted[1] == pytest.approx(wanted[0] / math.sqrt(1 + 0.13 * 7), abs=1)


# ---------------------------------------------------------------------- few slots, played

QUICK = {"interval_s": 10.0, "commit_s": 1.0, "encode_s": 3.0, "code": 1 / 7}
SLOW = {"interval_s": 10.0, "commit_s": 1.0, "encode_s": 45.0, "code": 1 / 7}


@pytest.mark.parametrize("every", [1, 4, "auto"])
def test_two_slots_take_less_than_2_3_times_the_state(every: ProtectEvery) -> None:
    assert play(2, every, **QUICK).memory == pytest.approx(2 + 2 / 7) and 2 + 2 / 7 < 2.3


@pytest.mark.parametrize("every", [2, 4, 8, "auto"])
def test_with_four_slots_nothing_is_skipped_however_long_encoding_takes(every: ProtectEvery) -> None:
    played = play(4, every, **SLOW)
    assert played.skipped == 0 and played.crash_s == pytest.approx(10 / 2 + 1, abs=0.5)
    assert played.protected == pytest.approx(max(5, every if every != "auto" else 0), rel=0.05)


def test_fewer_slots_skip_more_and_to_protect_each_skips_most() -> None:
    played = ((slots, every) for slots in (2, 3, 4) for every in (1, 8))
    skipped = {(slots, every): play(slots, every, **SLOW).skipped for slots, every in played}
    assert skipped[2, 1] > skipped[2, 8] > skipped[4, 8] == 0
    assert skipped[3, 1] > skipped[3, 8]


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("encode_s", [0.5, 3.0, 8.0, 12.0, 18.0, 24.0])
def test_as_many_slots_as_a_plan_asks_for_skip_none(every: int, encode_s: float) -> None:
    """The planner's formula against the decisions that trainers make, where encoding keeps up."""
    if every * 10.0 < encode_s:
        return
    job = {"interval_s": 10.0, "commit_s": 1.0, "encode_s": encode_s, "code": 1 / 7}
    needed = slots_needed(10.0, 1.0, encode_s, encode_every=every)
    played = play(needed, every, **job)
    assert played.skipped == 0
    assert played.crash_s == pytest.approx(10.0 / 2 + 1.0, abs=0.5)
    assert played.loss_s == pytest.approx(every * 10.0 / 2 + 1.0 + encode_s, rel=0.1)


def test_parity_slots_are_those_that_trainers_ask_for() -> None:
    for slots in (2, 3, 4):
        for every in (1, 2, 8, "auto"):
            options = Options(job="j", slots=slots, protect_every=every, elastic=False)
            assert (options.parity_slots or slots) == parity_slots(slots, every)


def test_the_fleet_sends_less_where_fewer_snapshots_are_protected() -> None:
    job, site = FleetJob(1024, 8, 6.0, 4.87e12), Site()
    each, some, auto = (
        InMemoryCode(7, 1, slots=4, persist_s=math.inf, protect_every=every).design(job, site, 1e5)
        for every in (1, 8, "auto")
    )
    [both] = each.saves
    sealed, protected = some.saves
    assert (sealed.protected_s, protected.sealed_s) == (math.inf, math.inf)
    assert protected.every == 8 * sealed.every and sealed.every <= both.every
    assert auto.saves[1].every < protected.every
    assert some.memory_bytes == pytest.approx(job.node_bytes * (4 + 3 / 7))


# ---------------------------------------------------------------------- parity of what was restored


class Ordered:
    """A store, with a board, whose parity repairs the test ends and counts. Pauses between attempts last no time."""

    def __init__(self, board: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.outcomes: list[Exception | None] = []
        self.held: set[ParityKey] = set()
        self.given_up = False
        self.began = 0
        self.go = threading.Event()
        store: Any = SimpleNamespace(
            network=MACHINE,
            state=SimpleNamespace(epoch=1, protected=None),
            changed=threading.Condition(threading.RLock()),
            holdings=SimpleNamespace(holds=lambda key: key in self.held),
            outcomes=SimpleNamespace(board=Board(board, create=True), is_given_up=lambda snapshot: self.given_up),
        )
        self.store = store
        store.outcomes.board.reset(1)
        self.reconciler = Reconciler(store, "chain")
        self.sources: Any = SimpleNamespace(snapshot=SnapshotId(1, 5), layout=SimpleNamespace(tag=lambda group: "tag"))
        monkeypatch.setattr(reconciler, "repair_parity", self.work)
        monkeypatch.setattr(reconciler, "FIRST_S", 0.0)

    def work(self, store: Any, sources: Any, key: ParityKey, go_on: Any) -> int:
        self.began += 1
        assert self.go.wait(DEADLINE_S)
        outcome = self.outcomes.pop(0)
        if outcome is not None:
            raise outcome
        self.held.add(key)
        return 7

    def order(self, position: int = 2) -> RepairState:
        self.reconciler.order_parity(self.sources, 0, position)
        return self.state()

    def state(self) -> RepairState:
        return self.store.outcomes.board.repair(self.store.state.epoch)  # type: ignore[no-any-return]

    def finish(self) -> RepairState:
        """Let the repairs that are running end."""
        self.go.set()
        for thread in threading.enumerate():
            if thread.name == "reconcile":
                thread.join(DEADLINE_S)
                assert not thread.is_alive()
        return self.state()

    def levels(self, caplog: pytest.LogCaptureFixture) -> set[str]:
        """Have a repair end that comes to nothing, and return the levels at which that is logged."""
        with caplog.at_level("INFO"):
            self.order()
            assert self.finish() is RepairState.HOPELESS
        return {record.levelname for record in caplog.records if "does not hold" in record.getMessage()}


@pytest.fixture
def ordered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ordered]:
    made = Ordered(tmp_path / "board", monkeypatch)
    yield made
    made.reconciler.close()
    made.finish()


def test_whoever_orders_again_starts_no_second_repair_and_the_board_says_when_it_is_whole(ordered: Ordered) -> None:
    assert ordered.state() is RepairState.UNDER_WAY
    ordered.outcomes = [None]
    assert [ordered.order(), ordered.order()] == [RepairState.UNDER_WAY] * 2
    assert ordered.finish() is RepairState.WHOLE and ordered.began == 1
    assert ordered.order() is RepairState.WHOLE and ordered.began == 1


def test_the_board_says_how_far_the_repair_is_that_is_the_least_far(ordered: Ordered) -> None:
    ordered.held.add(ParityKey(SnapshotId(1, 5), "tag", 1))
    ordered.order(1)
    assert ordered.finish() is RepairState.WHOLE
    ordered.go.clear()
    ordered.outcomes = [None]
    assert ordered.order(2) is RepairState.UNDER_WAY
    assert ordered.finish() is RepairState.WHOLE


def test_a_repair_that_misses_somebody_is_tried_for_ever_and_one_that_lacks_bytes_is_given_up(ordered: Ordered) -> None:
    ordered.outcomes = [SmpUnavailable("away") for _ in range(5)] + [Unrecoverable("too little") for _ in range(3)]
    ordered.order()
    assert ordered.finish() is RepairState.HOPELESS and ordered.began == 8


@pytest.mark.parametrize(("protected", "warns"), [(SnapshotId(1, 5), True), (SnapshotId(1, 4), False), (None, True)])
def test_a_repair_in_vain_is_a_warning_where_the_snapshot_was_promised(
    ordered: Ordered, protected: SnapshotId | None, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    ordered.store.state.protected = protected
    ordered.outcomes = [Unrecoverable("too little") for _ in range(3)]
    assert ordered.levels(caplog) == {"WARNING" if warns else "INFO"}


@pytest.mark.parametrize(
    ("step", "outcome", "warns"),
    [(6, SnapshotOutcome.PROTECTED, False), (6, SnapshotOutcome.PENDING, True), (4, SnapshotOutcome.PROTECTED, True)],
)
def test_a_repair_in_vain_is_no_warning_once_a_newer_snapshot_is_protected_here(
    ordered: Ordered, step: int, outcome: SnapshotOutcome, warns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """Others hear before this node that the whole job knows it, and give the older one's slots to the next."""
    ordered.store.state.protected = SnapshotId(1, 5)
    ordered.store.outcomes.board.post(step, outcome)
    ordered.outcomes = [Unrecoverable("the others have let go of it") for _ in range(3)]
    assert ordered.levels(caplog) == {"WARNING" if warns else "INFO"}


def test_a_new_epoch_begins_anew_what_was_under_way_in_the_one_before(ordered: Ordered) -> None:
    ordered.outcomes = [SmpUnavailable("its slot was taken away"), None]
    ordered.order()
    ordered.store.state.epoch = 2
    ordered.store.outcomes.board.reset(2)
    assert ordered.finish() is RepairState.UNDER_WAY and ordered.began == 1
    ordered.go.clear()
    assert ordered.order() is RepairState.UNDER_WAY
    assert ordered.finish() is RepairState.WHOLE and ordered.began == 2


@pytest.mark.parametrize("end", ["given up", "closed"])
def test_what_nobody_wants_any_more_is_not_tried_again(ordered: Ordered, end: str) -> None:
    ordered.outcomes = [SmpUnavailable("away")]
    ordered.order()
    if end == "closed":
        ordered.reconciler.close()
    else:
        ordered.given_up = True
    assert ordered.finish() is RepairState.UNDER_WAY and ordered.began == 1


@pytest.mark.parametrize("every", [1, 2, "auto"])
def test_it_is_said_once_that_nothing_is_protected_and_once_that_it_is(
    every: ProtectEvery, caplog: pytest.LogCaptureFixture
) -> None:
    delays = Delays(Episodes(get_log("holdfast.snapshot.test")), every)
    first, second = SnapshotId(1, 4), SnapshotId(1, 5)

    def settled(protected: SnapshotId | None = None, unprotected: Collection[SnapshotId] = ()) -> list[str]:
        caplog.clear()
        ledger = Ledger(4, protected, protect_every=every)
        delays.note_settled(ledger, protected=protected is not None, unprotected=unprotected)
        return [record.getMessage() for record in caplog.records]

    with caplog.at_level("INFO"):
        assert settled() == []
        [said] = settled(unprotected={first})
        assert "step 4" in said and "protected" in said
        assert settled(unprotected={second}) == []
        [said] = settled(second)
        assert said.startswith("snapshots are protected again")
        assert settled(second) == []


def test_it_is_said_once_that_encoding_does_not_keep_up_and_once_that_it_does(caplog: pytest.LogCaptureFixture) -> None:
    delays = Delays(Episodes(get_log("holdfast.snapshot.test")), 2)

    def due(until: int, encoded: tuple[SnapshotId, ...]) -> list[str]:
        caplog.clear()
        delays.note_due(Ledger(4, protect_every=2, until=until, encoded=encoded, pending=encoded))
        return [record.getMessage() for record in caplog.records]

    under_way = (SnapshotId(1, 1),)
    with caplog.at_level("INFO"):
        assert due(1, under_way) == []
        [said] = due(0, under_way)
        assert "fewer than one" in said
        assert due(0, under_way) == [] == due(0, ())
        [said] = due(0, ())
        assert said.endswith("again")
