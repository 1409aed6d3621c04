"""Batches are numbered on in the middle of a pass, and a pass that ends otherwise than before is noticed."""

from __future__ import annotations

import logging

import pytest

from holdfast.snapshot.step.data import Data
from holdfast.snapshot.step.position import Position


def data(taken: int = 0) -> Data:
    made = Data([10, 11, 12, 13], "data", None, lambda: None, lambda: None)
    for _ in zip(range(taken), made, strict=False):
        pass
    if taken:
        made = Data(made.source, "data", {**made.state(), "under_way": True}, lambda: None, lambda: None)
    return made


def test_the_own_enumerate_goes_on_counting_in_the_middle_of_a_pass() -> None:
    assert list(data().enumerate()) == [(0, 10), (1, 11), (2, 12), (3, 13)]
    assert list(data().enumerate(1))[-1] == (4, 13)
    made = data()
    for number, _ in made.enumerate():
        if number == 1:
            break
    assert next(iter(made.enumerate())) == (0, 10)  # a pass that is left is over


def test_a_pass_that_goes_on_is_told_of_unless_the_loop_asks_for_the_place_in_it() -> None:
    passes: list[bool] = []

    def resumed() -> Data:
        begun = data()
        batches = iter(begun)
        assert [next(batches), next(batches)] == [10, 11]
        return Data(begun.source, "data", begun.state(), lambda: None, lambda: None, over=passes.append)

    asks = resumed()
    loops = [iter(resumed()), resumed().enumerate(), enumerate(asks, asks.position)]
    assert [len(list(each)) for each in loops] == [2, 2, 2]
    assert passes == [True, False, False]


@pytest.mark.parametrize("leaves", [None, False, True])
def test_only_gradients_that_no_pass_left_before_are_an_error(
    leaves: bool | None, caplog: pytest.LogCaptureFixture
) -> None:
    position = Position(0, {"leaves": leaves}, {})
    assert position.pass_over(resumed=True, unused=False) == ""
    assert position.tree()["leaves"] is bool(leaves)

    position = Position(0, {"leaves": leaves}, {})
    wrong = position.pass_over(resumed=True, unused=True)
    assert (".enumerate()" in wrong) is (leaves is False)
    warned = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert bool(warned) is (leaves is None)
    assert position.pass_over(resumed=False, unused=True) == ""  # a whole pass may leave some
    assert position.tree()["leaves"]
