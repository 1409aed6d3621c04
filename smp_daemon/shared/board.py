"""The board: shared 8-byte words on which an SMP posts what its trainers wait for, and its trainers post heartbeats and
ask for quiet.

Trainers map it, and read and write it without a system call, so it costs the training loop nothing, however busy or
starved the SMP is. Its words, in order:

* `WORDS`: the epoch, then for each recent snapshot ``step * 4 + 1 + outcome``, or 0 if unused.
* `PAUSE_WORDS`, one per trainer: the time until which the SMP should send no encoding traffic, in nanoseconds of
  `time.monotonic`, which all processes of a host share; 0: it may send.
* `HEARTBEAT_ROWS` rows, one per trainer, which the SMP watches for changes: a count of heartbeats with the phase, the
  last finished step, the step being copied plus 1, and a spare word. Two of the spare words are the SMP's. First row: a
  count that grows while it works on bytes, so that whoever waits for it can tell slow work from none. Second row:
  whether this node is to be taken away, and the job is to end at a boundary for that.
* The last words, written by the SMP: whether this node is ready to persist a snapshot; how many slots of every shard
  trainers may use in this epoch, or `REFUSED`; and how far the parity is repaired that trainers have ordered in this
  epoch, as ``1 + RepairState``, or 0 if none was ordered.

Order. Every word is aligned and stored whole, so a reader sees the old or the new value, on Arm as on x86. A word
says that something is so, and stays so while the epoch lasts; whoever acts on it asks the SMP for the rest over a
socket, or opens a file. So one order matters: what a word speaks of comes before the word. It does, because all of it
(a record put in place by a rename, a slot file that gets its name, a peer's message) is a system call of the thread
that posts the word, or of one that held the store's lock before it. The kernel's locks, and the interpreter's lock
that a thread takes again after such a call, are a release and then an acquire, which no later store passes on either
architecture. The words are independent of each other and may be read in any order. A reader need not see a word at
once: there is no handshake that two stores could miss.

A new epoch has a new file, made complete before it gets the board's name. `Board.succeeded` clears the words of the old
file before it changes the epoch there, and never writes to it again.
"""

from __future__ import annotations

import errno
import mmap
import os
import stat
from enum import IntEnum
from pathlib import Path

import numpy as np

from holdfast.smp_daemon.shared.errors import ProtocolError, SmpUnavailable
from holdfast.smp_daemon.shared.records import PART, not_written
from holdfast.smp_daemon.shared.system import MACHINE, Files, opened

WORDS = 16
"""The epoch and the outcomes of the newest snapshots, written by the SMP."""

PAUSE_WORDS = 64
"""Words written by trainers: trainer i of the node has word i modulo this number."""

HEARTBEAT_ROWS = 64
HEARTBEAT_WORDS = 4
"""Words of a row, one of them spare. A row takes half a cache line, and shares no word with another row."""

NODE_WORDS = 3
"""Words written by the SMP about the node: due, ready, repair."""

REFUSED = -1
"""Posted instead of the number of slots that may be used: there is no memory for them."""

MAX_PAUSE_S = 1.0
"""Longest pause of traffic at a time: a trainer that died or forgot to `resume` must not stop protection."""


class SnapshotOutcome(IntEnum):
    """The outcome of a snapshot. Ordered so that the job's outcome is the minimum over its nodes."""

    FAILED = 0
    PENDING = 1
    PROTECTED = 2


class RepairState(IntEnum):
    """Progress of recomputing parity. Ordered so that the job's state is the minimum over its ranks."""

    HOPELESS = 0
    """Too little of the snapshot is left to compute the parity from."""
    UNDER_WAY = 1
    WHOLE = 2


class TrainerPhase(IntEnum):
    """What the training thread of a trainer is doing."""

    GONE = 0
    START = 1
    RESTORE = 2
    STEP = 3


class Board:
    """One process's mapping of the board.

    Needs no lock: at any time each word has one writer, the SMP or a trainer, and words are read and written whole.
    """

    def __init__(self, path: Path, *, create: bool = False, files: Files = MACHINE) -> None:
        """Map the board.

        Raises:
            SmpUnavailable: there is none at `path`: its SMP has removed it at the end of the job.
            ProtocolError: the file is not a board of this user.
            ArenaTooSmall: one cannot be created.
        """
        self._path = path
        self._files = files
        length = (WORDS + PAUSE_WORDS + HEARTBEAT_ROWS * HEARTBEAT_WORDS + NODE_WORDS) * 8
        try:
            with opened(path, os.O_RDWR | (os.O_CREAT if create else 0), files) as fd:
                if create:
                    files.ftruncate(fd, length)  # a damaged one gets the right length
                    files.posix_fallocate(fd, 0, length)  # on a full file system the first store would raise SIGBUS
                status = files.fstat(fd)
                if not stat.S_ISREG(status.st_mode) or status.st_size < length or status.st_uid != files.getuid():
                    raise OSError(errno.EINVAL, f"{status.st_size} bytes, owned by user {status.st_uid}")
                mapped = files.map(fd, length)
        except OSError as error:
            if create:
                raise not_written(path, error) from error
            kind = SmpUnavailable if isinstance(error, FileNotFoundError) else ProtocolError
            raise kind(
                f"{path} is not a board: {error.strerror}: end this node's SMP with `holdfast smp stop`; the next one "
                "makes another"
            ) from error
        mapped.madvise(mmap.MADV_DONTDUMP)
        words = np.frombuffer(mapped, dtype=np.int64)
        pauses, heartbeats = WORDS, WORDS + PAUSE_WORDS
        self._words, self._pauses = words[:pauses], words[pauses:heartbeats]
        self._heartbeats, self._node = words[heartbeats:-NODE_WORDS], words[-NODE_WORDS:]
        if create:
            self._pauses[:] = 0  # whoever asked for quiet may be gone
        self._count = 0
        newest = int(self._words[1:].argmax())
        self._next = (newest + 1) % (WORDS - 1) if self._words[1 + newest] else 0  # a predecessor may have posted some

    @property
    def epoch(self) -> int:
        """The epoch of the outcomes on the board."""
        return int(self._words[0])

    def reset(self, epoch: int) -> None:
        """Clear what was posted of another epoch."""
        self._words[1:] = 0
        self._node[1:] = 0
        self._words[0] = epoch

    def succeeded(self, epoch: int) -> Board:
        """Replace this board by one of a newer epoch. Trainers that still map the old board read there that their epoch
        is over, and nobody reads their requests for quiet.
        """
        part = self._path.with_name(self._path.name + PART)
        part.unlink(missing_ok=True)
        board = Board(part, create=True, files=self._files)
        board._path = self._path
        board.reset(epoch)
        board.post_due(self.due)
        board._heartbeats[:] = self._heartbeats
        part.replace(self._path)
        self.reset(epoch)
        return board

    def post(self, step: int, outcome: SnapshotOutcome) -> None:
        """Post the outcome of the snapshot of `step` in this epoch."""
        for i in range(1, WORDS):
            if self._words[i] >> 2 == step and self._words[i]:
                self._words[i] = step * 4 + 1 + outcome
                return
        self._words[1 + self._next] = step * 4 + 1 + outcome
        self._next = (self._next + 1) % (WORDS - 1)

    def fail_pending(self) -> None:
        """Mark all pending snapshots as failed. For an SMP whose predecessor died and left them unfinished."""
        pending = self._words & 3 == 1 + SnapshotOutcome.PENDING
        pending[0] = False
        self._words[pending] += SnapshotOutcome.FAILED - SnapshotOutcome.PENDING

    def outcome(self, epoch: int, step: int) -> SnapshotOutcome:
        """The outcome of a snapshot. Without a post it is pending; a snapshot of an older epoch has failed."""
        if self._words[0] != epoch:
            return SnapshotOutcome.FAILED if self._words[0] > epoch else SnapshotOutcome.PENDING
        posted = self.posted(step)
        return SnapshotOutcome.PENDING if posted is None else posted

    def posted(self, step: int) -> SnapshotOutcome | None:
        """The outcome posted for `step` in this epoch; None if there was none, or newer ones have replaced it."""
        for word in self._words[1:].tolist():
            if word & 3 and word >> 2 == step:  # no outcome has 0: a bit may have flipped while no SMP ran
                return SnapshotOutcome((word & 3) - 1)
        return None

    def supersedes(self, epoch: int, step: int) -> bool:
        """Whether a newer snapshot than that one is posted as protected."""
        done = [word >> 2 for word in self._words[1:].tolist() if word & 3 == 1 + SnapshotOutcome.PROTECTED]
        return any((self.epoch, each) > (epoch, step) for each in done)

    def post_due(self, due: bool) -> None:
        """Post whether this node is ready to persist a snapshot."""
        self._node[0] = due

    @property
    def due(self) -> bool:
        """Whether this node is ready to persist a snapshot."""
        return bool(self._node[0])

    def post_ready(self, count: int) -> None:
        """Post how many slots of every shard, and of parity, trainers may use; or `REFUSED`."""
        self._node[1] = count

    def ready(self, epoch: int) -> int:
        """How many slots of every shard, and of parity, trainers may use in that epoch; or `REFUSED`."""
        count = int(self._node[1])
        return count if self.epoch == epoch else 0

    def post_repair(self, state: RepairState | None) -> None:
        """Post how far the parity is repaired that trainers have ordered; None: they have ordered none."""
        self._node[2] = 0 if state is None else 1 + state

    def repair(self, epoch: int) -> RepairState:
        """How far the parity is repaired that trainers have ordered in that epoch; under way if it is not known."""
        word = int(self._node[2])
        return RepairState(word - 1) if word and self.epoch == epoch else RepairState.UNDER_WAY

    def note_move(self) -> None:
        """The SMP has moved some bytes. Called by one of its threads at a time."""
        self._heartbeats[HEARTBEAT_WORDS - 1] += 1

    @property
    def moves(self) -> int:
        """A count that grows while the SMP works on bytes."""
        return int(self._heartbeats[HEARTBEAT_WORDS - 1])

    def post_leaving(self, leaving: bool) -> None:
        """Post whether trainers are to end at a boundary because this node is to be taken away."""
        self._heartbeats[2 * HEARTBEAT_WORDS - 1] = leaving

    @property
    def leaving(self) -> bool:
        """Whether trainers are to end at a boundary because this node is to be taken away."""
        return bool(self._heartbeats[2 * HEARTBEAT_WORDS - 1])

    def pause(self, index: int, until_s: float) -> None:
        """Ask for no encoding traffic until `until_s` (`time.monotonic`) or `resume`. `index`: trainer of this node."""
        self._pauses[index % PAUSE_WORDS] = int(until_s * 1e9)

    def resume(self, index: int) -> None:
        """Withdraw the request of trainer `index`."""
        self._pauses[index % PAUSE_WORDS] = 0

    def paused_for(self, now_s: float) -> float:
        """How long any trainer still wants quiet, in seconds from `now_s`, but at most `MAX_PAUSE_S`."""
        latest: int = max(self._pauses.tolist())
        return min(max(latest / 1e9 - now_s, 0.0), MAX_PAUSE_S)

    def heartbeat(self, row: int, phase: TrainerPhase, step: int) -> None:
        """Note that the trainer of `row` is alive, its phase and its finished steps. Two stores; no system call."""
        self._count += 1
        self._heartbeats[row * HEARTBEAT_WORDS + 1] = step
        self._heartbeats[row * HEARTBEAT_WORDS] = self._count << 2 | phase

    def copying(self, row: int, step: int | None) -> None:
        """Note that the trainer of `row` is copying the snapshot of `step`; None: it no longer copies one."""
        self._heartbeats[row * HEARTBEAT_WORDS + 2] = 0 if step is None else step + 1

    def phase(self, row: int) -> TrainerPhase:
        """The phase of the trainer of `row`."""
        return TrainerPhase(int(self._heartbeats[row * HEARTBEAT_WORDS]) & 3)

    def heartbeats(self, row: int) -> tuple[int, int, int]:
        """The words of a row: count and phase in one, finished steps, and the step being copied plus 1, or 0."""
        word, step, copying = self._heartbeats[row * HEARTBEAT_WORDS : row * HEARTBEAT_WORDS + 3].tolist()
        return word, step, copying
