"""Ranks that have lost each other meet at one step; nobody waits before it, and late ranks try again."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.system import Clocks
from holdfast.snapshot.collective import agreement
from holdfast.snapshot.collective.agreement import LEAD_STEPS, MOST_DOUBLINGS, Meeting
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery, SnapshotState
from tests.deadlines import DEADLINE_S


class Board:
    """What meetings use of a `torch.distributed.Store`, in one process."""

    def __init__(self) -> None:
        self.said: dict[str, bytes] = {}
        self.looked_for = 0
        self._counting = threading.Lock()

    def add(self, key: str, count: int, /) -> int:
        with self._counting:
            now = int(self.said.get(key, b"0")) + count
            self.said[key] = str(now).encode()
        return now

    def set(self, key: str, value: str, /) -> None:
        self.said[key] = value.encode()

    def get(self, key: str, /) -> bytes:
        return self.said[key]

    def multi_get(self, keys: list[str], /) -> list[bytes]:
        self.looked_for += len(keys)
        return [self.said[key] for key in keys]

    def check(self, keys: list[str], /) -> bool:
        self.looked_for += len(keys)
        return all(key in self.said for key in keys)


class Clock(Clocks):
    """Time that passes only when somebody sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    time = monotonic

    def sleep(self, seconds: Any, /) -> None:
        self.now_s += seconds


def circle(size: int, board: Board | None = None, clock: Clock | None = None) -> list[Meeting]:
    board, clock = board or Board(), clock or Clock()
    return [Meeting(board, rank, size, clock) for rank in range(size)]


def all_come(ranks: list[Meeting], step: int) -> list[str | None]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(lambda rank: rank.come(step), ranks, timeout=DEADLINE_S))


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Meeting]]:
    """Three ranks in real time."""
    monkeypatch.setattr(agreement, "MEETING_DEADLINE_S", DEADLINE_S)
    board = Board()
    yield [Meeting(board, rank, 3) for rank in range(3)]


@given(st.lists(st.integers(0, 1), min_size=2, max_size=5), st.randoms(use_true_random=False))
def test_ranks_that_learn_of_it_a_step_apart_meet_at_one_step_and_wait_at_no_other(
    late: list[int], order: object
) -> None:
    """Ranks come one at a time, in any order, so a rank that waited before the meeting would wait in vain."""
    clock = Clock()
    ranks = circle(len(late), clock=clock)
    for step in range(10, 10 + 1 + LEAD_STEPS):
        turns = list(enumerate(ranks))
        order.shuffle(turns)  # type: ignore[attr-defined]
        for rank, each in turns:
            if step >= 10 + late[rank]:
                assert each.come(step) is None
        assert clock.now_s == 0.0, "nobody has waited"
        if step == 10 + max(late) + LEAD_STEPS - 1:
            break
    for each in ranks:  # each has heard of it by then, even if ranks end their steps one after another
        assert each._at == 10 + max(late) + LEAD_STEPS


def test_all_come_together(patient: list[Meeting]) -> None:
    for step in (5, 6, 7):
        assert [rank.come(step) for rank in patient] == [None] * 3
    assert all_come(patient, 8) == ["round 0"] * 3
    for rank in patient:
        rank.went_well()
    assert [rank.come(20) for rank in patient] == [None] * 3
    assert all_come(patient, 20 + LEAD_STEPS) == ["round 1"] * 3


def test_while_one_is_away_the_others_go_on() -> None:
    clock = Clock()
    ranks = circle(3, clock=clock)
    for step in range(1000):
        assert [rank.come(step) for rank in ranks[:2]] == [None] * 2
    assert clock.now_s == 0.0
    assert ranks[2].come(1000) is None


def test_who_does_not_come_is_waited_for_once_and_who_comes_after_that_waits_for_nobody() -> None:
    clock = Clock()
    ranks = circle(2, clock=clock)
    assert [rank.come(1) for rank in ranks] == [None] * 2
    assert ranks[0].come(1 + LEAD_STEPS) is None
    waited = clock.now_s
    assert waited == pytest.approx(agreement.MEETING_DEADLINE_S, abs=0.1)
    assert ranks[1].come(1 + LEAD_STEPS) is None and clock.now_s == waited


def test_a_step_asks_the_store_for_few_keys_for_each_rank_of_a_large_job() -> None:
    """It is one thread of one process. A look for the keys of 4,096 ranks takes it 60 ms."""
    board, steps = Board(), 1 + LEAD_STEPS
    ranks = circle(500, board)
    for step in range(steps):
        for rank in ranks:
            rank.come(step)
    assert board.looked_for < 3 * steps * len(ranks)


def test_each_meeting_that_fails_puts_the_next_one_further_off() -> None:
    clock = Clock()
    board = Board()
    ranks = circle(2, board, clock)
    step, leads = 0, []
    for _ in range(MOST_DOUBLINGS + 3):
        assert [rank.come(step) for rank in ranks] == [None] * 2
        at = ranks[1]._at
        assert at is not None
        leads.append(at - step)
        step = at
        assert [rank.come(step) for rank in ranks] == [None] * 2  # each comes alone, so the meeting fails
    assert leads == [LEAD_STEPS << min(i, MOST_DOUBLINGS) for i in range(MOST_DOUBLINGS + 3)]


def test_at_the_end_all_are_waited_for_until_the_deadline() -> None:
    board = Board()
    ranks = [Meeting(board, rank, 3) for rank in range(3)]
    with ThreadPoolExecutor(3) as threads:
        ends = [threads.submit(rank.come_last, DEADLINE_S) for rank in ranks]
        assert [end.result(DEADLINE_S) for end in ends] == ["end"] * 3
    clock = Clock()
    assert circle(2, clock=clock)[0].come_last(7.0) is None
    assert clock.now_s == pytest.approx(7.0, abs=0.1)


def test_a_rank_that_comes_later_is_waited_for(patient: list[Meeting]) -> None:
    for rank in patient:
        rank.come(5)
    with ThreadPoolExecutor(2) as threads:
        early = [threads.submit(rank.come, 5 + LEAD_STEPS) for rank in patient[:2]]
        assert patient[2].come(5 + LEAD_STEPS) == "round 0"
        assert [each.result(DEADLINE_S) for each in early] == ["round 0"] * 2


# ---------------------------------------------------------------------- the ledger that they continue with


EVERY: list[ProtectEvery] = [1, 2, "auto"]


def at(step: int) -> SnapshotId:
    return SnapshotId(1, step)


@given(st.lists(st.lists(st.sampled_from(SnapshotState), min_size=4, max_size=4), min_size=1, max_size=12), st.data())
def test_a_rank_that_has_not_heard_of_the_last_states_goes_on_with_those_that_have(
    run: list[list[SnapshotState]], data: st.DataObject
) -> None:
    known, every = data.draw(st.booleans()), data.draw(st.sampled_from(EVERY))
    ledger = Ledger.after(3, at(1), at(int(known)), protect_every=every)
    for step, results in enumerate(run, 2):
        before = ledger
        if ledger.may_begin:
            ledger = ledger.begin(at(step))
        begun = ledger
        ledger = ledger.settle(results[: len(ledger.pending)])
    for other in (before, begun):
        for ranks in ([ledger, other], [other, ledger], [other, other, ledger]):
            together = Ledger.together(ranks)
            assert together.protected == ledger.protected
            assert together.pending == () and together.may_begin
            assert set(together.keep) <= set(ledger.keep) & set(begun.keep)
    assert decode_json(Ledger, encode_json(ledger), "") == ledger
