"""Computes how far a job is after some seconds of training, and what is saved by then, without going step by step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError

MARKS = ("sealed", "protected", "persisted")
"""The marks that a save reaches. Each survives more: the death of processes, the loss of nodes, of all memory."""


@dataclass(frozen=True, slots=True)
class Save:
    """A kind of save, made every `every` steps, counted from step 0 and not from the last restart.

    Attributes:
        stall_s: training time that one save takes.
        sealed_s, protected_s, persisted_s: time from the end of the step until the save is sealed, protected and
            persisted; infinite: never.
    """

    every: int
    stall_s: float
    sealed_s: float = math.inf
    protected_s: float = math.inf
    persisted_s: float = math.inf

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ConfigError(f"a save every {self.every} steps: use 1 or more")
        if not 0 <= self.stall_s < math.inf or not min(self.sealed_s, self.protected_s, self.persisted_s) >= 0:
            raise ConfigError(f"a save that takes {self.stall_s} s, or is done before it begins: use 0 s or more")

    def after_s(self, mark: str) -> float:
        """Seconds from the end of the step until the save reaches `mark`, one of `MARKS`."""
        return {"sealed": self.sealed_s, "protected": self.protected_s, "persisted": self.persisted_s}[mark]


@dataclass(frozen=True, slots=True)
class Spent:
    """How the time of a stretch of training was spent.

    Attributes:
        steps: number of finished steps.
        stall_s: seconds in saves.
        unfinished_s: seconds in the step or save that was in progress.
    """

    steps: int
    stall_s: float
    unfinished_s: float


@dataclass(frozen=True, slots=True)
class Saved:
    """A saved step.

    Attributes:
        finished_s: when the step was finished, in seconds after the start of the stretch of training.
        save: the kind of save.
    """

    step: int
    finished_s: float
    save: Save


@dataclass(frozen=True, slots=True)
class Timeline:
    """When a job's steps are finished and saved."""

    step_s: float
    saves: Sequence[Save]

    def finished_s(self, first: int, step: int) -> float:
        """Seconds of training from `first` until `step` is finished, without its own saves."""
        stalls = sum(s.stall_s * (max(step - 1, first) // s.every - first // s.every) for s in self.saves)
        return (step - first) * self.step_s + stalls

    def step_after(self, first: int, elapsed_s: float) -> int:
        """The last step that is finished after `elapsed_s` of training from `first`."""
        low, high = first, first + max(0, int(elapsed_s / self.step_s))
        while low < high:
            middle = (low + high + 1) // 2
            if self.finished_s(first, middle) <= elapsed_s:
                low = middle
            else:
                high = middle - 1
        return low

    def spent(self, first: int, elapsed_s: float) -> Spent:
        """How the first `elapsed_s` of training from `first` were spent. The parts add up to `elapsed_s`."""
        last = self.step_after(first, elapsed_s)
        rest = elapsed_s - (last - first) * self.step_s
        stalls = sum(s.stall_s * (last // s.every - first // s.every) for s in self.saves)
        paid = min(stalls, rest)
        return Spent(last - first, paid, rest - paid)

    def newest(self, mark: str, first: int, elapsed_s: float) -> Saved | None:
        """The newest step saved since `first` that has reached `mark` after `elapsed_s`; None if there is none."""
        found: Saved | None = None
        for save in self.saves:
            after_s = save.after_s(mark)
            if after_s > elapsed_s:
                continue
            step = self.step_after(first, elapsed_s - after_s) // save.every * save.every
            if step > first and (found is None or step > found.step):
                found = Saved(step, self.finished_s(first, step), save)
        return found
