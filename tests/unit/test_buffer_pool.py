"""Buffers for incoming units: never more at once than the limit, whoever sends."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack

import pytest

from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.storage import receiving
from holdfast.smp_daemon.storage.receiving import BufferPool, buffers_for
from tests.deadlines import DEADLINE_S

SHORT_S = 0.05
"""A deadline that is meant to expire."""

BUFFERS = buffers_for(1)


@pytest.fixture
def buffers() -> BufferPool:
    return BufferPool(BUFFERS)


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(3 * BUFFERS) as threads:
        yield threads


@pytest.mark.parametrize("length", [0, 1, 4096, 1 << 20])
def test_a_buffer_is_as_long_as_it_was_asked_for_and_may_be_written_to(buffers: BufferPool, length: int) -> None:
    with buffers.borrow(length) as unit:
        assert (unit.nbytes, unit.format, unit.readonly) == (length, "B", False)
        unit[:] = b"\xaa" * length
        assert bytes(unit) == b"\xaa" * length


def test_a_short_unit_after_a_long_one_gets_its_own_length(buffers: BufferPool) -> None:
    for length in (100, 3, 50, 0, 100):
        with ExitStack() as taken:
            assert {taken.enter_context(buffers.borrow(length)).nbytes for _ in range(BUFFERS)} == {length}


def test_buffers_at_work_at_the_same_time_do_not_overlap(buffers: BufferPool) -> None:
    with ExitStack() as taken:
        units = [taken.enter_context(buffers.borrow(64)) for _ in range(BUFFERS)]
        for number, unit in enumerate(units):
            unit[:] = bytes([number]) * 64
        assert [bytes(unit) for unit in units] == [bytes([number]) * 64 for number in range(BUFFERS)]


def test_memory_is_used_again_rather_than_taken_anew(buffers: BufferPool) -> None:
    def taken_at_once() -> set[int]:
        with ExitStack() as taken:
            return {id(taken.enter_context(buffers.borrow(64)).obj) for _ in range(BUFFERS)}

    first = taken_at_once()
    assert len(first) == BUFFERS
    assert all(taken_at_once() == first for _ in range(5))


def test_never_more_than_there_are_are_at_work(buffers: BufferPool, threads: ThreadPoolExecutor) -> None:
    lock = threading.Lock()
    full = threading.Semaphore(0)
    go_on = threading.Event()
    at_work = most = 0

    def work() -> None:
        nonlocal at_work, most
        with buffers.borrow(10):
            with lock:
                at_work += 1
                most = max(most, at_work)
            full.release()
            assert go_on.wait(DEADLINE_S)
            with lock:
                at_work -= 1

    working = [threads.submit(work) for _ in range(3 * BUFFERS)]
    for _ in range(BUFFERS):
        assert full.acquire(timeout=DEADLINE_S)
    assert not full.acquire(timeout=SHORT_S), "one more has a buffer than there are"
    go_on.set()
    for done in working:
        done.result(DEADLINE_S)
    assert (most, at_work) == (BUFFERS, 0)


def test_whoever_waits_gets_the_next_one_that_is_free(buffers: BufferPool, threads: ThreadPoolExecutor) -> None:
    with ExitStack() as taken:
        for _ in range(BUFFERS):
            taken.enter_context(buffers.borrow(10))
        waiting = threads.submit(borrow_once, buffers)
        with pytest.raises(TimeoutError):
            waiting.result(SHORT_S)
    assert waiting.result(DEADLINE_S) == 10


def borrow_once(buffers: BufferPool) -> int:
    with buffers.borrow(10) as unit:
        return unit.nbytes


def test_it_is_not_waited_for_beyond_the_deadline(buffers: BufferPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receiving, "CALL_DEADLINE_S", SHORT_S)
    with ExitStack() as taken:
        for _ in range(BUFFERS):
            taken.enter_context(buffers.borrow(10))
        with pytest.raises(DeadlineExceeded, match="no buffer"):
            borrow_once(buffers)
    assert borrow_once(buffers) == 10


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_buffer_is_free_again_after_an_exception(
    buffers: BufferPool, threads: ThreadPoolExecutor, error: type[BaseException]
) -> None:
    for _ in range(2 * BUFFERS):
        with pytest.raises(error), buffers.borrow(10):
            raise error
    ready = threading.Barrier(BUFFERS, timeout=DEADLINE_S)

    def work() -> None:
        with buffers.borrow(10):
            ready.wait()

    working: list[Future[None]] = [threads.submit(work) for _ in range(BUFFERS)]
    for done in working:
        done.result(DEADLINE_S)


def test_a_buffer_that_cannot_be_made_longer_is_not_lost(
    buffers: BufferPool, threads: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2 * BUFFERS):
        with pytest.raises((MemoryError, OverflowError)), buffers.borrow(1 << 62):
            raise AssertionError("there is no such buffer")
    monkeypatch.setattr(receiving, "CALL_DEADLINE_S", SHORT_S)
    assert [borrow_once(buffers) for _ in range(BUFFERS)] == [10] * BUFFERS
