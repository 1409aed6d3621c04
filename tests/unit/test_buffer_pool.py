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


def test_a_short_unit_after_a_long_one_gets_its_own_length(buffers: BufferPool) -> None:
    for length in (100, 3, 50, 0, 100):
        with ExitStack() as taken:
            units = [taken.enter_context(buffers.borrow(length)) for _ in range(BUFFERS)]
            assert {(unit.nbytes, unit.format, unit.readonly) for unit in units} == {(length, "B", False)}


def test_memory_is_used_again_rather_than_taken_anew(buffers: BufferPool) -> None:
    def taken_at_once() -> set[int]:
        with ExitStack() as taken:
            return {id(taken.enter_context(buffers.borrow(64)).obj) for _ in range(BUFFERS)}

    first = taken_at_once()
    assert len(first) == BUFFERS
    assert all(taken_at_once() == first for _ in range(5))


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
