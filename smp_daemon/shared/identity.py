"""Names that never come twice: of a run of the job, and of each epoch.

A *run* is everything that follows from one cold start: it begins with nothing, and goes on over restarts until it is
finished or given up. Steps and epochs are ordered within a run only.

Two starts that know nothing of each other, since all nodes of one were lost or cut off, would both take the next epoch.
So an epoch is a number with a tag: its upper bits count starts, its lower `TAG_BITS` are drawn at random by each start.
Bytes named (epoch, step, coordinate) are then bytes of one start, wherever they turn up.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.plain import Count, Identifier

TAG_BITS = 32
DRAWN_BITS = TAG_BITS - 1
"""Bits of a tag that are drawn. Changes of layout within a start count on from there, and must not reach the next
start's number."""

ID_DIGITS = 8
MAX_FOLLOWED = 256
"""Most runs that a run remembers to have followed, the newest ones."""


@dataclass(frozen=True, slots=True)
class Run:
    """One run of the job.

    Attributes:
        id: drawn at random when it began.
        begun_s: when it began, or was last chosen by ``HOLDFAST_RUN``, in seconds since 1970 by the clock of rank 0;
            but later than that of every run that was in reach then, whatever the clocks say.
        follows: the ids of the runs that were in reach when it began, and that it took the place of.
        over: those of them that somebody has given up. Nothing of them is used again, or missed.
    """

    id: Identifier
    begun_s: Count
    follows: tuple[Identifier, ...] = ()
    over: tuple[Identifier, ...] = ()

    def __str__(self) -> str:
        return self.id


UNNAMED = Run("0" * ID_DIGITS, 0)
"""The run of layouts that are made outside of any job: by benchmarks, for example."""


def run_id(drawn: int) -> str:
    """The id of a run, from random bits."""
    return f"{drawn % (1 << 4 * ID_DIGITS):0{ID_DIGITS}x}"


def is_run_id(text: str) -> bool:
    """Whether `text` has the form of a run's id."""
    return len(text) == ID_DIGITS and set(text) <= set("0123456789abcdef")


def next_epoch(newest: int, drawn: int) -> int:
    """The epoch of a start, above `newest`, the newest that it knows of. `drawn`: random bits."""
    return first_after(newest) + drawn % (1 << DRAWN_BITS)


def first_after(newest: int) -> int:
    """The lowest epoch that a start may take that knows of `newest`."""
    return ((newest >> TAG_BITS) + 1) << TAG_BITS


def starts_until(epoch: int) -> int:
    """Which start of the job an epoch belongs to: 1 for the first. 0: the epoch was not made by `next_epoch`."""
    return epoch >> TAG_BITS


def epoch_text(epoch: int) -> str:
    """An epoch as people see it: ``3-7f3a9c21``, the number of the start and its tag."""
    number, tag = divmod(epoch, 1 << TAG_BITS)
    return f"{number}-{tag:08x}" if number else str(tag)
