"""Signals that announce to a trainer that its node is to be taken away."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.settings import LEAVE_ON
from holdfast.snapshot.rank import Notice

HEARD = signal.SIGUSR1


@pytest.fixture
def before() -> Iterator[list[int]]:
    """What reaches the handler that was there before."""
    found: list[int] = []
    original = signal.signal(HEARD, lambda number, frame: found.append(number))
    yield found
    signal.signal(HEARD, original)


def test_the_first_is_heard_and_the_second_does_what_it_did_before(before: list[int]) -> None:
    notice = Notice([HEARD])
    signal.raise_signal(HEARD)
    assert notice.given
    assert before == []
    signal.raise_signal(HEARD)
    assert before == [HEARD]


def test_nothing_is_heard_once_it_is_withdrawn(before: list[int]) -> None:
    notice = Notice([HEARD])
    notice.withdraw()
    notice.withdraw()
    signal.raise_signal(HEARD)
    assert (notice.given, before) == (False, [HEARD])


def test_a_handler_that_came_later_stays(before: list[int]) -> None:
    notice, later = Notice([HEARD]), list[int]()
    signal.signal(HEARD, lambda number, frame: later.append(number))
    notice.withdraw()
    signal.raise_signal(HEARD)
    assert (later, before) == ([HEARD], [])


def test_only_the_main_thread_may_hear(before: list[int]) -> None:
    refused: list[str] = []

    def enter() -> None:
        Notice([])
        try:
            Notice([HEARD])
        except ConfigError as error:
            refused.append(str(error))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(60)
    assert "main thread" in refused[0]


def test_signals_are_named() -> None:
    assert LEAVE_ON.value({}) == ()
    assert LEAVE_ON.value({"HOLDFAST_LEAVE_ON": "TERM, sigusr1"}) == (signal.SIGTERM, signal.SIGUSR1)
    for bad in ("TERMINATE", "KILL", "15"):
        with pytest.raises(ConfigError, match="HOLDFAST_LEAVE_ON"):
            LEAVE_ON.value({"HOLDFAST_LEAVE_ON": bad})
