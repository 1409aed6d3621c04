"""What ranks report comes to what its fields say, for any values on any number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.collective.mesh import AgreementLost
from holdfast.snapshot.collective.reports import ALL, ANY, LEAST, MOST, SAME, reduced


class Colour(IntEnum):
    RED = 0
    GREEN = 1
    BLUE = 2


@dataclass(frozen=True)
class Report:
    colours: tuple[Colour, ...] = field(metadata=LEAST)
    least: int = field(metadata=LEAST)
    most: int = field(metadata=MOST)
    everywhere: bool = field(metadata=ALL)
    anywhere: bool = field(metadata=ANY)
    same: int | None = field(metadata=SAME)
    agreed: bool | None = field(metadata=SAME)


@dataclass(frozen=True)
class Other:
    numbers: tuple[int, ...] = field(metadata=LEAST)


class Sent(Agreement):
    """One of several ranks: notes what it sends, and is answered with the `answer`."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[int] = []
        self.answer: list[int] = []

    def minimum(self, values: object, among: Sequence[int] | None = None) -> Callable[[], list[int]]:
        assert isinstance(values, list)
        self.sent = values
        return lambda: self.answer


def together(reports: Sequence[Any]) -> list[Any]:
    """What each rank hears."""
    ranks = [Sent() for _ in reports]
    results = [reduced(rank, report) for rank, report in zip(ranks, reports, strict=True)]
    for rank in ranks:
        rank.answer = [min(numbers) for numbers in zip(*(each.sent for each in ranks), strict=True)]
    return [result() for result in results]


numbers = st.integers(-(2**40), 2**40)


@given(st.data(), st.integers(1, 5), st.integers(0, 3))
def test_every_field_comes_to_what_it_says_on_every_rank(data: st.DataObject, ranks: int, colours: int) -> None:
    report = st.builds(
        Report,
        st.tuples(*[st.sampled_from(Colour)] * colours),
        numbers,
        numbers,
        st.booleans(),
        st.booleans(),
        st.sampled_from((-7, 7)),
        st.booleans(),
    )
    said = [data.draw(report) for _ in range(ranks)]

    def same(values: set[Any]) -> Any:
        return values.pop() if len(values) == 1 else None

    wanted = Report(
        tuple(min(each) for each in zip(*(one.colours for one in said), strict=True)),
        min(one.least for one in said),
        max(one.most for one in said),
        all(one.everywhere for one in said),
        any(one.anywhere for one in said),
        same({one.same for one in said}),
        same({one.agreed for one in said}),
    )
    for heard in together(said):
        assert heard == wanted
        assert [type(colour) for colour in heard.colours] == [Colour] * colours
        assert {type(heard.everywhere), type(heard.anywhere)} == {bool}


def test_a_rank_alone_hears_itself() -> None:
    mine = Report((Colour.GREEN,), -2, 3, True, False, 5, False)
    assert reduced(Agreement(), mine)() == mine


def test_reports_of_two_kinds_are_not_taken_for_each_other() -> None:
    report = Report((Colour.GREEN,), -2, 3, True, False, 5, False)
    as_long = Other((1,) * 9)
    assert len(reduced_integers(report)) == len(reduced_integers(as_long))
    with pytest.raises(AgreementLost, match="elsewhere"):
        together([report, as_long])


def reduced_integers(report: Any) -> list[int]:
    rank = Sent()
    reduced(rank, report)
    return rank.sent
