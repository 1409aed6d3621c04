"""A cap on bytes per second, patience and turns, on a clock that the tests move."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.pacer import BURST_S, Pacer, Patience

RATE = 1000.0


class Sender:
    """Sends as its pacer allows, on a clock of its own, which like any clock does not start at zero."""

    def __init__(self, rate: float, now: float = 5000.0) -> None:
        self.pacer = Pacer(rate)
        self.now = now
        self.sent: list[tuple[float, int]] = []

    def send(self, count: int) -> float:
        """Wait as long as the pacer says, and send; return how long it waited."""
        wait = self.pacer.wait_s(count, self.now)
        self.now += wait
        self.sent.append((self.now, count))
        return wait

    def most_within(self, seconds: float) -> int:
        """The most bytes whose sending began within any `seconds`."""
        return max(sum(count for at, count in self.sent if begin <= at < begin + seconds) for begin, _ in self.sent)


def test_over_a_long_run_the_rate_is_held() -> None:
    sender = Sender(RATE)
    began = sender.now
    for _ in range(10_000):
        sender.send(37)
    assert 10_000 * 37 / (sender.now - began) == pytest.approx(RATE, rel=0.001)


@given(
    st.lists(st.tuples(st.integers(1, 500), st.floats(0, 0.4)), min_size=1, max_size=60),
    st.floats(1, 5000),
    st.floats(0.1, 3),
)
def test_in_no_stretch_of_time_more_goes_than_the_rate_and_a_burst(
    steps: list[tuple[int, float]], rate: float, seconds: float
) -> None:
    """Whatever the sender does between two units. The last unit of a stretch may end after it."""
    sender = Sender(rate)
    for count, busy in steps:
        sender.send(count)
        sender.now += busy
    longest = max(count for count, _ in steps)
    assert sender.most_within(seconds) <= rate * (seconds + BURST_S) * (1 + 1e-6) + longest


def test_who_is_slower_than_the_rate_never_waits() -> None:
    sender = Sender(RATE)
    for _ in range(100):
        assert sender.send(100) == 0
        sender.now += 0.1


def test_what_was_not_sent_in_an_idle_time_is_not_saved_up() -> None:
    sender = Sender(RATE)
    sender.send(1)
    sender.now += 3600
    began = sender.now
    for _ in range(100):
        sender.send(100)
    assert sender.now - began == pytest.approx(99 * 100 / RATE - BURST_S)


def test_one_may_run_ahead_by_a_burst_and_then_waits_for_what_it_has_sent() -> None:
    sender = Sender(RATE)
    ahead = int(RATE * BURST_S)
    assert sender.send(ahead) == 0
    assert sender.send(500) == 0
    assert sender.send(1) == pytest.approx(0.5)
    assert sender.send(1) == pytest.approx(1 / RATE)


def test_a_unit_longer_than_a_second_of_the_rate_goes_and_the_next_one_waits() -> None:
    sender = Sender(RATE)
    assert sender.send(10_000) == 0
    assert sender.send(1) == pytest.approx(10 - BURST_S)


@given(st.lists(st.integers(0, 1 << 40), max_size=20))
def test_no_limit_means_no_wait(counts: list[int]) -> None:
    sender = Sender(0)
    assert [sender.send(count) for count in counts] == [0.0] * len(counts)


def test_nothing_to_send_takes_nothing() -> None:
    sender = Sender(RATE)
    for _ in range(100):
        assert sender.send(0) == 0
    assert sender.send(int(RATE * BURST_S)) == 0


def test_who_has_patience_waits_as_long_as_it_is_asked_to() -> None:
    patience = Patience(1.0)
    assert patience.wait_s(0.25, 100.0) == 0.25
    assert patience.wait_s(0.125, 100.125) == 0.125
    assert patience.wait_s(0, 100.25) == 0


def test_patience_ends_and_comes_back_once_nobody_asks() -> None:
    patience = Patience(1.0)
    assert [patience.wait_s(0.75, 100 + at) for at in (0.0, 0.5, 1.0, 1.5, 99.0)] == [0.75, 0.5, 0.0, 0.0, 0.0]
    assert patience.wait_s(0.0, 200.0) == 0
    assert patience.wait_s(0.75, 200.5) == 0.75


@given(st.lists(st.tuples(st.floats(0.001, 3), st.floats(0.001, 3)), min_size=1, max_size=30))
def test_one_who_never_stops_asking_is_waited_for_once(asked: list[tuple[float, float]]) -> None:
    """Between waits, time passes."""
    patience, now, waited = Patience(1.0), 100.0, 0.0
    for asked_s, busy_s in asked:
        wait_s = patience.wait_s(asked_s, now)
        assert wait_s <= asked_s
        waited += wait_s
        now += wait_s + busy_s
    assert waited <= 1.0 + 1e-9
