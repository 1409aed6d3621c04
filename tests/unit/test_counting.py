"""Loops that count their batches by the built-in ``enumerate`` are noticed, however they read; others are not."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Iterator
from types import ModuleType
from typing import Any

import pytest

from holdfast.snapshot.step.counting import Counting, is_counted_anew
from holdfast.snapshot.step.data import Data

found: list[bool] = []


def of_module(name: str, code: str, **names: Any) -> Any:
    """What `code` defines as ``made``, in a module of that name."""
    module = ModuleType(name)
    vars(module).update(names)
    exec(code, vars(module))
    return vars(module)["made"]


def look() -> None:
    found[:] = [is_counted_anew(sys._getframe(1))]


source: Callable[[], Iterator[int]] = of_module(
    "holdfast.a.source", "def made():\n    look()\n    yield from (0, 1, 2)", look=look
)
bar: Callable[[Iterable[int]], Iterator[int]] = of_module(
    "tqdm.std", "def made(data):\n    for batch in data:\n        yield batch"
)


def test_enumerate_is_noticed_through_a_progress_bar_too() -> None:
    for number, batch in enumerate(bar(source())):
        assert number == batch
    assert found == [True]
    for _, _ in enumerate(source(), 1):
        pass
    assert found == [True]


def test_other_loops_are_not_taken_for_it() -> None:
    def training() -> Iterator[int]:
        yield from (2 * batch for batch in source())

    for number, twice in enumerate(training()):  # counts what a training loop gives, and not its batches
        assert twice == 2 * number
    assert found == [False]
    list(bar(source()))
    assert found == [False]
    assert next(enumerate(source(), 8)) == (8, 0)  # goes on where the pass does
    assert found == [False]


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


@pytest.mark.parametrize("anew", [True, False])
@pytest.mark.parametrize("leaves", [None, False, True])
def test_only_gradients_that_no_pass_left_before_are_an_error(
    leaves: bool | None, anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    counting = Counting(leaves)
    counting._begins_anew = anew
    assert counting.pass_over(resumed=True, unused=False) == ""
    assert counting.leaves is bool(leaves)

    counting.leaves = leaves
    wrong = counting.pass_over(resumed=True, unused=True)
    assert (".enumerate()" in wrong) is (leaves is False or (leaves is None and anew))
    warned = [line for line in caplog.records if line.levelno >= logging.WARNING]
    assert bool(warned) is (leaves is None and not anew)
    assert counting.pass_over(resumed=False, unused=True) == ""  # a whole pass may leave some
    assert counting.leaves
