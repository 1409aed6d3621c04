"""Watches the trainers of this node: which are connected, have died, or hang. A thin shell around `watchdog.liveness`.

A pidfd reports the end of a process at once. Heartbeats on the board, which cost the trainer a store to memory, show
hangs. All times are by the SMP's own clock.
"""

from __future__ import annotations

import os
import select
import shutil
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from statistics import median

from holdfast.smp_daemon.shared.board import HEARTBEAT_ROWS, Board, TrainerPhase
from holdfast.smp_daemon.shared.deadlines import Deadlines
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.processes import await_end, is_running
from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.watchdog.liveness import Health, WatchedTrainer, judge

STEPS_KEPT = 32
MOST_INTERVAL_S = 1.0
"""Longest pause between two looks at the heartbeats, in seconds."""

LEAST_INTERVAL_S = 0.02
"""Shortest one. In between, eight looks fit into the shortest deadline, so that a hang is told an eighth late at
most."""

LOOK_AGAIN_S = 0.1
"""Pause before another look at whether an earlier trainer still runs, in seconds."""

FIRST_STEP_S = 0.05
"""How often heartbeats are read until each trainer of a start has finished a step, so that recoveries are timed."""

MOST_LOGGED = 4096

log = get_log(__name__)


def run_on_hang(command: str, job: str, node: str, trainer: WatchedTrainer, deadline_s: float = 60.0) -> None:
    """Run the user's shell command for a hang of `trainer`, in a session of its own. Blocks until it ends; after
    `deadline_s` it is killed, with its whole process group."""
    environment = {
        **os.environ,
        "HOLDFAST_JOB": job,
        "HOLDFAST_NODE": node,
        "HOLDFAST_COORD": trainer.coord,
        "HOLDFAST_PID": str(trainer.pid),
        "HOLDFAST_PHASE": trainer.phase,
        "HOLDFAST_STEP": str(trainer.step),
    }
    timeout = shutil.which("timeout")  # kills the command in time even if the SMP dies first
    guard = [timeout, "-s", "KILL", f"{deadline_s + 1:.0f}"] if timeout else []
    try:
        process = subprocess.Popen(
            [*guard, "/bin/sh", "-c", command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        log.error("the command for a hang of %s could not be run: %s", trainer.coord, error)
        return
    try:
        said, _ = process.communicate(timeout=deadline_s)
        text = said[:MOST_LOGGED].decode(errors="replace").strip()
        log.warning("the command for a hang of %s ended with %d: %s", trainer.coord, process.returncode, text)
    except subprocess.TimeoutExpired:
        log.error("the command for a hang of %s took over %.0f s and is killed", trainer.coord, deadline_s)
    finally:
        with suppress(ProcessLookupError, PermissionError):  # the latter: only another user's are left, as after `sudo`
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


@dataclass(slots=True)
class _Watched:
    """One trainer. Guarded by the watchdog's lock. `pidfd` is -1 if its process cannot be watched, as from another pid
    namespace."""

    pid: int
    coord: str
    row: int
    since_s: float
    hang_up: Callable[[], None] | None
    pidfd: int = -1
    word: int = 0
    moves: int = 0
    copying: int = 0
    copying_since_s: float = 0.0
    step: int = 0
    stepped_s: float | None = None
    told: int = 0
    steps_s: deque[float] = field(default_factory=lambda: deque(maxlen=STEPS_KEPT))
    ended: bool = False
    health: Health = Health.ALIVE
    own: Own = UNKNOWN
    joined: int = 0
    """The epoch that it has joined; 0: none yet, so it may be about to join a new start."""
    connected: bool = False
    """Whether its connection has not ended yet; how it ended is noted only then."""


class Watchdog:
    """Watches this node's trainers. Thread-safe. Nothing is watched until `start`."""

    def __init__(
        self,
        board: Callable[[], Board],
        deadlines: Deadlines,
        on_hang: Callable[[WatchedTrainer], None] | None,
        on_step: Callable[[int], None] = lambda step: None,
        shard_bytes: Callable[[str], int] = lambda coord: 0,
        threads: Threads = MACHINE,
    ) -> None:
        """
        Args:
            on_hang: called once per hang of a trainer, in a thread of its own; None: nothing is.
            on_step: called with the finished steps of a trainer whenever they are others; it must not block.
            shard_bytes: the length of a trainer's shard, as far as it is known; it takes no lock.
        """
        self._threads = threads
        self._board = board
        self._deadlines = deadlines
        self._on_hang = on_hang
        self._on_step = on_step
        self._shard_bytes = shard_bytes
        # Guards `_seen`, with the trainers in it, and `_callers`. Threads of connections and the watching thread hold
        # it for moments, and take no lock under it except those of loggers. They close connections, and call
        # `on_step`, `on_hang` and `note_end`, without it. `_changed` is notified when a trainer may have left.
        # `_closed` and `_stirred` are set once each, without the lock, and `_watching` with it.
        self._lock = threads.Lock()
        self._changed = threads.Condition(self._lock)
        self._seen: dict[str, _Watched] = {}
        self._callers: dict[int, list[Callable[[], None]]] = {}
        self._closed = False
        self._watching = False
        self._stirred = -1

    def start(self) -> None:
        """Watch in a separate thread until `close`."""
        self._stirred = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        with self._lock:
            self._watching = True
            for seen in self._seen.values():  # the SMP served them before it watched
                seen.pidfd = _open(seen.pid)
        self._threads.Thread(target=self._watch, name="watchdog", daemon=True).start()

    def close(self) -> None:
        """Have the thread stop watching. Returns at once."""
        self._closed = True
        self._stir()

    # ------------------------------------------------------------------ trainers come and go

    def attend(self, pid: int, coord: str, hang_up: Callable[[], None] | None = None) -> int | None:
        """Start to watch a trainer. Returns its row of the board for heartbeats; None if all rows are taken.

        Args:
            hang_up: closes its connection, as for `connected`.
        """
        with self._lock:
            before = self._seen.get(coord)
            taken = {seen.row for seen in self._seen.values()}
            row = before.row if before else next((row for row in range(HEARTBEAT_ROWS) if row not in taken), None)
            if row is None:
                log.warning("more than %d trainers on this node: %s is not watched for hangs", HEARTBEAT_ROWS, coord)
                return None
            if before is not None:
                _close(before)
            self._board().heartbeat(row, TrainerPhase.START, 0)
            seen = self._seen[coord] = _Watched(pid, coord, row, self._threads.monotonic(), hang_up)
            seen.connected = hang_up is not None
            if self._watching:
                seen.pidfd = _open(pid)
            self._changed.notify_all()
        self._stir()
        return row

    def joined(self, pid: int, coord: str, epoch: int) -> None:
        """Note that a trainer has joined an epoch, so it takes part in a start of the job. Nobody misses the dead of
        earlier ones any more: their ranks are here, or on other nodes."""
        with self._lock:
            seen = self._seen.get(coord)
            if seen is not None and seen.pid == pid:
                seen.joined = epoch
            for other in [each for each in self._seen.values() if each.ended and each.joined < epoch]:
                self._forget(other)
        self._stir()

    def note_own(self, coord: str, own: Own) -> None:
        """Note what of a step a trainer does by itself."""
        with self._lock:
            if coord in self._seen:
                self._seen[coord].own = own

    def await_room(self, pid: int, deadline_s: float) -> WatchedTrainer | None:
        """Block until no other process is at work for the job and the ends of all that have ended are noted, at most
        `deadline_s`. Returns a trainer that is still at work, or None.

        A process is at work if it has joined an epoch, runs, and has sent a heartbeat within its deadline. A process
        that is stopped, hangs or is ending does not count. Nor does one that has connected again and not joined yet, as
        all survivors of a start do before the next start. Nor does one that cannot be watched, as in another pid
        namespace.
        """
        limit = self._threads.monotonic() + deadline_s
        with self._lock:
            while not self._closed:
                other = self._other_at_work(pid)
                if other is None and not self._somebody_to_note():
                    return None
                left = limit - self._threads.monotonic()
                if left <= 0:
                    return other
                self._changed.wait(min(left, LOOK_AGAIN_S))  # no event reports that a process stops or is ending
        return None

    def _other_at_work(self, pid: int) -> WatchedTrainer | None:
        now = self._threads.monotonic()
        here_anew = {pid, *(seen.pid for seen in self._seen.values() if not seen.joined)}
        for _, seen in sorted(self._seen.items()):
            if (
                seen.pid in here_anew
                or seen.ended
                or seen.pidfd < 0
                or self._board().phase(seen.row) is TrainerPhase.GONE
            ):
                continue
            report = self._report(seen, now)
            if report.health in (Health.ALIVE, Health.LATE) and is_running(seen.pid, seen.pidfd):
                return report
        return None

    def _somebody_to_note(self) -> bool:
        """Whether a process has ended but its connection has not: the connection's thread has yet to find out."""
        return any(seen.connected and seen.pidfd >= 0 and await_end(seen.pidfd, 0) for seen in self._seen.values())

    def connected(self, pid: int, hang_up: Callable[[], None]) -> None:
        """Register a connection of a process, to be closed when the process ends: a child may keep the socket open."""
        with self._lock:
            self._callers.setdefault(pid, []).append(hang_up)

    def left(self, pid: int, hang_up: Callable[[], None], coord: str | None, note_end: Callable[[int], None]) -> None:
        """Note that a connection has ended. `coord`: its trainer, if it is the connection of one.

        Args:
            note_end: called with the number of steps that the trainer had finished, if it left without saying goodbye.
                A new start waits until it has returned.
        """
        with self._lock:
            mine = self._callers.get(pid, [])
            if hang_up in mine:
                mine.remove(hang_up)
            if not mine:
                self._callers.pop(pid, None)
            seen = self._seen.get(coord) if coord is not None else None
            if seen is None or seen.pid != pid or seen.hang_up != hang_up:
                return  # the trainer has connected again
            gone = self._board().phase(seen.row) is TrainerPhase.GONE
            step = self._board().heartbeats(seen.row)[1]
        try:
            if not gone:
                note_end(step)
        finally:
            self._has_left(seen, gone)

    def _has_left(self, seen: _Watched, gone: bool) -> None:
        with self._lock:
            seen.connected = False
            if gone and self._seen.get(seen.coord) is seen:
                self._forget(seen)
            elif seen.pidfd < 0:
                seen.ended = True  # a pidfd would report the end itself
            self._changed.notify_all()
        self._stir()

    def _forget(self, seen: _Watched) -> None:
        _close(seen)
        del self._seen[seen.coord]

    def trainers(self) -> list[WatchedTrainer]:
        """The state of all trainers, sorted by coordinate. Dead ones stay until the next start of the job is here."""
        now = self._threads.monotonic()
        with self._lock:
            return [self._report(seen, now) for _, seen in sorted(self._seen.items())]

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        shortest = self._deadlines.shortest
        interval_s = min(MOST_INTERVAL_S, max(LEAST_INTERVAL_S, shortest / 8)) if shortest else MOST_INTERVAL_S
        while not self._closed:
            with self._lock:
                begins = any(seen.joined and not seen.steps_s and not seen.ended for seen in self._seen.values())
                watched = {seen.pidfd: seen for seen in self._seen.values() if seen.pidfd >= 0 and not seen.ended}
            poll = select.poll()
            for fd in (self._stirred, *watched):
                poll.register(fd, select.POLLIN)
            for fd, events in poll.poll((min(interval_s, FIRST_STEP_S) if begins else interval_s) * 1000):
                if fd == self._stirred:
                    os.eventfd_read(fd)
                elif not events & select.POLLNVAL:  # else the pidfd was closed meanwhile
                    self._has_ended(watched[fd])
            self._look()

    def _has_ended(self, seen: _Watched) -> None:
        with self._lock:
            if self._seen.get(seen.coord) is not seen:
                return
            seen.ended = True
            self._changed.notify_all()
            hang_ups = self._callers.pop(seen.pid, [])
            if self._board().phase(seen.row) is TrainerPhase.GONE:
                self._forget(seen)
        for hang_up in hang_ups:
            hang_up()

    def _look(self) -> None:
        """Read all heartbeats, and log each change of a trainer's health once."""
        now = self._threads.monotonic()
        news, steps = [], []
        with self._lock:
            for seen in self._seen.values():
                report = self._report(seen, now)
                if seen.step != seen.told:
                    seen.told = seen.step
                    steps.append(seen.step)
                if report.health != seen.health:
                    news.append((report, seen.health))
                    seen.health = Health(report.health)
        for step in steps:
            self._on_step(step)
        for report, before in news:
            if report.health in (Health.HUNG, Health.DEAD):
                log.error("%s", report)
            else:
                log.warning("%s; it was %s", report, before)
            if report.health == Health.HUNG and self._on_hang is not None:
                threading.Thread(target=self._on_hang, args=(report,), name="on-hang", daemon=True).start()

    def _read(self, seen: _Watched, now: float) -> None:
        board = self._board()
        word, step, copying = board.heartbeats(seen.row)
        moves = board.moves if board.phase(seen.row) is TrainerPhase.RESTORE else seen.moves
        if (word, moves) != (seen.word, seen.moves):
            seen.word, seen.moves, seen.since_s = word, moves, now
        if copying != seen.copying:
            seen.copying, seen.copying_since_s = copying, now
        if step != seen.step:
            if seen.stepped_s is not None and step > seen.step:
                seen.steps_s.append((now - seen.stepped_s) / (step - seen.step))
            seen.step, seen.stepped_s = step, now

    def _report(self, seen: _Watched, now: float) -> WatchedTrainer:
        self._read(seen, now)
        verdict = judge(
            self._board().phase(seen.row),
            now - seen.since_s,
            self._deadlines,
            median(seen.steps_s) if seen.steps_s else None,
            copying_s=now - seen.copying_since_s if seen.copying else None,
            copy_bytes=self._shard_bytes(seen.coord) if seen.copying else 0,
            ended=seen.ended,
        )
        own = UNKNOWN if seen.ended else seen.own
        return WatchedTrainer(seen.coord, seen.pid, seen.step, *verdict, own)

    def _stir(self) -> None:
        if self._watching:
            os.eventfd_write(self._stirred, 1)


def _open(pid: int) -> int:
    try:
        return os.pidfd_open(pid)
    except OSError as error:
        log.info("process %d cannot be watched, so its connection is watched instead: %s", pid, error)
        return -1


def _close(seen: _Watched) -> None:
    if seen.pidfd >= 0:
        os.close(seen.pidfd)
        seen.pidfd = -1
