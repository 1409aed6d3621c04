"""Which snapshots hold slots: never more than there are, never a step back, never a slot held for ever."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.step.ledger import Ledger

thorough = settings(deadline=None, derandomize=True, max_examples=300)

slot_counts = st.integers(3, 6)
outcomes = st.lists(st.sampled_from(SnapshotOutcome), min_size=8, max_size=8)
runs = st.lists(outcomes, max_size=25)


def at(step: int) -> SnapshotId:
    return SnapshotId(1, step)


def boundaries(slots: int, run: list[list[SnapshotOutcome]]) -> list[Ledger]:
    """The ledger before and after each settling of a run that takes a snapshot whenever it may."""
    ledger = Ledger(slots)
    seen = [ledger]
    for step, results in enumerate(run):
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
            seen.append(ledger)
        ledger = ledger.settle(results[: len(ledger.pending)])
        seen.append(ledger)
    return seen


@thorough
@given(slot_counts, runs)
def test_no_more_snapshots_are_kept_than_there_are_slots(slots: int, run: list[list[SnapshotOutcome]]) -> None:
    for ledger in boundaries(slots, run):
        assert len(ledger.keep) <= slots
        assert ledger.may_begin == (len(ledger.keep) < slots)


@thorough
@given(slot_counts, runs)
def test_the_protected_snapshot_never_goes_back_and_is_always_kept(
    slots: int, run: list[list[SnapshotOutcome]]
) -> None:
    newest: SnapshotId | None = None
    for ledger in boundaries(slots, run):
        assert newest is None or (ledger.protected is not None and ledger.protected >= newest)
        newest = ledger.protected
        assert newest is None or newest in ledger.keep


@thorough
@given(slot_counts, runs)
def test_what_is_kept_is_in_order_and_each_but_once(slots: int, run: list[list[SnapshotOutcome]]) -> None:
    for ledger in boundaries(slots, run):
        assert list(ledger.keep) == sorted(set(ledger.keep))
        assert set(ledger.pending) <= set(ledger.keep)


@thorough
@given(slot_counts, runs)
def test_each_outcome_settles_its_own_snapshot(slots: int, run: list[list[SnapshotOutcome]]) -> None:
    ledger = Ledger(slots)
    for step, results in enumerate(run):
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
        said = dict(zip(ledger.pending, results, strict=False))
        settled = ledger.settle(results[: len(said)])
        done = [snapshot for snapshot, outcome in said.items() if outcome is SnapshotOutcome.PROTECTED]
        assert settled.protected == (max(done) if done else ledger.protected)
        waiting = [
            s for s, outcome in said.items() if outcome is SnapshotOutcome.PENDING and s > max(done, default=at(-1))
        ]
        assert list(settled.pending) == waiting
        ledger = settled


@thorough
@given(slot_counts, runs)
def test_after_any_run_failures_alone_make_room_again(slots: int, run: list[list[SnapshotOutcome]]) -> None:
    ledger = boundaries(slots, run)[-1]
    for step in range(1000, 1010):
        ledger = ledger.settle([SnapshotOutcome.FAILED] * len(ledger.pending))
        assert ledger.pending == ()
        assert ledger.may_begin
        ledger = ledger.begin(at(step))


def test_a_failed_snapshot_frees_its_slot_at_once() -> None:
    full = Ledger(3, protected=at(1)).begin(at(2)).begin(at(3))
    assert not full.may_begin
    assert full.settle([SnapshotOutcome.FAILED, SnapshotOutcome.FAILED]) == Ledger(3, protected=at(1))


def test_an_older_failure_does_not_hold_up_a_younger_snapshot() -> None:
    ledger = Ledger(3, protected=at(1)).begin(at(2)).begin(at(3))
    assert ledger.settle([SnapshotOutcome.FAILED, SnapshotOutcome.PROTECTED]) == Ledger(3, protected=at(3))
    assert ledger.settle([SnapshotOutcome.FAILED, SnapshotOutcome.PENDING]) == Ledger(
        3, protected=at(1), pending=(at(3),)
    )


def test_a_newly_protected_snapshot_replaces_older_pending_ones_and_no_younger() -> None:
    ledger = Ledger(4, protected=at(1)).begin(at(2)).begin(at(3)).begin(at(4))
    settled = ledger.settle([SnapshotOutcome.PENDING, SnapshotOutcome.PROTECTED, SnapshotOutcome.PENDING])
    assert settled == Ledger(4, protected=at(3), pending=(at(4),))


def test_while_all_are_pending_nothing_changes() -> None:
    ledger = Ledger(3).begin(at(1)).begin(at(2))
    assert ledger.settle([SnapshotOutcome.PENDING] * 2) == ledger


@pytest.mark.parametrize("step", [0, 4, 5])
def test_a_snapshot_that_is_not_the_newest_cannot_begin(step: int) -> None:
    with pytest.raises(ValueError, match="cannot begin"):
        Ledger(3, protected=at(5)).begin(at(step))
    with pytest.raises(ValueError, match="cannot begin"):
        Ledger(3).begin(at(5)).begin(at(step))


def test_no_snapshot_begins_without_a_free_slot() -> None:
    with pytest.raises(ValueError, match="held in 3 slots"):
        Ledger(3, protected=at(1)).begin(at(2)).begin(at(3)).begin(at(4))


@thorough
@given(slot_counts, runs)
def test_what_was_protected_before_a_restart_is_kept_until_something_younger_is(
    slots: int, run: list[list[SnapshotOutcome]]
) -> None:
    """What was restored may lack parity: then only the older one survives a lost node."""
    ledger = Ledger.restored(slots, at(9), at(8), known=False)
    for step, results in enumerate(run, 10):
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
        ledger = ledger.settle(results[: len(ledger.pending)])
        assert ledger.known or {at(8), at(9)} <= set(ledger.keep)
        assert ledger.sure == (ledger.protected if ledger.known else at(8))


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_fewer_slots_than_a_restart_may_need_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots cannot keep"):
        Ledger(slots)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_outcome_for_each_pending_snapshot(count: int) -> None:
    ledger = Ledger(3).begin(at(1)).begin(at(2))
    with pytest.raises(ValueError, match=f"{count} outcomes for 2 pending"):
        ledger.settle([SnapshotOutcome.FAILED] * count)


def test_a_younger_epoch_begins_after_any_step_of_an_older_one() -> None:
    ledger = Ledger(3, protected=SnapshotId(1, 900)).begin(SnapshotId(2, 1))
    assert ledger.keep == (SnapshotId(1, 900), SnapshotId(2, 1))


def test_what_was_restored_without_all_of_its_parity_is_not_reported_as_protected() -> None:
    ledger = Ledger(3, protected=at(5), known=False)
    assert ledger.sure is None and ledger.keep == (at(5),)
    assert ledger.begin(at(6)).settle([SnapshotOutcome.FAILED]).sure is None
    assert ledger.begin(at(6)).settle([SnapshotOutcome.PROTECTED]).sure == at(6)
    assert Ledger(3, protected=at(5), older=at(4), known=False).sure == at(4)
