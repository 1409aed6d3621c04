"""Copies are spread over the step that runs beside them, on a clock that only waits and work move."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.smp_daemon.shared.board import MAX_PAUSE_S
from holdfast.smp_daemon.shared.system import Threads
from holdfast.snapshot.copy.pace import EVIDENCE, REMEMBERED, SLACK, SPREAD, Pace, plan
from tests.deadlines import DEADLINE_S

BATCH = 64 << 20
BATCHES = 10
BATCH_S = 0.01
COPY_S = BATCHES * BATCH_S
WINDOW_S = 8.0


class _Awaited(threading.Event):
    """Waits as it is told to."""

    def __init__(self, how: Callable[[threading.Event, float], bool]) -> None:
        super().__init__()
        self._how = how

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        return self._how(self, timeout)


class Loop:
    """A training loop and its copy thread, taking turns on one clock. `at` schedules what happens in the meantime."""

    def __init__(self, wait: Callable[[threading.Event, float], bool] | None = None) -> None:
        self.now = 5000.0
        events = partial(_Awaited, wait or self._wait)
        self.pace = Pace(cast(Threads, SimpleNamespace(monotonic=lambda: self.now, Event=events)))
        self.waits: list[float] = []
        self._events: list[tuple[float, Callable[[], None]]] = []

    def at(self, after_s: float, happens: Callable[[], None]) -> None:
        """Schedule an event, `after_s` from now."""
        self._events.append((self.now + after_s, happens))
        self._events.sort(key=lambda event: event[0])

    def go_on(self, seconds: float) -> None:
        """Let time pass, and let the events of that time happen."""
        end = self.now + seconds
        while self._events and self._events[0][0] <= end:
            self.now, happens = self._events.pop(0)
            happens()
        self.now = end

    def copy(self, batch_s: float = BATCH_S, *, batches: int = BATCHES, total: int | None = None) -> list[float]:
        """Copy in batches that take `batch_s` each; return when each began, in seconds from now."""
        began = self.now
        self.pace.begin(batches * BATCH if total is None else total)
        starts = []
        for _ in range(batches):
            self.pace.wait(BATCH)
            starts.append(self.now - began)
            self.go_on(batch_s)
        return starts

    def step(self, window_s: float = WINDOW_S, batch_s: float = BATCH_S, *, late_s: float = 0.0) -> list[float]:
        """A step and its copy, which begins `late_s` after the boundary; returns when its batches began, from there."""
        began = self.now
        self.pace.boundary(began)
        self.go_on(late_s)
        starts = [late_s + start for start in self.copy(batch_s)]
        self.go_on(max(0.0, began + window_s - self.now))
        self.pace.fenced(self.now)
        return starts

    def _wait(self, event: threading.Event, seconds: float) -> bool:
        """Let time pass until the event is set, but at most `seconds`."""
        self.waits.append(seconds)
        end = self.now + seconds
        while not event.is_set() and self._events and self._events[0][0] <= end:
            self.go_on(self._events[0][0] - self.now)
        if not event.is_set():
            self.go_on(end - self.now)
        return event.is_set()


def unpaced(batch_s: float = BATCH_S) -> list[object]:
    return [pytest.approx(i * batch_s) for i in range(BATCHES)]


def spread(window_s: float = WINDOW_S) -> list[object]:
    return [pytest.approx(SPREAD * window_s * i / BATCHES) for i in range(BATCHES)]


@pytest.fixture
def loop() -> Loop:
    """A loop that knows its windows and copies."""
    loop = Loop()
    for _ in range(REMEMBERED):
        loop.step()
    return loop


# ---------------------------------------------------------------- the plan


def test_what_is_unknown_is_not_spread() -> None:
    assert plan(None, COPY_S) == plan(WINDOW_S, None) == plan(None, None) == 0


@given(st.floats(0, 1e4), st.floats(0, 1e4))
def test_a_copy_is_spread_over_half_of_the_window_or_not_at_all(window_s: float, copy_s: float) -> None:
    assert plan(window_s, copy_s) == (window_s / 2 if window_s >= 4 * copy_s else 0)


# ---------------------------------------------------------------- spreading


def test_the_bytes_of_a_copy_are_spread_evenly(loop: Loop) -> None:
    assert loop.step() == spread()


def test_the_first_copies_do_not_wait() -> None:
    loop = Loop()
    assert [loop.step() for _ in range(EVIDENCE)] == [unpaced()] * EVIDENCE
    assert loop.waits == []
    assert loop.step() == spread()


def test_windows_alone_do_not_make_a_copy_wait_whose_like_was_never_seen() -> None:
    loop = Loop()
    for _ in range(REMEMBERED):
        loop.pace.boundary(loop.now)
        loop.go_on(WINDOW_S)
        loop.pace.fenced(loop.now)
    assert loop.step() == unpaced()
    assert loop.step() == spread()


def test_a_window_too_short_for_the_copy_is_left_as_it_is() -> None:
    loop = Loop()
    window_s = 0.99 * SLACK * COPY_S
    assert [loop.step(window_s) for _ in range(2 * REMEMBERED)] == [unpaced()] * 2 * REMEMBERED
    assert loop.waits == []


def test_a_larger_copy_is_expected_to_take_longer(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    starts = loop.copy(total=int(WINDOW_S / COPY_S * BATCHES * BATCH / SLACK * 1.1))
    assert starts == unpaced()


def test_a_copy_that_is_slow_by_itself_is_not_delayed_further(loop: Loop) -> None:
    loop.waits.clear()
    slow_s = 1.01 * SPREAD * WINDOW_S / BATCHES
    assert loop.step(batch_s=slow_s) == unpaced(slow_s)
    assert loop.waits == []


def test_what_was_slow_for_a_while_catches_up_without_waiting(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    loop.pace.begin(BATCHES * BATCH)
    loop.pace.wait(BATCH)
    loop.go_on(SPREAD * WINDOW_S / 2)
    loop.waits.clear()
    for _ in range(BATCHES // 2):
        loop.pace.wait(BATCH)
    assert loop.waits == []
    loop.pace.wait(BATCH)
    assert loop.waits == [pytest.approx(SPREAD * WINDOW_S / BATCHES)]


def test_a_copy_that_begins_late_is_measured_against_the_boundary(loop: Loop) -> None:
    late_s = SPREAD * WINDOW_S / 2
    starts = loop.step(late_s=late_s)
    assert starts[0] == pytest.approx(late_s)
    assert starts[BATCHES // 2 + 1 :] == spread()[BATCHES // 2 + 1 :]


def test_copies_that_have_become_slow_are_soon_not_spread_any_more(loop: Loop) -> None:
    slow_s = 1.1 * WINDOW_S / SLACK / BATCHES
    for _ in range(REMEMBERED // 2):
        loop.step(batch_s=slow_s)
    assert loop.step(batch_s=slow_s) == unpaced(slow_s)


@pytest.mark.parametrize("odd_s", [WINDOW_S / 5, WINDOW_S * 100])
def test_a_few_odd_windows_change_nothing(loop: Loop, odd_s: float) -> None:
    for _ in range(3):
        loop.step(odd_s)
    assert loop.step() == spread()


@pytest.mark.parametrize(("count", "window_s"), [(REMEMBERED // 4, WINDOW_S / 2), (REMEMBERED, WINDOW_S * 2)])
def test_windows_that_stay_shorter_or_longer_are_noticed(loop: Loop, count: int, window_s: float) -> None:
    for _ in range(count):
        loop.step(window_s)
    assert loop.step() == spread(window_s)


def test_only_the_first_fence_after_a_boundary_ends_a_window(loop: Loop) -> None:
    for _ in range(REMEMBERED):
        loop.pace.fenced(loop.now + 1e6)
    assert loop.step() == spread()


def test_more_bytes_than_were_said_are_not_held_up_beyond_half_of_the_window(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    starts = loop.copy(total=BATCHES * BATCH // 2)
    assert starts[BATCHES // 2 :] == [
        pytest.approx(SPREAD * WINDOW_S + i * BATCH_S) for i in range(BATCHES - BATCHES // 2)
    ]


@given(
    st.floats(0.1, 100),
    st.lists(st.floats(0.001, 3), min_size=2, max_size=12),
    st.lists(st.tuples(st.floats(0, 100), st.booleans()), max_size=6),
)
def test_a_copy_ends_no_later_than_it_must_whatever_happens(
    window_s: float, lengths_s: list[float], phases: list[tuple[float, bool]]
) -> None:
    """Batches take any time, and the step communicates at any time."""
    loop = Loop()
    for _ in range(EVIDENCE):
        loop.step(window_s, batch_s=window_s / SLACK / BATCHES / 2)
    loop.pace.boundary(loop.now)
    began = loop.now
    for after_s, active in phases:
        loop.at(after_s, lambda active=active: loop.pace.comm(active))  # type: ignore[misc]
    loop.pace.begin(len(lengths_s) * BATCH)
    for length_s in lengths_s:
        loop.pace.wait(BATCH)
        loop.go_on(length_s)
    assert max(loop.waits, default=0) <= SPREAD * window_s * (1 + 1e-6)
    assert loop.now - began <= SPREAD * window_s + sum(lengths_s) + 1e-6


# ---------------------------------------------------------------- the fence


def test_once_somebody_waits_for_the_copy_it_waits_for_nothing(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    loop.at(2.5 * SPREAD * WINDOW_S / BATCHES, loop.pace.fence)
    starts = loop.copy()
    assert starts[:3] == spread()[:3]
    assert starts[3:] == [pytest.approx(2.5 * SPREAD * WINDOW_S / BATCHES + i * BATCH_S) for i in range(BATCHES - 3)]
    assert loop.step() == spread()


@pytest.mark.parametrize("fence", [lambda loop: loop.pace.fence(), lambda loop: loop.pace.fenced(loop.now)])
def test_a_step_that_ends_before_its_copy_begins_does_not_wait_for_it_long(
    loop: Loop, fence: Callable[[Loop], None]
) -> None:
    loop.pace.boundary(loop.now)
    fence(loop)
    loop.waits.clear()
    assert loop.copy() == unpaced()
    assert loop.waits == []


# ---------------------------------------------------------------- phases


def test_a_batch_waits_until_the_step_has_communicated(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    slot_s = SPREAD * WINDOW_S / BATCHES
    loop.at(0.9 * slot_s, lambda: loop.pace.comm(True))
    loop.at(1.4 * slot_s, lambda: loop.pace.comm(False))
    starts = loop.copy()
    assert starts[1] == pytest.approx(1.4 * slot_s)
    assert starts[2:] == spread()[2:]


def test_nobody_waits_longer_than_a_second_for_the_end_of_a_phase(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    loop.pace.comm(True)
    loop.at(0.5, lambda: loop.pace.comm(True))  # reported twice, it is still the same phase
    starts = loop.copy()
    assert starts[0] == pytest.approx(MAX_PAUSE_S)
    caught_up = int(MAX_PAUSE_S / (SPREAD * WINDOW_S / BATCHES)) + 1
    assert starts[caught_up:] == spread()[caught_up:]


def test_after_half_of_the_window_nobody_waits_for_the_end_of_a_phase(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    slot_s = SPREAD * WINDOW_S / BATCHES
    loop.at(8.5 * slot_s, lambda: loop.pace.comm(True))
    starts = loop.copy()
    assert starts[:9] == spread()[:9]
    assert starts[9] == pytest.approx(SPREAD * WINDOW_S)


def test_a_phase_does_not_outlast_the_fence(loop: Loop) -> None:
    loop.pace.boundary(loop.now)
    loop.pace.comm(True)
    loop.at(0.3, loop.pace.fence)
    loop.at(0.3, lambda: loop.pace.comm(True))
    starts = loop.copy()
    assert starts == [pytest.approx(0.3 + i * BATCH_S) for i in range(BATCHES)]
    assert loop.step() == spread()


def test_where_copies_are_not_spread_they_do_not_wait_for_phases_either() -> None:
    loop = Loop()
    loop.pace.boundary(loop.now)
    loop.pace.comm(True)
    assert loop.copy() == unpaced()
    assert loop.waits == []


# ---------------------------------------------------------------- two threads


@pytest.mark.parametrize(
    ("batches", "end"),
    [
        (2, lambda loop: loop.pace.fence()),
        (2, lambda loop: loop.pace.fenced(loop.now)),
        (1, lambda loop: loop.pace.comm(False)),
    ],
)
def test_the_training_thread_ends_a_wait_of_the_copy_thread(batches: int, end: Callable[[Loop], None]) -> None:
    """The clock stands still: a batch that nobody woke would wait for an hour."""
    waiting = threading.Event()

    def wait(event: threading.Event, seconds: float) -> bool:
        waiting.set()
        return threading.Event.wait(event, 3600)

    loop = Loop(wait)

    def copy() -> None:
        loop.pace.begin(2 * BATCH)
        for _ in range(batches):
            loop.pace.wait(BATCH)

    for _ in range(EVIDENCE):
        loop.step()
    assert not waiting.is_set()
    loop.pace.boundary(loop.now)
    if batches == 1:
        loop.pace.comm(True)
    with ThreadPoolExecutor(1) as threads:
        copying = threads.submit(copy)
        try:
            assert waiting.wait(DEADLINE_S)
            assert not copying.done()
            end(loop)
            copying.result(DEADLINE_S)
        finally:
            loop.pace.fence()
