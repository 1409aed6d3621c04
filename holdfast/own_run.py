"""The runs of ``holdfast chaos run --seed N -- COMMAND``: undisturbed, and with faults; see `holdfast.own_command`."""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from chaos.faults import send_signals
from holdfast import sessions
from holdfast.audit import Notes, read, read_last
from holdfast.own_command import IN_A_RECOVERY, KINDS, PAUSE_S, STEP, OwnFault, OwnPlan, OwnVerdict, draw, judge
from holdfast.sessions import tail
from smp_daemon.errors import DeadlineExceeded, HoldfastError
from smp_daemon.paths import ARENA_ENV, arena_base, arena_path, read_owner
from smp_daemon.points import ENV as POINTS_ENV
from smp_daemon.spawn import find_leftovers, remove
from snapshot.audit import Orders

JOB = "chaos"
PATIENCE_S = 30.0
"""A command that has neither ended nor trained for so long after a fault is ended, as a scheduler would."""

LOOK_EVERY_S = 0.5
ANSWER_DEADLINE_S = 5.0
END_DEADLINE_S = 10.0
SIGNALS = {"kill-trainer": signal.SIGKILL, "term-trainer": signal.SIGTERM, "segv-trainer": signal.SIGSEGV}


def run(plan: OwnPlan, progress: Callable[[str], None]) -> OwnVerdict:
    """Run the command three times, and judge. Blocks; leaves nothing behind.

    Raises:
        HoldfastError: an undisturbed run did not do what it should; the message ends with what it printed.
    """
    base = arena_base()
    base.mkdir(mode=0o700, parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="chaos-", dir=base) as text:
        folder = Path(text)
        try:
            undisturbed = []
            for number, name in enumerate(("undisturbed", "undisturbed again")):
                progress(name)
                undisturbed.append(_undisturbed(plan, folder / f"run{number}", name))
            first, second = undisturbed
            if len(first) != len(second):
                raise HoldfastError(f"{len(first)} ranks trained undisturbed, and {len(second)} the second time")
            faults = draw(plan.seed, plan.faults, len(first), plan.steps, double=plan.double, other=bool(plan.other))
            return _Disturbed(plan, folder / "run2", faults, progress).run(first, second)
        finally:
            for leftover in find_leftovers(folder):
                remove(leftover)


def _environment(plan: OwnPlan, folder: Path) -> dict[str, str]:
    orders = Orders(str(folder / "notes"), plan.steps)
    return (
        os.environ
        | orders.to_environment()
        | {ARENA_ENV: str(folder / "arena"), "HOLDFAST_JOB": JOB, "HOLDFAST_OVERHEAD_BUDGET": "0"}
    )


def _undisturbed(plan: OwnPlan, folder: Path, name: str) -> list[Notes]:
    notes = folder / "notes"
    notes.mkdir(parents=True)
    log = folder / "log"
    try:
        status = sessions.run(plan.command, _environment(plan, folder), log, plan.deadline_s, f"{name} run")
    finally:
        _end_all(folder)
    if status:
        raise HoldfastError(f"the {name} run ended with status {status}\n{tail(log)}")
    return read_last(notes, log, name)


class _Disturbed:
    """The run with faults: starts the command until it ends well, and hears of every point that it comes to."""

    def __init__(
        self, plan: OwnPlan, folder: Path, faults: Sequence[OwnFault], progress: Callable[[str], None]
    ) -> None:
        self._plan = plan
        self._folder = folder
        self._faults = faults
        self._progress = progress
        self._injected: list[OwnFault] = []
        self._stopped: list[tuple[float, int]] = []
        self._leaks: list[str] = []
        self._ranks: dict[int, int] = {}
        self._dying: set[int] = set()
        self._before: set[int] = set()
        self._process: subprocess.Popen[bytes]
        self._log = folder / "log"

    def run(self, first: Sequence[Notes], second: Sequence[Notes]) -> OwnVerdict:
        """Until the command has ended well, hangs, or has ended badly more often than there are faults."""
        notes = self._folder / "notes"
        notes.mkdir(parents=True)
        began, starts, status, hang = time.monotonic(), 0, 1, False
        most = sum(KINDS[fault.kind].ends for fault in self._faults) + 1
        problems: list[str] = []
        with self._hearing() as selector:
            try:
                while status and starts < most and not hang:
                    starts += 1
                    self._progress("with faults" if starts == 1 else f"started again ({starts - 1})")
                    status, hang = self._live(selector)
            finally:
                self._end()
        leaks = tuple(self._leaks)
        report, again, lost, found = judge(first, second, read(notes), self._plan.ignore, self._plan.steps)
        if hang:
            problems.append(f"it did not end within {self._plan.deadline_s:.0f} s")
        elif status:
            problems.append(f"it ended with status {status} in the end: {tail(self._log)[-600:]}")
        problems += found
        if len(self._injected) < len(self._faults):
            problems.append(f"{len(self._faults)} faults were asked for, {len(self._injected)} were done")
        problems += [f"left behind: process {leak}" for leak in leaks]
        epochs = len({process.epoch for processes in read(notes) for process in processes})
        return OwnVerdict(
            tuple(self._faults),
            tuple(self._injected),
            starts,
            epochs,
            again,
            lost,
            hang,
            leaks,
            time.monotonic() - began,
            report,
            tuple(problems),
        )

    @contextmanager
    def _hearing(self) -> Iterator[selectors.BaseSelector]:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener, selectors.DefaultSelector() as selector:
            listener.bind(str(self._folder / "points.sock"))
            listener.listen(64)
            listener.settimeout(ANSWER_DEADLINE_S)
            selector.register(listener, selectors.EVENT_READ)
            yield selector

    def _live(self, selector: selectors.BaseSelector) -> tuple[int, bool]:
        """One start of the command: its status, and whether it hung."""
        limit = time.monotonic() + self._plan.deadline_s
        rules = sorted({(point, None) for fault in self._faults for point in (fault.point, STEP)})
        points = {"socket": str(self._folder / "points.sock"), "who": "job", "rules": rules}
        environment = _environment(self._plan, self._folder) | {POINTS_ENV: json.dumps(points)}
        self._process = sessions.start(self._plan.command, environment, self._log)
        ended = os.pidfd_open(self._process.pid)
        selector.register(ended, selectors.EVENT_READ)
        try:
            size, moved, hurt = -1, time.monotonic(), False
            while self._process.poll() is None:
                now = time.monotonic()
                for key, _ in selector.select(LOOK_EVERY_S):
                    if key.fd != ended:
                        hurt |= self._hear(key.fileobj)
                self._wake(now)
                noted = sum(file.stat().st_size for file in (self._folder / "notes").iterdir())
                size, moved = (noted, now) if noted != size else (size, moved)
                if now > limit:
                    return 1, True
                if hurt and now - moved > PATIENCE_S:
                    self._progress(f"it has not trained for {PATIENCE_S:.0f} s, and is ended")
                    break
            status = self._process.poll()
            if status == 0:
                _, left = psutil.wait_procs(processes_of(self._folder), END_DEADLINE_S)
                self._leaks += [f"{process.pid} {process.name()}" for process in left]
            return 1 if status is None else status, False
        finally:
            selector.unregister(ended)
            os.close(ended)
            self._end()

    def _hear(self, listener: Any) -> bool:
        """A process has come to a point: do what is due there, and let it go on. Whether training ends of it."""
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(ANSWER_DEADLINE_S)
            with connection.makefile("r") as lines:
                said = json.loads(lines.readline() or "null")
            if said is None or not psutil.pid_exists(said["pid"]):
                return False  # it was killed on its way, or while it waited here
            due = self._next(said["pid"])
            if due is not None and due.matches(self._rank_of(said["pid"]), said["point"], said["step"]):
                self._progress(f"{due.kind} at {said['point']} of step {said['step']}, rank {due.rank}")
                self._inject(due, said["pid"])
                self._injected.append(due)
            else:
                due = None
            with suppress(BrokenPipeError, ConnectionResetError):  # it is dead
                connection.sendall(b"g")
            return due is not None and KINDS[due.kind].ends

    def _next(self, pid: int) -> OwnFault | None:
        """What may be done next where `pid` is. Nothing to what is dying; and a recovery is of other processes."""
        left = self._faults[len(self._injected) :]
        if not left or pid in self._dying or self._process.poll() is not None:
            return None
        return None if left[0].point in IN_A_RECOVERY and pid in self._before else left[0]

    def _inject(self, fault: OwnFault, pid: int) -> None:
        """Do it. `pid`: of the process that has come to the point."""
        if KINDS[fault.kind].ends:
            self._before = self._trainers(pid)
        match fault.kind:
            case "kill-trainer" | "term-trainer" | "segv-trainer":
                self._dying.add(pid)  # which takes a moment: it may come to another point
                send_signals(pid, SIGNALS[fault.kind])
            case "kill-trainers":
                for process in self._trainers(pid):
                    send_signals(process, signal.SIGKILL)
            case "kill-launcher":
                self._process.kill()
                self._process.wait(END_DEADLINE_S)  # what it leaves is in no recovery
            case "stop-trainer":
                self._stop(pid)
            case "kill-smp":
                send_signals(self._smp(), signal.SIGKILL)
            case "stop-smp":
                self._stop(self._smp())
            case "kill-other":
                for other in self._others():
                    send_signals(other, signal.SIGKILL)

    def _trainers(self, pid: int) -> set[int]:
        newest = [processes[-1] for processes in read(self._folder / "notes") if processes]
        return {pid, *(notes.pid for notes in newest)}

    def _others(self) -> list[int]:
        """Processes that the plan's word names. Raises `HoldfastError` if there is none."""
        word, found = self._plan.other, []
        for process in processes_of(self._folder):
            with suppress(psutil.Error):  # it has just ended
                if any(word in part for part in process.cmdline()):
                    found.append(process.pid)
        if not found:
            raise HoldfastError(f"no process of the command has {word!r} in its command line")
        return found

    def _rank_of(self, pid: int) -> int | None:
        """Of a process whose launcher said it in the environment, or that noted its pid."""
        if pid not in self._ranks:
            rank = _rank_in_environment(pid)
            if rank is not None:
                self._ranks[pid] = rank
            for noted, processes in enumerate(read(self._folder / "notes")):
                self._ranks |= {notes.pid: noted for notes in processes}
        return self._ranks.get(pid)

    def _smp(self) -> int:
        owner = read_owner(arena_path(JOB, self._folder / "arena"))
        if owner is None:
            raise HoldfastError(f"no SMP serves the job\n{tail(self._log)}")
        return owner.pid

    def _stop(self, pid: int) -> None:
        send_signals(pid, signal.SIGSTOP)
        self._stopped.append((time.monotonic() + PAUSE_S, pid))

    def _wake(self, now: float) -> None:
        """Let those go on whose time has come."""
        for each in [each for each in self._stopped if each[0] <= now]:
            self._stopped.remove(each)
            send_signals(each[1], signal.SIGCONT)

    def _end(self) -> None:
        self._wake(float("inf"))
        _end_all(self._folder)
        sessions.end(self._process)


def _rank_in_environment(pid: int) -> int | None:
    try:
        environment = psutil.Process(pid).environ()
    except psutil.Error:
        return None
    said = [environment.get(name, "") for name in ("RANK", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID")]
    return next((int(rank) for rank in said if rank.isdigit()), None)


def processes_of(folder: Path) -> list[psutil.Process]:
    """Those that a command left that was started with `folder` in its environment, but for SMPs."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            if str(folder) in "".join(process.environ().values()) and "smp_daemon" not in process.cmdline():
                found.append(process)
        except psutil.Error:
            continue  # it has ended, or is another user's
    return found


def _end_all(folder: Path) -> None:
    """Kill all that is left of a command, whatever session it is in, and wait until it is gone."""
    left = processes_of(folder)
    for each in left:
        send_signals(each.pid, signal.SIGKILL)
    _, alive = psutil.wait_procs(left, END_DEADLINE_S)
    if alive:
        raise DeadlineExceeded(f"processes {[each.pid for each in alive]} did not end within {END_DEADLINE_S:.0f} s")
