"""Which snapshots hold slots: never more than there are, never a step back, never a slot held for ever."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.options import Options
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery, SnapshotState

FAILED, PENDING, SEALED, ENCODING, PROTECTED = SnapshotState


slot_counts = st.integers(2, 6)
every = st.sampled_from([1, 1, 2, 3, "auto"])
states = st.lists(st.sampled_from(SnapshotState), min_size=8, max_size=8)
runs = st.lists(states, max_size=25)
Run = list[list[SnapshotState]]


def at(step: int) -> SnapshotId:
    return SnapshotId(1, step)


def settled(ledger: Ledger, results: list[SnapshotState]) -> Ledger:
    """Settle as ranks report: unencoded snapshots are at most sealed, and those known to be sealed stay so."""
    told = []
    for snapshot, state in zip(ledger.pending, results, strict=False):
        known = SEALED if ledger.sealed is not None and snapshot <= ledger.sealed else FAILED
        told.append(max(known, state) if snapshot in ledger.encoded else min(state, SEALED))
    return ledger.settle(told)


def steps(ledger: Ledger, run: Run, first: int = 0) -> Iterator[tuple[Ledger, Ledger]]:
    """The ledger before and after each change of a run that takes a snapshot whenever it can."""
    for step, results in enumerate(run, first):
        if ledger.may_begin:
            begun = ledger.begin(at(step))
            yield ledger, begun
            ledger = begun
        after = settled(ledger, results)
        yield ledger, after
        ledger = after


@given(slot_counts, every, runs)
def test_no_more_snapshots_are_kept_than_there_are_slots(slots: int, protect_every: ProtectEvery, run: Run) -> None:
    for _, ledger in steps(Ledger(slots, protect_every=protect_every), run):
        assert len(ledger.keep) <= slots
        assert ledger.may_begin == (len(ledger.keep) < slots)


@given(slot_counts, every, runs)
def test_the_protected_snapshot_never_goes_back_and_is_always_kept(
    slots: int, protect_every: ProtectEvery, run: Run
) -> None:
    for before, ledger in steps(Ledger(slots, protect_every=protect_every), run):
        assert before.protected is None or (ledger.protected is not None and ledger.protected >= before.protected)
        assert ledger.protected is None or ledger.protected in ledger.keep


@given(st.integers(3, 6), every, runs)
def test_with_three_slots_the_newest_sealed_snapshot_is_kept_until_a_younger_is_sealed_or_protected(
    slots: int, protect_every: ProtectEvery, run: Run
) -> None:
    for before, ledger in steps(Ledger(slots, protect_every=protect_every), run):
        newest = before.sealed or before.protected
        kept = ledger.sealed or ledger.protected
        assert newest is None or (kept is not None and kept >= newest and kept in ledger.keep)


@given(every, runs)
def test_with_two_slots_what_is_only_sealed_gives_its_slot_to_the_next(protect_every: ProtectEvery, run: Run) -> None:
    for before, ledger in steps(Ledger(2, protect_every=protect_every), run):
        if before.sealed is not None and ledger.sealed is None:
            begins = len(ledger.pending) > len(before.pending)
            assert begins or ledger.protected == before.sealed or (ledger.protected or at(0)) > before.sealed
        if before.sealed in before.pending:
            assert not before.may_begin or before.protected is None, "what is being encoded is never given up"


@given(slot_counts, st.integers(1, 3), every, runs, st.booleans(), st.booleans())
def test_there_is_a_parity_slot_for_each_snapshot_that_has_parity(
    slots: int, generations: int, protect_every: ProtectEvery, run: Run, restored: bool, known: bool
) -> None:
    options = Options(job="j", slots=slots, generations=generations, protect_every=protect_every, elastic=False)
    total = options.slots_with_generations
    parities = options.parity_slots or total
    ledger = Ledger.after(
        total,
        at(9) if restored else None,
        at(9 if known else 8) if restored else None,
        protect_every=protect_every,
        generations=generations,
        earlier=[at(step) for step in range(8)] if restored else [],
    )
    for _, after in steps(ledger, run, 10):
        ledger = after
        assert set(ledger.with_parity) <= set(ledger.keep)
        assert len(ledger.with_parity) <= parities
        assert set(ledger.encoded) <= set(ledger.with_parity)


@given(slot_counts, every, runs)
def test_what_is_kept_is_in_order_and_each_but_once(slots: int, protect_every: ProtectEvery, run: Run) -> None:
    for _, ledger in steps(Ledger(slots, protect_every=protect_every), run):
        assert list(ledger.keep) == sorted(set(ledger.keep))
        assert set(ledger.pending) <= set(ledger.keep)


@given(slot_counts, runs)
def test_each_state_settles_its_own_snapshot(slots: int, run: Run) -> None:
    ledger = Ledger(slots)
    for step, results in enumerate(run):
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
        said = dict(zip(ledger.pending, results, strict=False))
        after = ledger.settle(results[: len(said)])
        done = [snapshot for snapshot, state in said.items() if state is PROTECTED]
        assert after.protected == (max(done) if done else ledger.protected)
        newest = max(done, default=at(-1))
        assert list(after.pending) == [s for s, state in said.items() if state in (PENDING, ENCODING) and s > newest]
        ledger = after


@given(slot_counts, every, runs, st.sampled_from(RepairState))
def test_after_any_run_failures_alone_make_room_again(
    slots: int, protect_every: ProtectEvery, run: Run, repair: RepairState
) -> None:
    for began in (Ledger(slots), Ledger.after(slots, at(9), at(8))):
        ledger = replace(began, protect_every=protect_every)
        for _, after in steps(ledger, run, 10):
            ledger = after
        waits = slots == 2 and ledger.restored is not None and ledger.protected is not None
        for step in range(1000, 1010):
            ledger = ledger.settle([FAILED] * len(ledger.pending))
            assert ledger.pending == ()
            assert ledger.may_begin != waits
            if waits and repair is RepairState.UNDER_WAY:
                break
            if waits:
                ledger, waits = ledger.repaired(repair), False
                assert ledger.may_begin
            ledger = ledger.begin(at(step))


def test_what_is_sealed_and_could_not_be_encoded_is_still_what_a_crash_goes_back_to() -> None:
    ledger = Ledger(3, protected=at(1)).begin(at(2)).settle([SEALED])
    assert (ledger.sealed, ledger.pending, ledger.keep) == (at(2), (), (at(1), at(2)))
    encoding = ledger.begin(at(3)).settle([ENCODING])
    assert (encoding.sealed, encoding.keep) == (at(3), (at(1), at(3)))
    assert encoding.settle([FAILED]).sealed == at(3)


def test_while_all_are_pending_nothing_changes() -> None:
    ledger = Ledger(3).begin(at(1)).begin(at(2))
    assert ledger.settle([PENDING] * 2) == ledger


@pytest.mark.parametrize("step", [0, 4, 5])
def test_a_snapshot_that_is_not_the_newest_cannot_begin(step: int) -> None:
    with pytest.raises(ValueError, match="cannot begin"):
        Ledger(3, protected=at(5)).begin(at(step))
    with pytest.raises(ValueError, match="cannot begin"):
        Ledger(3).begin(at(5)).begin(at(step))


def test_no_snapshot_begins_without_a_free_slot() -> None:
    with pytest.raises(ValueError, match="held in 3 slots"):
        Ledger(3, protected=at(1)).begin(at(2)).begin(at(3)).begin(at(4))


# ---------------------------------------------------------------------- which snapshots are protected


def taken(protect_every: ProtectEvery, count: int, encodes: int, slots: int = 4) -> str:
    """One letter for each of `count` steps: P for a snapshot to protect, s for one that is only sealed, - for none.
    Encoding one takes `encodes` steps."""
    ledger, line = Ledger(slots, protect_every=protect_every), ""
    began: dict[SnapshotId, int] = {}
    for step in range(1, count + 1):
        over = {s: PROTECTED if step - began[s] > encodes else ENCODING for s in ledger.encoded}
        ledger = ledger.settle([over.get(snapshot, SEALED) for snapshot in ledger.pending])
        if not ledger.may_begin:
            line += "-"
            continue
        line += "P" if ledger.protects_next else "s"
        began[at(step)] = step
        ledger = ledger.begin(at(step))
    return line


@pytest.mark.parametrize(
    ("protect_every", "encodes", "slots", "line"),
    [
        (1, 0, 3, "PPPPPPPP"),
        (2, 0, 3, "PsPsPsPs"),
        (4, 0, 2, "PsssPsss"),
        (4, 2, 4, "PsssPsss"),
        (4, 2, 3, "PsssPs-s"),
        (4, 2, 2, "Ps-ssP--"),
        (1, 2, 2, "PP--P--P"),
        ("auto", 2, 4, "PssPssPs"),
        (2, 4, 4, "PssssPss"),
    ],
)
def test_one_of_so_many_snapshots_is_protected(
    protect_every: ProtectEvery, encodes: int, slots: int, line: str
) -> None:
    assert taken(protect_every, 8, encodes, slots) == line


def test_if_one_fails_the_next_is_to_be_protected() -> None:
    ledger = Ledger(3, protect_every=3).begin(at(1))
    for state in (FAILED, SEALED):
        assert ledger.settle([state]).protects_next
    assert not ledger.settle([PROTECTED]).protects_next


# ---------------------------------------------------------------------- after a restart


@given(slot_counts, every, runs)
def test_what_was_protected_before_a_restart_is_kept_with_what_was_restored_until_something_younger_is(
    slots: int, protect_every: ProtectEvery, run: Run
) -> None:
    """The restored one may lack parity, and then only the older one survives a lost node. Or it was reported protected,
    to processes that are gone."""
    ledger = Ledger.after(slots, at(9), at(8), protect_every=protect_every)
    for _, after in steps(ledger, run, 10):
        ledger = after
        assert ledger.restored is None or {at(8), at(9)} <= set(ledger.keep) & set(ledger.with_parity)
        assert (ledger.protected or at(0)) >= (at(8) if ledger.restored else at(10))


def test_what_was_restored_and_has_all_of_its_parity_again_takes_the_place_of_the_older() -> None:
    ledger = Ledger.after(2, at(9), at(8))
    assert not ledger.may_begin
    assert ledger.repaired(RepairState.UNDER_WAY) == ledger
    assert ledger.repaired(RepairState.WHOLE) == Ledger(2, protected=at(9))
    assert ledger.repaired(RepairState.HOPELESS) == Ledger(2, protected=at(8), sealed=at(9))
    three = Ledger.after(4, at(9), at(8), generations=2)
    assert three.repaired(RepairState.WHOLE) == Ledger(4, protected=at(9), earlier=(at(8),), generations=2)


def test_what_nobody_was_told_to_be_protected_is_only_sealed() -> None:
    assert Ledger.after(3, at(9), at(8), only_sealed=True) == Ledger(3, protected=at(8), sealed=at(9))
    assert Ledger.after(3, at(9), at(9), only_sealed=True) == Ledger(3, protected=at(9))


@pytest.mark.parametrize("slots", [0, 1])
def test_fewer_slots_than_a_restart_may_need_are_refused(slots: int) -> None:
    with pytest.raises(ValueError, match=f"{slots} slots cannot hold"):
        Ledger(slots)


@pytest.mark.parametrize("count", [0, 1, 3])
def test_there_is_one_state_for_each_pending_snapshot(count: int) -> None:
    ledger = Ledger(3).begin(at(1)).begin(at(2))
    with pytest.raises(ValueError, match=f"{count} states for 2 pending"):
        ledger.settle([FAILED] * count)


def test_a_younger_epoch_begins_after_any_step_of_an_older_one() -> None:
    ledger = Ledger(3, protected=SnapshotId(1, 900)).begin(SnapshotId(2, 1))
    assert ledger.keep == (SnapshotId(1, 900), SnapshotId(2, 1))


def test_what_was_restored_without_all_of_its_parity_is_not_reported_as_protected() -> None:
    ledger = Ledger.after(3, at(5), None)
    assert ledger.protected is None and ledger.keep == (at(5),)
    assert ledger.begin(at(6)).settle([FAILED]).protected is None
    assert ledger.begin(at(6)).settle([PROTECTED]).protected == at(6)


def test_what_was_restored_is_the_newest_until_a_younger_one_is_sealed() -> None:
    assert Ledger.after(3, None, None).newest is None
    assert Ledger.after(3, at(8), at(8)).newest == at(8)
    restored = Ledger.after(3, at(10), at(8))
    assert restored.newest == at(10)
    assert restored.repaired(RepairState.WHOLE).newest == at(10)
    assert restored.begin(at(12)).settle([PENDING]).newest == at(10)
    assert restored.begin(at(12)).settle([SEALED]).newest == at(12)
