"""How the starts of a job ended, and whether they keep failing in the same way. Pure.

Each start is reported to all SMPs when its epoch begins, and each trainer's end to the SMP of its node. So any SMP that
is left can tell the next start what happened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Annotated

import msgspec

from holdfast.smp_daemon.shared.identity import UNNAMED, Run
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_FAILURE, MAX_GIVEN
from holdfast.smp_daemon.shared.plain import Address, Count, Identifier

KILLED = "killed"
"""`TrainerEnd.failure` of a trainer that died before it could report how it ended."""

WELL = ""
"""`TrainerEnd.failure` of a trainer that finished, or was told to stop."""

Failure = Annotated[str, msgspec.Meta(max_length=MAX_FAILURE)]
"""Text that describes how a trainer ended."""

_ECHO = re.compile(
    r"\b(gloo|nccl|ucc|mpi)\b|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|another rank|"
    r"^(AgreementLost|RankShouldRestart|Dist\w*Error|SignalException|BrokenPipeError|ConnectionError)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a start ended for one trainer, after `step` finished steps; `failure` is `WELL` or says what happened."""

    step: Count
    failure: Failure

    @property
    def is_echo(self) -> bool:
        """Whether the failure only reports that another trainer is gone."""
        return _ECHO.search(self.failure) is not None


@dataclass(frozen=True, slots=True)
class CrashLoop:
    """Consecutive starts that ended at the same step in the same way.

    Attributes:
        times: number of such starts.
        base: newest step that any of them went back to.
        step: step at which they ended.
        failure: how they ended.
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
    """A decision to go back to `snapshot` although newer ones exist.

    `since` is the epoch of the start that decided it. Snapshots of that epoch or later may be used as well.
    """

    snapshot: SnapshotId
    since: Count

    def admits(self, snapshot: SnapshotId) -> bool:
        """Whether a start that made this choice may go back to `snapshot`."""
        return snapshot == self.snapshot or snapshot.epoch >= self.since


@dataclass(frozen=True, slots=True)
class ScriptBlock:
    """One of the trainings of a script.

    Attributes:
        number: its place among those of its job, from 1.
        given: the classes of its models and optimizers.
    """

    number: Annotated[int, msgspec.Meta(ge=1, le=MAX_COUNT)]
    given: Annotated[str, msgspec.Meta(max_length=MAX_GIVEN)]

    def __str__(self) -> str:
        return f"block {self.number} ({self.given})"


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job.

    Attributes:
        epoch: the epoch that it began.
        base: the step that it went back to; 0 on a cold start.
        before: how the starts before it ended; None if the last one ended well.
        choice: the snapshot that it was told to go back to; None: the newest.
        newcomers: SMPs that are not in the layout of the snapshot that it went back to. They may hold parts of that
            snapshot by now, and nothing else says where they are until a snapshot of this start is protected.
        run: the run that it goes on with, or begins.
        block: the block of the script that it entered; None: not known.
    """

    epoch: Count
    base: Count
    before: CrashLoop | None = None
    choice: Choice | None = None
    newcomers: tuple[Address, ...] = ()
    run: Run = UNNAMED
    block: ScriptBlock | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What one SMP knows: the newest start it was told of, and how it ended for this node's trainers, by coordinate."""

    start: Start | None = None
    ends: Mapping[Identifier, TrainerEnd] = field(default_factory=dict)

    def ended(self, coord: str, end: TrainerEnd) -> Record:
        """A copy with one trainer's end added. The first end reported for a trainer stays."""
        return Record(self.start, {coord: end, **self.ends})

    def goes_on(self, coord: str) -> Record:
        """A copy without the end of a trainer that was taken for killed but had only lost its connection."""
        ends = {other: end for other, end in self.ends.items() if (other, end.failure) != (coord, KILLED)}
        return Record(self.start, ends)

    def protected(self, snapshot: SnapshotId) -> Record:
        """A copy for when `snapshot` is protected: without `newcomers` if it was taken since this start, as its own
        layout then says where all of it is."""
        if self.start is None or not self.start.newcomers or snapshot.epoch < self.start.epoch:
            return self
        return Record(replace(self.start, newcomers=()), self.ends)


def failure_text(error: BaseException) -> str:
    """An exception in one line: its type and message, if it has one that can be sent. `WELL` for one that only ends the
    program as requested."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return WELL
    try:
        text = f": {error}".encode(errors="backslashreplace").decode()  # a file's name may have bytes that are no text
    except Exception:  # of the user's class
        text = ""
    return " ".join(f"{type(error).__name__}{text}".split())[:MAX_FAILURE]
