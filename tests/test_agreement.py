"""Ranks that wait for each other, however long one of them works."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest

from snapshot import agreement
from snapshot.agreement import AgreementLost, Alone, Result, work_in_rounds
from tests.test_replicas import Rank, together

ROUNDS = 5
DEADLINE_S = 10.0


class Counting(Alone):
    """A rank, and when it has met the others often enough."""

    def __init__(self, member: Rank) -> None:
        self.rank = member.rank
        self.met = 0
        self.enough = threading.Event()
        self._member = member

    def minimum(self, values: Sequence[int]) -> Result:
        self.met += 1
        if self.met == ROUNDS:
            self.enough.set()
        return self._member.minimum(values)


@pytest.fixture(autouse=True)
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agreement, "PATIENCE_S", 0.01)


def test_who_is_done_meets_the_others_until_the_last_one_is_done() -> None:
    def rank(member: Rank) -> tuple[bool, bool]:
        counting = Counting(member)
        done = work_in_rounds(counting, lambda: member.rank != 1 or counting.enough.wait(DEADLINE_S))
        return done, counting.met >= ROUNDS

    assert together(rank, 3) == [(True, True)] * 3


def test_who_fails_raises_once_all_are_done_and_nobody_else_does() -> None:
    over = threading.Event()

    def fail() -> str:
        raise ValueError("of one rank")

    def succeed() -> str:
        over.set()
        return "well"

    def rank(member: Rank) -> str:
        try:
            return work_in_rounds(member, fail if member.rank == 0 else succeed)
        except ValueError as error:
            assert over.is_set()
            return str(error)

    assert together(rank, 2) == ["of one rank", "well"]


def test_a_rank_that_is_gone_is_noticed_while_others_work() -> None:
    never = threading.Event()

    class Lonely(Alone):
        def minimum(self, values: Sequence[int]) -> Result:
            raise AgreementLost("another rank is gone")

    with pytest.raises(AgreementLost):
        work_in_rounds(Lonely(), lambda: never.wait(DEADLINE_S))
    never.set()


def test_alone_nobody_is_waited_for() -> None:
    assert Alone().patiently(lambda: 7) == 7
