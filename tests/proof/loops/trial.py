"""Runs one drawn loop after another: starts an SMP for each, and forks each life from this process.

This process has imported everything that lives need. It runs no torch operation itself, so that its forks may run any.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from select import select
from typing import Any, Self

import torch
import torch._dynamo  # lives that compile a step would import it, which takes a second

import holdfast.integrations.adapters.torch_native  # noqa: F401  # so that lives need not, each for itself
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.errors import DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.spawn import parse_report, smp_options
from tests.proof.loops.draw import draw
from tests.proof.loops.judge import Event, Result, TrialOutcome, Verdict, judge
from tests.proof.loops.life import FRONT_DOOR, Life, Order
from tests.proof.loops.script import End, Loop
from tests.smp_zygote import Forked, Zygote, quiet

PR_SET_PDEATHSIG = 1
JOB = "loop"
NODE = "node0"
LIFE_DEADLINE_S = 60.0
LOG_CHARACTERS = 4000
QUIET = quiet(JOB, NODE)


class Trials:
    """Runs seeds, one at a time. Not thread-safe. Each SMP is forked from a zygote, which `close` ends."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        importlib.import_module(FRONT_DOOR)
        self._zygote = Zygote()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the process that forks SMPs."""
        self._zygote.close()

    def result(self, seed: int) -> Result:
        """Draw a seed's loop and `run` it. An error of holdfast is a result, too. Blocks."""
        loop = draw(seed)
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as directory:
            log = Path(directory) / "log"
            try:
                verdict = self.run(loop, log)
            except HoldfastError as error:
                verdict = Verdict(TrialOutcome.ERROR, f"{type(error).__name__}: {error}")
            text = log.read_text(errors="replace")[-LOG_CHARACTERS:] if log.exists() else ""
        return Result(
            seed,
            verdict.outcome,
            verdict.why,
            loop.history(),
            tuple(loop.features()),
            verdict.said,
            verdict.restored,
            time.monotonic() - began,
            text,
        )

    def run(self, loop: Loop, log: Path | None = None) -> Verdict:
        """Run a loop undisturbed, then kill and restart it until it ends. Blocks; leaves no process or file behind.

        Args:
            log: a file for what the lives and the SMP print.

        Raises:
            DeadlineExceeded: a life or the SMP did not answer in time, and was killed.
        """
        with self._ground(log) as ground:
            began = time.monotonic()
            program, gate = ground / "program.py", ground / "gate"
            program.write_text(loop.script.text)
            undisturbed = self._live(loop, Order(True, None, program, ground / "undisturbed", gate), ground)
            lives: list[list[Event]] = []
            at_first = time.monotonic()
            with self._smp(ground):
                ready = time.monotonic()
                ends: list[End | None] = [*loop.ends, None]
                for number, end in enumerate(ends):
                    order = Order(False, end, program, ground / f"life{number}", gate)
                    lives.append(self._live(loop, order, ground))
                    if not any(event["kind"] == "ends" for event in lives[-1]):
                        break
            over = time.monotonic()
        took = {"undisturbed": at_first - began, "smp": ready - at_first, "lives": over - ready}
        return replace(judge(undisturbed, lives, loop.script.words), took_s={k: round(v, 3) for k, v in took.items()})

    @contextmanager
    def _ground(self, log: Path | None) -> Iterator[Path]:
        with Scratch("test") as scratch:
            noted = scratch.path / "log"
            noted.touch()
            try:
                yield scratch.path
            finally:
                if log is not None:
                    log.write_text(noted.read_text(errors="replace"))

    @contextmanager
    def _smp(self, ground: Path) -> Iterator[Forked]:
        environment = _environment(ground)
        command = [*smp_options(JOB, NODE, ground / "arenas" / JOB, "127.0.0.1"), "--owner-pid", str(os.getpid())]
        (ground / "arenas").mkdir(mode=0o700)
        smp = self._zygote.start(command, environment, ground / "log")
        try:
            if not select([smp.stdout], [], [], LIFE_DEADLINE_S)[0]:
                raise DeadlineExceeded(f"the SMP did not start within {LIFE_DEADLINE_S:.0f} s")
            parse_report(smp.stdout.readline())
            yield smp
        finally:
            smp.stdout.close()
            if smp.poll() is None:
                smp.kill()
                smp.wait(LIFE_DEADLINE_S)

    def _live(self, loop: Loop, order: Order, ground: Path) -> list[Event]:
        """Fork one life, wait for its end, and return its events."""
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become(loop, order, ground)
        ended = os.pidfd_open(pid)
        try:
            if not select([ended], [], [], LIFE_DEADLINE_S)[0]:
                os.kill(pid, signal.SIGABRT)
                raise DeadlineExceeded(f"seed {loop.seed}: a life did not end within {LIFE_DEADLINE_S:.0f} s")
        finally:
            os.close(ended)
            os.waitpid(pid, 0)
            _end_group(pid)
        return [json.loads(line) for line in order.events.read_text().splitlines()] if order.events.exists() else []


def _become(loop: Loop, order: Order, ground: Path) -> None:
    """Turn this forked process into a life. Never returns."""
    status = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setpgid(0, 0)
        log = os.open(ground / "log", os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(ground))
        os.environ.pop(failpoints.ENV, None)
        failpoints.arm()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        Life(loop, order).run()
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _end_group(group: int) -> None:
    """Kill the loader workers that a killed life may leave. Nothing else is in its process group."""
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        pass  # no process is left


def _environment(ground: Path) -> Mapping[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HOLDFAST_")}
    return {**kept, **QUIET, ARENA_ENV: str(ground / "arenas")}
