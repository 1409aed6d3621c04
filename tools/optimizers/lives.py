"""The lives of a job with one optimizer: forked from a process that has imported its library, and killed."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from select import select
from typing import Any, NamedTuple

import torch
import torch._dynamo  # lives would import it, which takes a second
from torch._C._distributed_c10d import HashStore

import holdfast.integrations.adapters.torch_native  # noqa: F401  # so that lives need not, each for itself
from holdfast import InMemorySnapshot
from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared.errors import DeadlineExceeded
from holdfast.smp_daemon.shared.paths import ARENA_ENV
from holdfast.smp_daemon.shared.spawn import parse_report, smp_options
from tests.smp_zygote import Zygote, quiet
from tools.optimizers.making import DISTRIBUTED, MATRICES, Net, make, stepper

JOB = "optimizers"
NODE = "node0"
STEPS = 10
KILLS = (1, 6)
"""Steps, from 0, in the middle of which a life is killed: before all state has its form, and after."""

FIRST_TURNS = 4
"""What holdfast has to say about an optimizer is said before this many steps are over."""

DEADLINE_S = 120.0
QUIET = {**quiet(JOB, NODE), "OPENBLAS_NUM_THREADS": "1"}


class Lived(NamedTuple):
    """What is known of one life.

    Attributes:
        steps: the loss, and a digest of the weights at that time, of each step.
        said: each warning, with the step in which it came.
        error: type, text and last line of the traceback of what ended it; empty if nothing did.
        ended: whether it went through all steps.
    """

    steps: dict[int, str]
    said: list[tuple[int, str]]
    error: str
    step_of_error: int
    ended: bool


class Lives:
    """Runs lives. Not thread-safe; the process must not have run a torch operation on several threads."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        torch.compiler.set_stance("force_eager")  # torchao's compile their step, which takes minutes in each life
        self._zygote = Zygote()

    def close(self) -> None:
        """End the process that forks SMPs."""
        self._zygote.close()

    def run(self, kind: type) -> list[Lived]:
        """An undisturbed life without holdfast, and if that went well, lives that are killed and the one that ends."""
        with _ground() as ground:
            alone = self._live(kind, ground, 0, None, hooked=False)
            if alone.error:
                return [alone]
            lives = [alone]
            with self._smp(ground):
                for number, dies in enumerate([*KILLS, None], 1):
                    lives.append(self._live(kind, ground, number, dies, hooked=True))
                    if lives[-1].error:
                        break
            return lives

    @contextmanager
    def _smp(self, ground: Path) -> Iterator[None]:
        command = [*smp_options(JOB, NODE, ground / "arenas" / JOB, "127.0.0.1"), "--owner-pid", str(os.getpid())]
        (ground / "arenas").mkdir(mode=0o700)
        smp = self._zygote.start(command, _environment(ground), ground / "log")
        try:
            if not select([smp.stdout], [], [], DEADLINE_S)[0]:
                raise DeadlineExceeded(f"the SMP did not start within {DEADLINE_S:.0f} s")
            parse_report(smp.stdout.readline())
            yield
        finally:
            smp.stdout.close()
            if smp.poll() is None:
                smp.kill()
                smp.wait(DEADLINE_S)

    def _live(self, kind: type, ground: Path, number: int, dies: int | None, *, hooked: bool) -> Lived:
        events = ground / f"life{number}"
        sys.stdout.flush()
        sys.stderr.flush()
        pid = os.fork()
        if pid == 0:
            _become(kind, ground, events, dies, hooked)
        ended = os.pidfd_open(pid)
        late = False
        try:
            if not select([ended], [], [], DEADLINE_S)[0]:
                late = True
                os.kill(pid, signal.SIGKILL)
        finally:
            os.close(ended)
            os.waitpid(pid, 0)
        return _read(events, late)


def _read(events: Path, late: bool) -> Lived:
    lived = Lived({}, [], f"DeadlineExceeded: it did not end within {DEADLINE_S:.0f} s" if late else "", -1, False)
    for line in events.read_text().splitlines() if events.exists() else ():
        match json.loads(line):
            case {"step": step, "state": state}:
                lived.steps[step] = state
            case {"step": step, "said": said}:
                lived.said.append((step, said))
            case {"step": step, "error": error}:
                lived = lived._replace(error=error, step_of_error=step)
            case {"end": state}:
                lived.steps[STEPS] = state
                lived = lived._replace(ended=True)
    return lived


@contextmanager
def _ground() -> Iterator[Path]:
    with Scratch("test") as scratch:
        yield scratch.path


def _environment(ground: Path) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HOLDFAST_")}
    return {**kept, **QUIET, ARENA_ENV: str(ground / "arenas")}


class _Notes(logging.Handler):
    """Notes warnings."""

    def __init__(self, job: _Job) -> None:
        super().__init__(logging.WARNING)
        self._job = job

    def emit(self, record: logging.LogRecord) -> None:
        self._job.note(said=record.getMessage())


class _Job:
    """The job of one life; runs in a forked process."""

    def __init__(self, kind: type, events: Path) -> None:
        self.step = 0
        self._events = events.open("a", buffering=1)
        self._kind = kind

    def note(self, **values: object) -> None:
        self._events.write(json.dumps({"step": self.step, **values}) + "\n")

    def run(self, dies: int | None, hooked: bool) -> None:
        torch.manual_seed(0)
        if self._kind.__name__ in DISTRIBUTED or self._kind.__module__ == "muon":
            torch.distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        model = Net(self._kind.__name__ == "SparseAdam", convolution=self._kind.__name__ not in MATRICES)
        if self._kind.__name__ == "SparseAdam":
            model.requires_grad_(False).words.requires_grad_(True)
        if hooked:
            logging.getLogger("holdfast").addHandler(_Notes(self))
        optimizer = make(self._kind, model)
        if not hooked:
            self._loop(model, optimizer, None, range(STEPS), None)
        else:
            with InMemorySnapshot(model, optimizer) as snap:
                self._loop(model, optimizer, snap, snap.steps(STEPS), dies)
        self._events.write(json.dumps({"end": _digest(model)}) + "\n")

    def _loop(self, model: Any, optimizer: Any, snap: Any, numbers: Any, dies: int | None) -> None:
        def middle(loss: torch.Tensor) -> None:
            if snap is not None:
                snap.drain(DEADLINE_S)
            self.note(state=f"{float(loss).hex()} {_digest(model)}")
            if self.step == dies:
                os.kill(os.getpid(), signal.SIGKILL)

        step = stepper(optimizer, model, middle)
        for self.step in numbers:
            step()


def _digest(model: torch.nn.Module) -> str:
    sha = hashlib.sha256()
    for parameter in model.parameters():
        sha.update(parameter.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()[:16]


def _become(kind: type, ground: Path, events: Path, dies: int | None, hooked: bool) -> None:
    """Turn this forked process into a life. Never returns."""
    job = _Job(kind, events)
    try:
        log = os.open(ground / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(_environment(ground))
        signal.alarm(int(DEADLINE_S))
        job.run(dies, hooked)
    except BaseException as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        job.note(error=f"{type(error).__name__}: {error} ({Path(place.filename).name}:{place.lineno})")
        if "TRACE" in os.environ:
            job.note(trace=traceback.format_exc())
    finally:
        os._exit(0)


def timed(lives: Lives, kind: type) -> tuple[list[Lived], float]:
    """The lives of a class, and how long they took in seconds."""
    began = time.monotonic()
    return lives.run(kind), time.monotonic() - began
