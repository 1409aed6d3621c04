"""The board: a few shared 8-byte words. An SMP says what became of recent snapshots; its trainers ask it for quiet.

Trainers map it, and read and write it without a system call, so it costs the training loop nothing, however busy or
starved the SMP is. Word 0 is the epoch; each of the next is ``step * 4 + 1 + outcome``, or 0 if it says nothing. The
next `PAUSE_WORDS`, one per trainer, say until when the SMP shall send no encoding traffic: nanoseconds of
`time.monotonic`, which all processes of a host share; 0: it may. `HEARTBEAT_ROWS` rows follow, one per trainer, of
which the SMP sees that they change: a count of heartbeats and the phase, the last step that is finished, the step being
copied plus 1. The last word is the SMP's again: whether a snapshot is due to be persisted.
"""

from __future__ import annotations

import mmap
import os
import stat
from enum import IntEnum
from pathlib import Path

import numpy as np

from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.records import PART
from holdfast.smp_daemon.shared.system import MACHINE, System

WORDS = 16
"""Of the SMP."""

PAUSE_WORDS = 64
"""Of the trainers; those of one node are numbered from 0, and modulo this."""

HEARTBEAT_ROWS = 64
HEARTBEAT_WORDS = 4
"""Words of a row, one of them spare; a row is half a cache line, and its own."""

MAX_PAUSE_S = 1.0
"""Traffic pauses no longer at a time: a trainer that is dead or forgetful must not stop protection."""


class SnapshotOutcome(IntEnum):
    """What became of a snapshot. Ordered so that the job's outcome is the minimum over its nodes."""

    FAILED = 0
    PENDING = 1
    PROTECTED = 2


class RepairState(IntEnum):
    """How far parity is that is computed again. Ordered so that the job's is the minimum over its ranks."""

    HOPELESS = 0
    """What is left of the snapshot is too little to compute it from."""
    UNDER_WAY = 1
    WHOLE = 2


class TrainerPhase(IntEnum):
    """Where the training thread of a trainer is."""

    GONE = 0
    START = 1
    RESTORE = 2
    STEP = 3


class Board:
    """Each word has one writer, the SMP or a trainer, and any number of readers. Words are read and written whole."""

    def __init__(self, path: Path, *, create: bool = False, system: System = MACHINE) -> None:
        """Map it. Raises `ProtocolError` if there is another thing of that name."""
        self._path = path
        self._system = system
        files = system.os
        length = (WORDS + PAUSE_WORDS + HEARTBEAT_ROWS * HEARTBEAT_WORDS + 1) * 8
        try:
            fd = files.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | (os.O_CREAT if create else 0), 0o600)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise ProtocolError(f"{path} is no board: {error.strerror}") from error
        try:
            if create:
                files.ftruncate(fd, length)
            status = files.fstat(fd)
            if not stat.S_ISREG(status.st_mode) or status.st_size < length or status.st_uid != files.getuid():
                raise ProtocolError(f"{path} is no board: it has {status.st_size} bytes, and is user {status.st_uid}'s")
            mapped = system.mmap.mmap(fd, length)
            mapped.madvise(mmap.MADV_DONTDUMP)
            words = np.frombuffer(mapped, dtype=np.int64)
        finally:
            files.close(fd)
        pauses, heartbeats = WORDS, WORDS + PAUSE_WORDS
        self._words, self._pauses = words[:pauses], words[pauses:heartbeats]
        self._heartbeats, self._due = words[heartbeats:-1], words[-1:]
        self._count = 0
        newest = int(self._words[1:].argmax())
        self._next = (newest + 1) % (WORDS - 1) if self._words[1 + newest] else 0  # a predecessor may have said some

    @property
    def epoch(self) -> int:
        """The epoch whose outcomes stand here."""
        return int(self._words[0])

    def reset(self, epoch: int) -> None:
        """Forget all outcomes; a new epoch begins."""
        self._words[1:] = 0
        self._words[0] = epoch

    def succeeded(self, epoch: int) -> Board:
        """The board of a newer epoch, in place of this one. Who still has this one mapped is told that its epoch is
        over, and asks for quiet on nobody's board.
        """
        part = self._path.with_name(self._path.name + PART)
        part.unlink(missing_ok=True)
        board = Board(part, create=True, system=self._system)
        board._path = self._path
        board.reset(epoch)
        board.post_due(self.due)
        board._heartbeats[:] = self._heartbeats
        part.replace(self._path)
        self.reset(epoch)
        return board

    def post(self, step: int, outcome: SnapshotOutcome) -> None:
        """Say what became of the snapshot of `step` in this epoch."""
        for i in range(1, WORDS):
            if self._words[i] >> 2 == step and self._words[i]:
                self._words[i] = step * 4 + 1 + outcome
                return
        self._words[1 + self._next] = step * 4 + 1 + outcome
        self._next = (self._next + 1) % (WORDS - 1)

    def fail_pending(self) -> None:
        """A predecessor of this SMP died in the middle: what it had not finished will not be finished."""
        pending = self._words & 3 == 1 + SnapshotOutcome.PENDING
        pending[0] = False
        self._words[pending] += SnapshotOutcome.FAILED - SnapshotOutcome.PENDING

    def outcome(self, epoch: int, step: int) -> SnapshotOutcome:
        """What became of a snapshot; one that nothing was said of is pending, one of an older epoch has failed."""
        if self._words[0] != epoch:
            return SnapshotOutcome.FAILED if self._words[0] > epoch else SnapshotOutcome.PENDING
        posted = self.posted(step)
        return SnapshotOutcome.PENDING if posted is None else posted

    def posted(self, step: int) -> SnapshotOutcome | None:
        """What was said of the snapshot of `step` in this epoch; None: nothing, or too long ago."""
        for word in self._words[1:].tolist():
            if word and word >> 2 == step:
                return SnapshotOutcome((word & 3) - 1)
        return None

    def post_due(self, due: bool) -> None:
        """Say whether this node is ready to persist a snapshot."""
        self._due[0] = due

    @property
    def due(self) -> bool:
        """Whether this node is ready to persist a snapshot."""
        return bool(self._due[0])

    def pause(self, index: int, until_s: float) -> None:
        """The trainer `index` of this node wants no encoding traffic until `until_s` (`time.monotonic`) or `resume`."""
        self._pauses[index % PAUSE_WORDS] = int(until_s * 1e9)

    def resume(self, index: int) -> None:
        """The trainer `index` does not mind traffic any more."""
        self._pauses[index % PAUSE_WORDS] = 0

    def paused_for(self, now_s: float) -> float:
        """How long some trainer still wants quiet, in seconds from `now_s`: at most `MAX_PAUSE_S`, whatever it says."""
        latest: int = max(self._pauses.tolist())
        return min(max(latest / 1e9 - now_s, 0.0), MAX_PAUSE_S)

    def heartbeat(self, row: int, phase: TrainerPhase, step: int) -> None:
        """The trainer of that row is alive, in a phase, with `step` steps finished. Two stores; no system call."""
        self._count += 1
        self._heartbeats[row * HEARTBEAT_WORDS + 1] = step
        self._heartbeats[row * HEARTBEAT_WORDS] = self._count << 2 | phase

    def copying(self, row: int, step: int | None) -> None:
        """The trainer of that row copies the snapshot of `step`; None: none any more."""
        self._heartbeats[row * HEARTBEAT_WORDS + 2] = 0 if step is None else step + 1

    def phase(self, row: int) -> TrainerPhase:
        """Where the trainer of that row is."""
        return TrainerPhase(int(self._heartbeats[row * HEARTBEAT_WORDS]) & 3)

    def heartbeats(self, row: int) -> tuple[int, int, int]:
        """Beats and phase in one word, steps finished, and the step being copied plus 1, or 0."""
        word, step, copying = self._heartbeats[row * HEARTBEAT_WORDS : row * HEARTBEAT_WORDS + 3].tolist()
        return word, step, copying
