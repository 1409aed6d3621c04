"""Runs a command to its end and kills its processes, one after another, at instants drawn from a seed.

The trainers report through a named pipe when they start and complete a step; see `tools.real.probe`. A kill is due a
number of steps after the last start of its victim, plus a drawn fraction of a step.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import Popen
from typing import NamedTuple

from holdfast.sessions import end, start

PIPE = "REAL_PIPE"
"""The environment variable that names the pipe."""

LOOK_S = 0.5
"""How often to check whether the command has ended while no reports arrive, in seconds."""


class Kill(NamedTuple):
    """Kills `rank` after it has reported `after` `times` times since its start, plus the fraction `later` of a step."""

    rank: int
    after: str
    times: int
    later: float


class Outcome(NamedTuple):
    """The end of a run. `status`: None if it hung. `killed`: a description of each kill. `hung`: it timed out."""

    status: int | None
    killed: list[str]
    hung: bool
    seconds: float


def plan(seed: int | str, kills: int, ranks: int, steps: int, evaluations: int) -> list[Kill]:
    """Plan kills that are spread over a run. If the run has evaluations, the last kill is right after an evaluation.

    Raises:
        ValueError: the run has too few steps for this number of kills.
    """
    if steps < 3 * (kills + 1):
        raise ValueError(f"{steps} steps are too few for {kills} kills: give it {3 * (kills + 1)}")
    drawn = random.Random(seed)
    share = steps // (kills + 1)
    planned = []
    for number in range(kills):
        rank, times, later = drawn.randrange(ranks), drawn.randint(max(2, share // 2), share), drawn.random()
        if evaluations and number == kills - 1:
            planned.append(Kill(rank, "eval", 1, 0.0))
        else:
            planned.append(Kill(rank, "step", times, later))
    return planned


def drive(
    command: Sequence[str], environment: dict[str, str], folder: Path, kills: Sequence[Kill],
    *, again: bool, deadline_s: float,
) -> Outcome:  # fmt: skip
    """Run a command. Blocks until it has ended or `deadline_s` has passed; leaves no trainer behind.

    Args:
        folder: the command runs in its ``work`` and prints into its ``log``; trainers report through its ``told``.
        again: start the command again after each kill, as it does not restart by itself.
    """
    began = time.monotonic()
    log, pipe, work = folder / "log", folder / "told", folder / "work"
    os.mkfifo(pipe)
    told = os.open(pipe, os.O_RDWR | os.O_NONBLOCK)
    process = start(command, environment | {PIPE: str(pipe)}, log, work)
    watch = _Watch(process, told, began + deadline_s)
    try:
        for kill in kills:
            if not watch.until(kill):
                break
            watch.kill(kill)
            if again:
                process.wait()
                watch.process = process = start(command, environment | {PIPE: str(pipe)}, log, work)
        hung = not watch.ended()
        return Outcome(None if hung else process.returncode, watch.killed, hung, time.monotonic() - began)
    finally:
        end(process)
        watch.end_trainers(pipe)
        os.close(told)
        pipe.unlink()


class _Watch:
    """Reads the trainers' reports and kills trainers."""

    def __init__(self, process: Popen[bytes], told: int, deadline: float) -> None:
        self.process = process
        self.killed: list[str] = []
        self._told = told
        self._deadline = deadline
        self._rest = b""
        self._pids: dict[int, int] = {}
        self._counts: dict[tuple[int, str], int] = {}
        self._last: dict[int, float] = {}
        self._step_s: dict[int, float] = {}

    def until(self, kill: Kill) -> bool:
        """Block until a kill is due. Returns False if the command ended or the deadline passed first."""
        before = self._pids.get(kill.rank) if self.killed else None  # the victim must have restarted
        while self._pids.get(kill.rank) == before or self._counts.get((kill.rank, kill.after), 0) < kill.times:
            if not self._read(LOOK_S) and self._over():
                return False
        due = time.monotonic() + kill.later * self._step_s.get(kill.rank, 0.0)
        while (left := due - time.monotonic()) > 0:
            self._read(left)
        return True

    def kill(self, kill: Kill) -> None:
        """SIGKILL the victim now."""
        try:
            os.kill(self._pids[kill.rank], signal.SIGKILL)
        except ProcessLookupError:
            return  # it has just ended by itself
        count = self._counts.get((kill.rank, "step"), 0)
        self.killed.append(f"rank {kill.rank}, {count} steps after its start, {kill.later:.2f} of a step later")
        if kill.after != "step":
            self.killed[-1] = f"rank {kill.rank}, {count} steps after its start, right after an evaluation"

    def ended(self) -> bool:
        """Block until the command has ended. Returns False if the deadline passed first."""
        while not self._over():
            self._read(LOOK_S)
        return self.process.poll() is not None

    def end_trainers(self, pipe: Path) -> None:
        """Kill the remaining trainers, which under torchrun have their own sessions and outlive the launcher."""
        for pid in self._pids.values():
            try:
                if f"{PIPE}={pipe}".encode() in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                    os.kill(pid, signal.SIGKILL)
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended

    def _over(self) -> bool:
        return self.process.poll() is not None or time.monotonic() > self._deadline

    def _read(self, wait_s: float) -> bool:
        """Read the reports that arrive within this time; return whether any did."""
        if not select.select([self._told], [], [], wait_s)[0]:
            return False
        *lines, self._rest = (self._rest + os.read(self._told, 65536)).split(b"\n")
        now = time.monotonic()
        for line in lines:
            kind, rank, pid = line.decode().split()
            self._note(kind, int(rank), int(pid), now)
        return True

    def _note(self, kind: str, rank: int, pid: int, now: float) -> None:
        if kind == "start":
            self._pids[rank] = pid
            self._counts = {key: count for key, count in self._counts.items() if key[0] != rank}
            self._last.pop(rank, None)
        elif self._pids.get(rank) == pid:
            self._counts[rank, kind] = self._counts.get((rank, kind), 0) + 1
            if kind == "step":
                if rank in self._last:
                    self._step_s[rank] = now - self._last[rank]
                self._last[rank] = now
