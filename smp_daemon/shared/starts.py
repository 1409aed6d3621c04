"""How the starts of a job ended, and whether they go round in a circle. Pure, but for what it reads of an exception.

Every start is told to all SMPs when its epoch begins, and how it ends for each trainer to the SMP of its node. So the
next start can be told by any SMP that is left.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.limits import MAX_COUNT, MAX_FAILURE, is_identifier

KILLED = "killed"
"""How a trainer ended that could not say it."""

WELL = ""
"""How a trainer ended that was done, or was told to stop."""

_ECHO = re.compile(
    r"\b(gloo|nccl|ucc|mpi)\b|connection (was )?(closed|reset|refused)|broken pipe|timed? ?out|another rank|"
    r"^(AgreementLost|RankShouldRestart|Dist\w*Error|SignalException|BrokenPipeError|ConnectionError)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class TrainerEnd:
    """How a start ended for one trainer, with `step` steps finished; `failure` is `WELL` or says what happened."""

    step: int
    failure: str

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

    times: int
    base: int
    step: int
    failure: str

    def __str__(self) -> str:
        often = "once" if self.times == 1 else f"{self.times} times in a row"
        return f"it ended {often} at step {self.step:,}, having gone back to step {self.base:,}: {self.failure}"

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        return {"times": self.times, "base": self.base, "step": self.step, "failure": self.failure}

    @classmethod
    def from_json(cls, data: Any) -> CrashLoop:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            times, base, step = (_count(data[name]) for name in ("times", "base", "step"))
            return cls(times, base, step, checked_failure(data["failure"]))
        except (KeyError, TypeError) as error:
            raise ProtocolError(f"not a crash loop: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Choice:
    """To go back to `snapshot`, whatever is newer, and to what was taken after that: in epoch `since` or later."""

    snapshot: SnapshotId
    since: int

    def admits(self, snapshot: SnapshotId) -> bool:
        """Whether a start that made this choice may go back to `snapshot`."""
        return snapshot == self.snapshot or snapshot.epoch >= self.since

    def to_json(self) -> list[int]:
        """What `from_json` reads back."""
        return [*self.snapshot, self.since]

    @classmethod
    def from_json(cls, data: Any) -> Choice:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            epoch, step, since = data
        except (TypeError, ValueError) as error:
            raise ProtocolError(f"not a choice of a snapshot: {error!r}") from error
        return cls(SnapshotId(_count(epoch), _count(step)), _count(since))


@dataclass(frozen=True, slots=True)
class Start:
    """One start of the job.

    Attributes:
        epoch: that it began.
        base: the step that it went back to; 0 on a cold start.
        before: how the starts before it ended; None if the last one ended well.
        choice: what it was told to go back to; None: the newest.
    """

    epoch: int
    base: int
    before: CrashLoop | None = None
    choice: Choice | None = None

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        before = self.before.to_json() if self.before else None
        choice = self.choice.to_json() if self.choice else None
        return {"epoch": self.epoch, "base": self.base, "before": before, "choice": choice}

    @classmethod
    def from_json(cls, data: Any) -> Start:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            before = CrashLoop.from_json(data["before"]) if data["before"] is not None else None
            choice = Choice.from_json(data["choice"]) if data.get("choice") is not None else None
            return cls(_count(data["epoch"]), _count(data["base"]), before, choice)
        except (KeyError, TypeError, AttributeError) as error:
            raise ProtocolError(f"not a start of a job: {error!r}") from error


@dataclass(frozen=True, slots=True)
class Record:
    """What one SMP knows: the newest start it was told of, and how that ended for trainers here, by coordinate."""

    start: Start | None = None
    ends: Mapping[str, TrainerEnd] = field(default_factory=dict)

    def ended(self, coord: str, end: TrainerEnd) -> Record:
        """With one trainer's end. What was said first stays."""
        return Record(self.start, {coord: end, **self.ends})

    def goes_on(self, coord: str) -> Record:
        """Without the end of a trainer that was taken for killed, and only had lost its connection."""
        ends = {other: end for other, end in self.ends.items() if (other, end.failure) != (coord, KILLED)}
        return Record(self.start, ends)

    def to_json(self) -> dict[str, Any]:
        """A JSON object that `from_json` reads back."""
        ends = sorted([coord, end.step, end.failure] for coord, end in self.ends.items())
        return {"start": self.start.to_json() if self.start else None, "ends": ends}

    @classmethod
    def from_json(cls, data: Any) -> Record:
        """Raises `ProtocolError` if `data` is not what `to_json` makes."""
        try:
            start = Start.from_json(data["start"]) if data["start"] is not None else None
            ends = {
                _coord(coord): TrainerEnd(_count(step), checked_failure(failure))
                for coord, step, failure in data["ends"]
            }
            return cls(start, ends)
        except (KeyError, TypeError, ValueError) as error:
            raise ProtocolError(f"not a record of a start: {error!r}") from error


def failure_text(error: BaseException) -> str:
    """An exception in a line: its type and message. `WELL` for one that only ends the program, as asked."""
    if isinstance(error, KeyboardInterrupt | GeneratorExit) or (isinstance(error, SystemExit) and not error.code):
        return WELL
    return " ".join(f"{type(error).__name__}: {error}".split())[:MAX_FAILURE]


def checked_failure(value: Any) -> str:
    """Raises `ProtocolError` unless `value` may say how a trainer ended."""
    if not isinstance(value, str) or len(value) > MAX_FAILURE:
        raise ProtocolError(f"a failure is a text of at most {MAX_FAILURE} characters")
    return value


def _count(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= MAX_COUNT:
        raise ProtocolError(f"a step, an epoch or a count, not {str(value)[:80]}")
    return value


def _coord(value: Any) -> str:
    if not isinstance(value, str) or not is_identifier(value):
        raise ProtocolError(f"a coordinate, not {str(value)[:80]}")
    return value
