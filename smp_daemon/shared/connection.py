"""A process's connection to its node's SMP: found, greeted and watched, and calls over it. Imports neither torch nor
grpc, and starts no thread, as a trainer may fork at any time.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from holdfast.smp_daemon.shared.board import HEARTBEAT_ROWS, Board, TrainerPhase
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DeadlineExceeded,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
)
from holdfast.smp_daemon.shared.limits import CALL_DEADLINE_S, MOVE_DEADLINE_S, move_deadline
from holdfast.smp_daemon.shared.messages import Greeted, Hello, Request
from holdfast.smp_daemon.shared.paths import known_owner, not_private, socket_path
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.shared.transport import Message, SocketStream, call, connect
from holdfast.smp_daemon.shared.versions import RELEASE, check_range, spoken


class SmpConnection:
    """A connection to the SMP of an arena. Calls from several threads take turns; each blocks until the answer.

    Attributes:
        epoch: the epoch that was joined last; None: none was.
        node, pid: of the SMP that serves there.
        board: of the epoch that was joined last. Looking at it needs no answer of the SMP.

    Every call raises `SmpUnavailable` if the SMP is gone, `DeadlineExceeded` if it does not answer in time, and
    whatever error the SMP replies with.
    """

    def __init__(self, arena: Path, job: str, coord: str | None = None, system: System = MACHINE) -> None:
        """Connect. Blocks for seconds if processes of an earlier start of the job are still ending.

        Args:
            coord: the trainer's coordinate, if the SMP should watch it. The trainer must then call `heartbeat`.

        Raises:
            SmpUnavailable: no SMP serves `arena`.
            ConfigError: the SMP serves another job; or, with `coord`, another run of this job is active on this node.
            VersionMismatch: the SMP has a version of holdfast that this one cannot talk to.
        """
        self.arena = arena
        self.system = system
        self._coord = coord
        self._row: int | None = None
        self._job = job
        # Held from a request to its reply, so that the messages of several threads do not mix on the connection. The
        # training thread and those that copy, reserve and restore take it; `_call` says how long they wait for it.
        self._lock = system.Lock()
        self._stream: SocketStream | None = None
        self._connections = 0
        self._process: int | None = None
        self.epoch: int | None = None
        self.reconnect()

    def reconnect(self, deadline_s: float = CALL_DEADLINE_S) -> None:
        """Connect again after `SmpUnavailable`. Raises the errors of the constructor, and `DeadlineExceeded`."""
        self._hang_up()
        self._connections += 1
        try:
            is_served = socket_path(self.arena).exists()
        except PermissionError as error:
            closed = self.arena if self.arena.parent.stat().st_uid == os.getuid() else self.arena.parent
            raise ConfigError(f"{closed} {not_private(closed, os.getuid())}") from error
        if not is_served:
            raise SmpUnavailable(f"no SMP serves {self.arena}: start one with `python -m holdfast.smp_daemon`")
        self._stream = connect(socket_path(self.arena), deadline_s, network=self.system)
        try:
            self._greet(deadline_s)
        except BaseException:  # a signal handler may raise, too; a connection that was not greeted is none
            self._hang_up()
            raise

    def _greet(self, deadline_s: float) -> None:
        # With an epoch the SMP takes this for a trainer that comes back, without one for a new run of the job.
        hello = Hello(job=self._job, speaks=spoken(), release=RELEASE, coord=self._coord, epoch=self.epoch)
        greeted = from_plain(Greeted, self._call(hello, deadline_s), "how an SMP greets")
        check_range(f"the SMP of {self.arena}", greeted.speaks, greeted.release)
        self.node, self.pid, row = greeted.node, greeted.pid, greeted.row
        self._watch()
        self._look_at_board()
        self._row = row if row is not None and 0 <= row < HEARTBEAT_ROWS else None

    def _watch(self) -> None:
        """Watch the process of the SMP, if it is visible here."""
        self._unwatch()
        with suppress(OSError):
            self._process = self.system.pidfd_open(self.pid)

    def _unwatch(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            self.system.close(process)

    @property
    def connection(self) -> int | None:
        """Number of the current connection; None once it is over, as far as a call or the SMP's end has shown. One
        system call; never blocks. While another thread reconnects, it may be None although there is one again."""
        stream, process = self._stream, self._process
        if stream is None or stream.closed or (process is not None and self.system.await_end(process, 0)):
            return None
        return self._connections

    def _look_at_board(self) -> None:
        """Map the board that is there now: each epoch has another file."""
        self.board = Board(self.arena / "board", files=self.system)

    def close(self) -> None:
        """Close the connection."""
        if self._row is not None:
            self.board.heartbeat(self._row, TrainerPhase.GONE, 0)
        self._row = None
        self._hang_up()
        self._unwatch()

    def _end(self, message: Request, *, removes: bool) -> None:
        if self._process is None:
            raise SmpUnavailable(f"the process of the SMP of {self.arena} is gone, or of another pid namespace")
        try:
            try:
                self._call(message)
            except SmpUnavailable:
                pass  # the SMP may end before it sends its answer
            if not self.system.await_end(self._process, CALL_DEADLINE_S):
                raise DeadlineExceeded(f"SMP {self.pid} did not end within {CALL_DEADLINE_S:.0f} s")
            if removes and (self.arena / "smp.json").exists():
                raise SmpUnavailable(f"SMP {self.pid} ended and left {self.arena} behind")
        finally:
            self.close()

    def _call(self, message: Request, deadline_s: float = CALL_DEADLINE_S, turn_s: float = -1) -> Message:
        """Send a request and return its reply. `turn_s`: timeout for another thread's call to end; -1: none."""
        if turn_s < 0:
            with self._lock:  # not `acquire`: a signal handler cannot raise between taking the lock and this block
                return self._ask(message, deadline_s)
        if not self._lock.acquire(timeout=turn_s):
            raise DeadlineExceeded(f"the SMP of {self.arena} is still busy with another call of this trainer")
        try:
            return self._ask(message, deadline_s)
        finally:
            self._lock.release()

    def _call_to_move(self, message: Request, count: int) -> Message:
        """Send a request and return its reply, however long the SMP works on it, as long as bytes move.

        `count`: most bytes that the SMP works on without saying so, as when it digests them.
        """
        board = self.board
        seen = board.moves

        def moves() -> bool:
            nonlocal seen
            before, seen = seen, board.moves
            return seen != before

        with self._lock:
            stream = self._connected()
            stream.goes_on = moves
            try:
                return self._ask(message, move_deadline(count))
            finally:
                stream.goes_on = None

    def _ask(self, message: Request, deadline_s: float) -> Message:
        stream = self._connected()
        stream.set_deadline(deadline_s)
        try:
            reply, payload = call(stream, message)
        except (DeadlineExceeded, SmpUnavailable) as error:
            if not stream.closed:  # the SMP has answered: this is its own error
                raise
            raise type(error)(self._told(error)) from error
        if payload:
            stream.close()
            raise ProtocolError("the SMP sent bytes that were not requested")
        return reply

    def _told(self, error: HoldfastError) -> str:
        """What to tell of a connection that failed: whose it was, and what to do."""
        owner = known_owner(self.arena, self.system)
        if owner is None:
            return f"the SMP of {self.arena}: {error}"
        told = f"SMP {owner.pid} of node {owner.node}: {error}"
        if not isinstance(error, DeadlineExceeded):
            return told
        return f"{told}: `kill -CONT {owner.pid}` if it is stopped, else kill it: the next takes over what it holds"

    def _connected(self) -> SocketStream:
        if self._stream is None:
            raise SmpUnavailable(f"the connection to the SMP of {self.arena} is over")
        return self._stream

    def _call_for_bytes(self, message: Request, out: memoryview, what: str) -> tuple[Message, int]:
        """Send a request whose reply comes with as many bytes as `out` takes. Returns the reply and their digest."""
        with self._lock:
            stream = self._connected()
            stream.set_deadline(MOVE_DEADLINE_S)
            due = False
            try:
                reply, payload = call(stream, message)
                due = True
                if payload != out.nbytes:
                    raise ProtocolError(f"{what} has {payload} bytes there, and {out.nbytes} here")
                return reply, stream.receive_into(out)
            except BaseException as error:
                if due or not isinstance(error, HoldfastError):
                    stream.close()  # the rest of the unit would be taken for the next reply
                raise

    def _hang_up(self) -> None:
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.close()
