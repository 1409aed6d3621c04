"""What `recovery.asking` and those who carry it out speak of: units, ways to have them, asks and verdicts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from holdfast.smp_daemon.shared.sources import Address


class How(Enum):
    """Ways to have a unit."""

    WHOLE = "whole"
    CHAIN = "chain"
    TERM = "term"


class Verdict(Enum):
    """What to do with an answer."""

    WRITE = "write"
    """It is the first: write it, then say `written`."""
    SUM = "sum"
    """It was the last term that was missing: sum, write, then say `written`."""
    KEEP = "keep"
    """A term; others are still to come."""
    DROP = "drop"
    """The unit is here already, or will be."""


@dataclass(frozen=True, slots=True)
class Ways:
    """How a unit may be had.

    Attributes:
        holders: who hold it as it is.
        terms: who holds which other unit of its stripe, by number.
        needed: how many of these make it up.
    """

    holders: tuple[Address, ...]
    terms: Mapping[int, Address] = field(default_factory=dict)
    needed: int = 1


@dataclass(frozen=True, slots=True)
class Ask:
    """To carry out.

    Attributes:
        number: of the ask.
        terms: of a chain, in the order in which it goes; of a term, its number.
        through: whom the answer depends on; the first is asked.
        shared: how many asks the first has, this one included.
        began, due: seconds by the caller's clock. After `due`, at the latest, it is late.
    """

    number: int
    unit: int
    how: How
    terms: tuple[int, ...]
    through: tuple[Address, ...]
    shared: int
    began: float
    due: float


@dataclass(slots=True)
class Wanted:
    """A unit that is being had.

    Attributes:
        open: asks for it that are not answered, by number.
        failed: holders that could not give it.
        chain_failed: a chain for it has; no other is begun.
        summed: it is had from terms; those that came, and those that cannot be had, are `terms` and `bad`.
        spoilt: its sum did not match its digest.
        claimed: an answer, or a sum, is being written.
    """

    index: int
    ways: Ways
    open: dict[int, Ask] = field(default_factory=dict)
    failed: set[Address] = field(default_factory=set)
    chain_failed: bool = False
    summed: bool = False
    spoilt: bool = False
    claimed: bool = False
    terms: set[int] = field(default_factory=set)
    bad: set[int] = field(default_factory=set)
