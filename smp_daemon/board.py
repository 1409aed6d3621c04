"""The board: a few shared 8-byte words in which an SMP says what became of recent snapshots.

Trainers map it and read it without a system call, so asking costs the training loop nothing, however busy or
starved the SMP is. Word 0 is the epoch; each other word is ``step * 4 + 1 + outcome``, or 0 if it
says nothing.
"""

from __future__ import annotations

import mmap
import os
from enum import IntEnum
from pathlib import Path

import numpy as np

WORDS = 16


class Outcome(IntEnum):
    """What became of a snapshot. Ordered so that the job's outcome is the minimum over its nodes."""

    FAILED = 0
    PENDING = 1
    PROTECTED = 2


class Board:
    """One writer (the SMP), any number of readers. Words are read and written whole."""

    def __init__(self, path: Path, *, create: bool = False) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | (os.O_CREAT if create else 0), 0o600)
        try:
            if create:
                os.ftruncate(fd, WORDS * 8)
            self._words = np.frombuffer(mmap.mmap(fd, WORDS * 8), dtype=np.int64)
        finally:
            os.close(fd)
        self._next = 0

    @property
    def epoch(self) -> int:
        """The epoch whose outcomes stand here."""
        return int(self._words[0])

    def reset(self, epoch: int) -> None:
        """Forget all outcomes; a new epoch begins."""
        self._words[1:] = 0
        self._words[0] = epoch

    def post(self, step: int, outcome: Outcome) -> None:
        """Say what became of the snapshot of `step` in this epoch."""
        for i in range(1, WORDS):
            if self._words[i] >> 2 == step and self._words[i]:
                self._words[i] = step * 4 + 1 + outcome
                return
        self._words[1 + self._next] = step * 4 + 1 + outcome
        self._next = (self._next + 1) % (WORDS - 1)

    def fail_pending(self) -> None:
        """A predecessor of this SMP died in the middle: what it had not finished will not be finished."""
        pending = self._words & 3 == 1 + Outcome.PENDING
        pending[0] = False
        self._words[pending] += Outcome.FAILED - Outcome.PENDING

    def outcome(self, epoch: int, step: int) -> Outcome:
        """What became of a snapshot; one that nothing was said of is pending, one of an older epoch has failed."""
        if self._words[0] != epoch:
            return Outcome.FAILED if self._words[0] > epoch else Outcome.PENDING
        for word in self._words[1:].tolist():
            if word and word >> 2 == step:
                return Outcome((word & 3) - 1)
        return Outcome.PENDING
