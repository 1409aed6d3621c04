"""Who decides after which steps a snapshot is taken."""

from __future__ import annotations

from typing import Protocol


class Rhythm(Protocol):
    """One rank's wish for an interval, from what it observes; all ranks use the longest that any of them wants.

    Whether a snapshot is taken follows from the step's number and what the ranks agreed on, so all take the same ones.
    Not thread-safe; nothing blocks.
    """

    @property
    def interval(self) -> int:
        """Steps from one snapshot to the next, as the ranks agreed."""
        ...

    @property
    def overhead(self) -> float | None:
        """Fraction of training time that snapshots take at this interval; None as long as it is unknown."""
        ...

    def takes(self, step: int) -> bool:
        """Whether a snapshot is taken after this step."""
        ...

    def observe(self, step_s: float, stall_s: float, busy: bool) -> None:
        """Take note of a finished step: seconds from boundary to boundary, what of it the loop was held up, and whether
        a snapshot was worked on at some time during it."""
        ...

    def wanted(self) -> int:
        """The interval this rank asks for."""
        ...

    def agree(self, interval: int) -> None:
        """All ranks use `interval` from now on."""
        ...
