"""What ranks report to each other: a dataclass whose fields say what the values of all ranks come to.

::

    @dataclass(frozen=True)
    class Report:
        states: tuple[SnapshotState, ...] = field(metadata=LEAST)
        interval: int = field(metadata=MOST)
        fits: bool = field(metadata=ALL)

    everywhere = reduced(agreement, Report((), 8, True))()

However many fields there are, they travel as one minimum over a list of integers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar
from zlib import crc32

from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.collective.mesh import ELSEWHERE, AgreementLost

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

T = TypeVar("T", bound="DataclassInstance")


@dataclass(frozen=True, slots=True)
class _Reduction:
    """Integers that stand for a value, and what the minimum of these integers over all ranks stands for."""

    integers: Callable[[int], tuple[int, ...]]
    value: Callable[..., int | None]


_KEY = "reduction"

LEAST = ALL = {_KEY: _Reduction(lambda mine: (mine,), lambda least: least)}
"""The least value of any rank; of booleans, whether it is so on every rank."""

MOST = ANY = {_KEY: _Reduction(lambda mine: (-mine,), lambda least: -least)}
"""The greatest value of any rank; of booleans, whether it is so on any rank."""

SAME = {_KEY: _Reduction(lambda mine: (mine, -mine), lambda least, less: least if least == -less else None)}
"""The value that all ranks have; None if they differ."""


def reduced(agreement: Agreement, mine: T) -> Callable[[], T]:
    """Start to reduce what all ranks report. A collective call that returns at once.

    Args:
        mine: what this rank reports. A field is an integer, a boolean, an `IntEnum`, or a tuple of one of these, whose
            length is the same on every rank; its metadata is one of the reductions above.

    Returns:
        A function that waits for the reduced report. It may be called in any thread, and raises `AgreementLost`,
        also if another rank makes another call.
    """
    kind = crc32(type(mine).__name__.encode())
    sent = [kind, -kind]
    sent += [number for one, reduction in _values(mine) for number in reduction.integers(int(one))]
    result = agreement.minimum(sent)

    def everywhere() -> T:
        least = result()
        if least[:2] != sent[:2]:
            raise AgreementLost(ELSEWHERE)
        return mine if least == sent else _read(mine, iter(least[2:]))  # usually all ranks report the same

    return everywhere


@cache
def _reductions(report: type[DataclassInstance]) -> tuple[tuple[str, _Reduction], ...]:
    """The names of a report's fields, and how each is reduced. Kept, as ranks report in every step."""
    return tuple((each.name, each.metadata[_KEY]) for each in fields(report))


def _values(report: DataclassInstance) -> Iterator[tuple[Any, _Reduction]]:
    for name, reduction in _reductions(type(report)):
        value = getattr(report, name)
        for one in value if isinstance(value, tuple) else (value,):
            yield one, reduction


def _read(mine: T, minimum: Iterator[int]) -> T:
    found: list[Any] = []
    for own, reduction in _values(mine):
        number = reduction.value(*(next(minimum) for _ in reduction.integers(0)))
        found.append(None if number is None else type(own)(number))
    rest, everywhere = iter(found), dict[str, Any]()
    for name, _ in _reductions(type(mine)):
        value = getattr(mine, name)
        everywhere[name] = tuple(next(rest) for _ in value) if isinstance(value, tuple) else next(rest)
    return type(mine)(**everywhere)
