"""Which functions run is noted for a while, and nothing of that stays behind."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import FrameType

import pytest

from holdfast.snapshot.script import calls
from holdfast.snapshot.script.calls import Calls


@pytest.fixture(autouse=True)
def no_profiler() -> Iterator[None]:
    yield
    sys.setprofile(None)


def called() -> None:
    """A function of the user's own."""


def test_functions_that_run_are_noted_until_it_is_stopped() -> None:
    noted = Calls()
    called()
    found = noted.stop()
    called()
    assert [each.code for each in found if each.code is called.__code__]
    assert sys.getprofile() is None


def test_it_ends_by_itself_where_too_much_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "MOST_EVENTS", 100)
    Calls()
    for _ in range(100):
        called()
    assert sys.getprofile() is None


def test_a_profiler_that_is_at_work_is_left_alone() -> None:
    def profiler(frame: FrameType, event: str, given: object) -> None: ...

    sys.setprofile(profiler)
    noted = Calls()
    called()
    assert sys.getprofile() is profiler
    assert noted.stop() == []
