"""The board, seen through a second mapping as a trainer sees it."""

from __future__ import annotations

import gc
import os
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.board import (
    MAX_PAUSE_S,
    PAUSE_WORDS,
    REFUSED,
    WORDS,
    Board,
    RepairState,
    SnapshotOutcome,
)
from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable

REMEMBERED = WORDS - 1


class Pair:
    """The SMP's mapping of the board, and a trainer's."""

    def __init__(self, path: Path) -> None:
        self.smp = Board(path, create=True)
        self.trainer = Board(path)
        self.smp.reset(1)


@pytest.fixture
def boards(tmp_path: Path) -> Pair:
    return Pair(tmp_path / "board")


def test_outcomes_are_ordered_so_that_the_worst_is_the_minimum() -> None:
    assert sorted(SnapshotOutcome, reverse=True) == [
        SnapshotOutcome.PROTECTED,
        SnapshotOutcome.PENDING,
        SnapshotOutcome.FAILED,
    ]
    assert min(SnapshotOutcome.PROTECTED, SnapshotOutcome.PENDING, SnapshotOutcome.FAILED) is SnapshotOutcome.FAILED


@pytest.mark.parametrize("outcome", list(SnapshotOutcome))
@pytest.mark.parametrize("step", [0, 1, 2, 3, 4, 2**59])
def test_a_post_is_seen_through_another_mapping(boards: Pair, step: int, outcome: SnapshotOutcome) -> None:
    boards.smp.post(step, outcome)
    assert boards.trainer.outcome(1, step) is outcome


def test_a_trainer_sees_which_epoch_the_board_is_of(boards: Pair) -> None:
    assert (boards.smp.epoch, boards.trainer.epoch) == (1, 1)
    boards.smp.reset(2**40)
    assert boards.trainer.epoch == 2**40


def test_a_snapshot_of_an_older_epoch_has_failed(boards: Pair) -> None:
    boards.smp.reset(3)
    boards.smp.post(5, SnapshotOutcome.PROTECTED)
    assert boards.trainer.outcome(2, 5) is SnapshotOutcome.FAILED
    assert boards.trainer.outcome(1, 99) is SnapshotOutcome.FAILED


def test_a_snapshot_of_a_newer_epoch_than_the_board_is_pending(boards: Pair) -> None:
    boards.smp.post(5, SnapshotOutcome.FAILED)
    assert boards.trainer.outcome(2, 5) is SnapshotOutcome.PENDING


def test_a_new_epoch_forgets_all_outcomes(boards: Pair) -> None:
    for step in range(2 * WORDS):
        boards.smp.post(step, SnapshotOutcome.FAILED)
    boards.smp.reset(2)
    assert {boards.trainer.outcome(2, step) for step in range(2 * WORDS)} == {SnapshotOutcome.PENDING}


@given(st.lists(st.tuples(st.integers(0, 40), st.sampled_from(SnapshotOutcome)), max_size=4 * WORDS))
def test_the_board_remembers_the_last_steps_and_never_says_anything_wrong(
    posts: list[tuple[int, SnapshotOutcome]],
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        boards = Pair(Path(directory) / "board")
    said: dict[int, SnapshotOutcome] = {}
    remembered: list[int] = []
    for step, outcome in posts:
        boards.smp.post(step, outcome)
        said[step] = outcome
        if step not in remembered:
            remembered = [*remembered, step][-REMEMBERED:]
        assert {s: boards.trainer.outcome(1, s) for s in remembered} == {s: said[s] for s in remembered}
    for step in {*range(42)} - set(remembered):
        assert boards.trainer.outcome(1, step) is SnapshotOutcome.PENDING


@pytest.mark.parametrize("epoch", range(1, 9))
def test_a_successor_fails_what_its_predecessor_left_pending_and_nothing_else(boards: Pair, epoch: int) -> None:
    boards.smp.reset(epoch)
    posted = {
        0: SnapshotOutcome.PENDING,
        1: SnapshotOutcome.FAILED,
        2: SnapshotOutcome.PROTECTED,
        7: SnapshotOutcome.PENDING,
        8: SnapshotOutcome.PROTECTED,
    }
    for step, outcome in posted.items():
        boards.smp.post(step, outcome)
    boards.smp.fail_pending()
    assert {step: boards.trainer.outcome(epoch, step) for step in posted} == {
        **posted,
        0: SnapshotOutcome.FAILED,
        7: SnapshotOutcome.FAILED,
    }
    assert boards.trainer.outcome(epoch, 99) is SnapshotOutcome.PENDING


NOW_S = 12345.5


def test_a_trainer_pauses_the_traffic_until_then_or_until_it_resumes(boards: Pair) -> None:
    boards.trainer.pause(3, NOW_S + 0.5)
    assert boards.smp.paused_for(NOW_S) == pytest.approx(0.5)
    assert boards.smp.paused_for(NOW_S + 0.25) == pytest.approx(0.25)
    assert boards.smp.paused_for(NOW_S + 0.5) == boards.smp.paused_for(NOW_S + 1e6) == 0
    boards.trainer.resume(3)
    assert boards.smp.paused_for(NOW_S) == 0


def test_the_trainer_that_wants_quiet_longest_counts(boards: Pair) -> None:
    for index in range(PAUSE_WORDS):
        boards.trainer.pause(index, NOW_S + (index * 37 % PAUSE_WORDS) / 100)
    assert boards.smp.paused_for(NOW_S) == pytest.approx((PAUSE_WORDS - 1) / 100)
    for index in range(1, PAUSE_WORDS):
        boards.trainer.resume(index)
    assert boards.smp.paused_for(NOW_S - 0.25) == pytest.approx(0.25)


def test_trainers_are_numbered_modulo_the_words_there_are(boards: Pair) -> None:
    boards.trainer.pause(PAUSE_WORDS + 5, NOW_S + 0.5)
    boards.trainer.resume(4)
    assert boards.smp.paused_for(NOW_S) == pytest.approx(0.5)
    boards.trainer.resume(5)
    assert boards.smp.paused_for(NOW_S) == 0


@pytest.mark.parametrize("until_s", [NOW_S + 1.5, NOW_S + 1e6, 9e9, -9e9])
def test_a_pause_is_never_longer_than_the_longest_whatever_stands_there(boards: Pair, until_s: float) -> None:
    boards.trainer.pause(0, until_s)
    assert boards.smp.paused_for(NOW_S) == (MAX_PAUSE_S if until_s > 0 else 0)


def test_pauses_and_outcomes_do_not_touch_each_other(boards: Pair) -> None:
    for step in range(1, 1 + REMEMBERED):
        boards.smp.post(step, SnapshotOutcome.PENDING)
    for index in range(PAUSE_WORDS):
        boards.trainer.pause(index, NOW_S + 0.5)
    assert boards.trainer.epoch == 1
    assert {boards.trainer.outcome(1, step) for step in range(1, 2 * WORDS)} == {SnapshotOutcome.PENDING}
    boards.smp.fail_pending()
    boards.smp.reset(2)
    assert boards.smp.paused_for(NOW_S) == pytest.approx(0.5)


def open_files() -> int:
    gc.collect()  # or what earlier tests have left might be closed while one counts
    return len(list(Path("/proc/self/fd").iterdir()))


def test_an_open_board_costs_the_one_file_that_its_mapping_keeps(boards: Pair, tmp_path: Path) -> None:
    before = open_files()
    kept = [Board(tmp_path / "board", create=create) for create in (True, False)]
    assert open_files() - before == len(kept)


@pytest.mark.parametrize("damage", ["cut", "nothing", "a directory", "a link to nothing", "a pipe"])
def test_what_is_no_board_is_refused_by_a_trainer_with_what_to_do(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "board"
    if damage == "a directory":
        path.mkdir()
    elif damage == "a link to nothing":
        path.symlink_to("/nonexistent")
    elif damage == "a pipe":
        os.mkfifo(path)
    elif damage == "cut":
        path.write_bytes(b"x" * 100)
    with pytest.raises(SmpUnavailable if damage == "nothing" else ProtocolError, match=r"board.*smp stop"):
        Board(path)


def test_a_successor_heeds_no_request_for_quiet_of_before(tmp_path: Path) -> None:
    boards = Pair(tmp_path / "board")
    boards.trainer._pauses[:] = 1 << 62  # of nobody that is left to withdraw it
    assert boards.smp.paused_for(1.0) > 0
    assert Board(tmp_path / "board", create=True).paused_for(1.0) == 0


def test_a_successor_does_not_push_out_what_was_said_last(tmp_path: Path) -> None:
    boards = Pair(tmp_path / "board")
    boards.smp.post(1, SnapshotOutcome.PROTECTED)
    successor = Board(tmp_path / "board", create=True)
    for step in range(2, 1 + REMEMBERED):
        successor.post(step, SnapshotOutcome.PENDING)
    assert boards.trainer.outcome(1, 1) is SnapshotOutcome.PROTECTED
    successor.post(1 + REMEMBERED, SnapshotOutcome.PENDING)
    assert boards.trainer.outcome(1, 1) is SnapshotOutcome.PENDING


def test_only_a_newer_snapshot_that_is_protected_supersedes_another(boards: Pair) -> None:
    boards.smp.post(5, SnapshotOutcome.PROTECTED)
    boards.smp.post(6, SnapshotOutcome.PENDING)
    boards.smp.post(7, SnapshotOutcome.FAILED)
    assert [step for step in range(8) if boards.trainer.supersedes(1, step)] == [0, 1, 2, 3, 4]
    assert boards.trainer.supersedes(0, 9) and not boards.trainer.supersedes(2, 1)


def test_what_is_due_to_be_persisted_is_no_business_of_outcomes_and_pauses(boards: Pair) -> None:
    assert not boards.trainer.due
    boards.smp.post_due(True)
    boards.smp.reset(3)
    boards.smp.fail_pending()
    boards.trainer.pause(PAUSE_WORDS - 1, NOW_S)
    boards.trainer.resume(PAUSE_WORDS - 1)
    assert boards.trainer.due
    assert boards.trainer.paused_for(NOW_S) == 0
    boards.smp.post_due(False)
    assert not boards.trainer.due


@pytest.mark.parametrize("count", [1, 16, REFUSED])
@pytest.mark.parametrize("state", RepairState)
def test_slots_and_repairs_are_those_of_the_epoch(tmp_path: Path, boards: Pair, count: int, state: RepairState) -> None:
    assert (boards.trainer.ready(1), boards.trainer.repair(1)) == (0, RepairState.UNDER_WAY)
    boards.smp.post_due(True)
    boards.smp.post_ready(count)
    boards.smp.post_repair(state)
    assert (boards.trainer.ready(1), boards.trainer.repair(1)) == (count, state)
    assert (boards.trainer.ready(2), boards.trainer.repair(2)) == (0, RepairState.UNDER_WAY)
    later = boards.smp.succeeded(2)
    of_later = Board(tmp_path / "board")
    for board in (boards.trainer, of_later):
        for epoch in (1, 2):
            assert (board.ready(epoch), board.repair(epoch)) == (0, RepairState.UNDER_WAY)
    later.post_ready(count)
    later.post_repair(state)
    assert (of_later.ready(2), of_later.repair(2), of_later.due) == (count, state, True)
    later.post_repair(None)
    assert of_later.repair(2) is RepairState.UNDER_WAY
