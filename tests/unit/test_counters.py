"""Counting in several threads at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from holdfast.smp_daemon.shared.counters import COUNTS, Counters
from tests.deadlines import DEADLINE_S

THREADS = 4
ROUNDS = 2000


@pytest.fixture
def restless() -> Iterator[None]:
    """Threads switch as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


def test_what_is_added_is_counted_and_nothing_else() -> None:
    counters = Counters()
    before = counters.read()
    counters.add(bytes_sent=5, regroups=1)
    counters.add(bytes_sent=7)
    counters.add()
    assert before == dict.fromkeys(COUNTS, 0)
    before["units_repaired"] = 100
    assert {name: count for name, count in counters.read().items() if count} == {"bytes_sent": 12, "regroups": 1}


def test_a_count_that_does_not_exist_is_not_made_up() -> None:
    counters = Counters()
    with pytest.raises(KeyError):
        counters.add(bytes_guessed=1)
    assert counters.read() == Counters().read()


def test_nothing_that_several_threads_add_is_lost(restless: None) -> None:
    counters = Counters()
    ready = threading.Barrier(THREADS, timeout=DEADLINE_S)

    def work(index: int) -> None:
        ready.wait()
        for _ in range(ROUNDS):
            counters.add(bytes_sent=index, bytes_received=1)

    with ThreadPoolExecutor(THREADS) as threads:
        for done in [threads.submit(work, index) for index in range(THREADS)]:
            done.result(DEADLINE_S)
    counts = counters.read()
    assert counts["bytes_received"] == THREADS * ROUNDS
    assert counts["bytes_sent"] == sum(range(THREADS)) * ROUNDS


def test_what_was_added_at_once_is_read_at_once(restless: None) -> None:
    counters = Counters()
    begun, over = threading.Event(), threading.Event()

    def work() -> None:
        while not over.is_set():
            counters.add(bytes_sent=1, regroups=1)  # the first and the last counter
            begun.set()

    with ThreadPoolExecutor(1) as threads:
        working = threads.submit(work)
        assert begun.wait(DEADLINE_S)
        try:
            seen = [counters.read() for _ in range(4 * ROUNDS)]
        finally:
            over.set()
        working.result(DEADLINE_S)
    assert all(counts["bytes_sent"] == counts["regroups"] for counts in seen)
    assert [counts["regroups"] for counts in seen] == sorted(counts["regroups"] for counts in seen)
    assert seen[-1]["regroups"] > 0
