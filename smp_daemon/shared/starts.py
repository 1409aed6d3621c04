"""How the starts of a job ended, and whether they go round in a circle. Pure, but for what it reads of an exception.

Every start is told to all SMPs when its epoch begins, and how it ends for each trainer to the SMP of its node. So the
next start can be told by any SMP that is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_FAILURE
from holdfast.smp_daemon.shared.plain import Address, Count, Identifier

KILLED = "killed"
"""How a trainer ended that could not say it."""

WELL = ""
"""How a trainer ended that was done, or was told to stop."""

Failure = Annotated[str, msgspec.Meta(max_length=MAX_FAILURE)]
"""How a trainer ended, in words."""

_ECHO = re.compile(
    r"\b(gloo|nccl|ucc|mpi)\b|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|another rank|"
    r"^(AgreementLost|RankShouldRestart|Dist\w*Error|SignalException|BrokenPipeError|ConnectionError)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a start ended for one trainer, with `step` steps finished; `failure` is `WELL` or says what happened."""

    step: Count
    failure: Failure

    @property
    def is_echo(self) -> bool:
        """Whether it only says that another trainer is gone."""
        return _ECHO.search(self.failure) is not None


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """Starts in a row that ended at the same step, in the same way, and came no further.

    Attributes:
        times: how many.
        base: the newest step that any of them went back to.
        step: where they ended. `failure`: how.
    """

    times: Count
    base: Count
    step: Count
    failure: Failure

    def __str__(self) -> str:
        often = "once" if self.times == 1 else f"{self.times} times in a row"
        return f"it ended {often} at step {self.step:,}, having gone back to step {self.base:,}: {self.failure}"


@dataclass(frozen=True, slots=True)
class Choice:
    """To go back to `snapshot`, whatever is newer, and to what was taken after that: in epoch `since` or later."""

    snapshot: SnapshotId
    since: Count

    def admits(self, snapshot: SnapshotId) -> bool:
        """Whether a start that made this choice may go back to `snapshot`."""
        return snapshot == self.snapshot or snapshot.epoch >= self.since


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job.

    Attributes:
        epoch: that it began.
        base: the step that it went back to; 0 on a cold start.
        before: how the starts before it ended; None if the last one ended well.
        choice: what it was told to go back to; None: the newest.
        newcomers: SMPs that the layout of what it went back to does not know. They may hold some of that by now, and
            nothing else says where they are until a snapshot of this start is protected.
    """

    epoch: Count
    base: Count
    before: CrashLoop | None = None
    choice: Choice | None = None
    newcomers: tuple[Address, ...] = ()


@dataclass(frozen=True, slots=True)
class Record:
    """What one SMP knows: the newest start it was told of, and how that ended for trainers here, by coordinate."""

    start: Start | None = None
    ends: Mapping[Identifier, TrainerEnd] = field(default_factory=dict)

    def ended(self, coord: str, end: TrainerEnd) -> Record:
        """With one trainer's end. What was said first stays."""
        return Record(self.start, {coord: end, **self.ends})

    def goes_on(self, coord: str) -> Record:
        """Without the end of a trainer that was taken for killed, and only had lost its connection."""
        ends = {other: end for other, end in self.ends.items() if (other, end.failure) != (coord, KILLED)}
        return Record(self.start, ends)

    def protected(self, snapshot: SnapshotId) -> Record:
        """Now that this snapshot is: if it is of this start, its own layout says where all of it is."""
        if self.start is None or not self.start.newcomers or snapshot.epoch < self.start.epoch:
            return self
        return Record(replace(self.start, newcomers=()), self.ends)


def failure_text(error: BaseException) -> str:
    """An exception in a line: its type and message. `WELL` for one that only ends the program, as asked."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return WELL
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_FAILURE]
