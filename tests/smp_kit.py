"""Real SMPs for tests: child processes on loopback addresses, trainers without torch, and no leftovers.

A `Ground` is a temporary directory on tmpfs with everything that a test starts in it. Nothing here sleeps: SMPs are
stopped at failpoints of the protocol (`Points`), and every wait has a timeout.
"""

from __future__ import annotations

import atexit
import json
import os
import random
import resource
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

import psutil
import pytest

from holdfast.scratch import Scratch
from holdfast.smp_daemon.shared import failpoints
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.identity import UNNAMED
from holdfast.smp_daemon.shared.identity import Run as JobRun
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node, SnapshotId
from holdfast.smp_daemon.shared.paths import Owner, read_owner
from holdfast.smp_daemon.shared.plain import decode_digested
from holdfast.smp_daemon.shared.plan import RestorePlan, plan_restore
from holdfast.smp_daemon.shared.slotfile import Leaf, plan_slot, write_stamp
from holdfast.smp_daemon.shared.spawn import parse_report, smp_command
from holdfast.smp_daemon.shared.starts import Start
from holdfast.smp_daemon.shared.system import System
from holdfast.smp_daemon.shared.trainer_slots import TakenSlot
from holdfast.snapshot.resume.arrange import arrange, node_of_rank, parse_protect
from tests.deadlines import DEADLINE_S, await_that
from tests.scripts import completed
from tests.smp_zygote import Forked, Zygote

JOB = "testrun"
RECORD_BYTES = 600
PROTECTED = SnapshotOutcome.PROTECTED
QUIET = {"HOLDFAST_SCRUB": "0", "HOLDFAST_REGROUP_AFTER": "0", "HOLDFAST_REJOIN": "0"}
"""Settings that disable what SMPs do by themselves after some time; tests start it explicitly."""

IN_THREADS = {"HOLDFAST_PRIORITY": "normal", "HOLDFAST_LINKS": "1"}
"""Settings of an SMP in threads of a test's own process."""

Rules = Sequence[tuple[str, int | None]]


class LeftBehind(AssertionError):
    """Something that a test started has outlived the test, or an SMP ran into a bug."""


class Crash(Exception):
    """Ends a job where a test raises it."""


def suspend(pid: int) -> None:
    """SIGSTOP a process and wait until all its threads have stopped, which sending the signal does not."""
    os.kill(pid, signal.SIGSTOP)
    tasks = Path(f"/proc/{pid}/task")
    await_that(lambda: all(path.read_text().rpartition(")")[2].split()[0] in "Tt" for path in tasks.glob("*/stat")))


# ---------------------------------------------------------------------- failpoints


@dataclass
class Held:
    """A process that waits at a failpoint."""

    who: str
    point: str
    step: int
    sock: socket.socket

    def go(self) -> None:
        """Let the process continue; no-op if it was killed."""
        try:
            self.sock.sendall(b"g")
        except OSError:
            pass


class Points:
    """Stops processes of a test at failpoints until `Held.go`, or until they are killed. Not thread-safe."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(str(path))
        self._listening.listen(64)
        self._held: list[Held] = []
        self._seen: list[Held] = []

    def environment(self, who: str, rules: Rules) -> dict[str, str]:
        """Environment variables that make `who` stop where `rules` say."""
        text = json.dumps({"socket": str(self.path), "who": who, "rules": list(rules)})
        return {failpoints.ENV: text} if rules else {}

    def wait(self, who: str, point: str, step: int) -> Held:
        """Block until `who` has reached `point` of `step`."""
        while True:
            for held in self._held:
                if (held.who, held.point, held.step) == (who, point, step):
                    self._held.remove(held)
                    return held
            if not select.select([self._listening], [], [], DEADLINE_S)[0]:
                raise DeadlineExceeded(f"{who} did not reach {point} of step {step}")
            self._accept()

    def wait_any(self, who: str, point: str) -> Held:
        """Block until `who` has reached `point` of any step."""
        while not (found := self.reached(who, point)):
            if not select.select([self._listening], [], [], DEADLINE_S)[0]:
                raise DeadlineExceeded(f"{who} did not reach {point}")
            self._accept()
        return found[0]

    def fileno(self) -> int:
        """Descriptor for a selector; readable when a process has reached a point."""
        return self._listening.fileno()

    def take(self) -> None:
        """Receive one process that reached a point; blocks until there is one."""
        self._accept()

    def reached(self, who: str, point: str) -> list[Held]:
        """Remove and return the received processes that wait as `who` at `point`, in any step."""
        found = [held for held in self._held if (held.who, held.point) == (who, point)]
        self._held = [held for held in self._held if held not in found]
        return found

    def close(self) -> None:
        for held in self._seen:
            held.sock.close()
        self._listening.close()

    def _accept(self) -> None:
        sock, _ = self._listening.accept()
        sock.settimeout(DEADLINE_S)
        line = b""
        while not line.endswith(b"\n"):
            more = sock.recv(1 << 12)
            if not more:
                sock.close()
                return
            line += more
        said = json.loads(line)
        held = Held(said["who"], said["point"], said["step"], sock)
        self._held.append(held)
        self._seen.append(held)


# ---------------------------------------------------------------------- processes


class SmpProcess:
    """One SMP, a child of this process, and its arena. It can be killed and launched again."""

    def __init__(self, ground: Ground, name: str, host: str, job: str) -> None:
        self.name = name
        self.host = host
        self.job = job
        self.arena = ground.base / name / job
        self.owner: Owner
        self.rules: Rules = ()
        self.owner_pid: int | None = os.getpid()
        self._ground = ground
        self._errors = ground.base / f"{name}.stderr"
        self._process: subprocess.Popen[str] | Forked | None = None

    def launch(self, *more: str) -> SmpProcess:
        """Start the SMP; returns at once."""
        command = smp_command(self.job, self.name, self.arena, self.host)
        command += ["--owner-pid", str(self.owner_pid)] if self.owner_pid else []
        with self._errors.open("a") as errors:
            command += more or ("--priority", "normal")
            environment = QUIET | os.environ | self._ground.points.environment(self.name, self.rules)
            if self._ground.zygote is not None:
                arguments = command[command.index("holdfast.smp_daemon") + 1 :]
                self._process = self._ground.zygote.start(arguments, environment, self._errors)
                return self
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
            )
        return self

    def wait_ready(self, deadline_s: float = DEADLINE_S) -> SmpProcess:
        """Block until the SMP serves. Raises the error with which it failed to start."""
        self.owner = parse_report(read_line(self.process.stdout, deadline_s), self._errors.read_text())
        return self

    def wait_settled(self) -> SmpProcess:
        """Block until the SMP has closed its standard output, the last part of its start."""
        assert read_line(self.process.stdout) == ""
        return self

    @property
    def process(self) -> subprocess.Popen[str] | Forked:
        assert self._process is not None
        return self._process

    @property
    def bulk(self) -> tuple[str, int]:
        return self.owner.host, self.owner.bulk_port

    @property
    def control(self) -> tuple[str, int]:
        return self.owner.control

    def client(self) -> SmpClient:
        """A connection that is closed with the ground."""
        return self._ground.keep(SmpClient(self.arena, self.job))

    def kill(self) -> None:
        """SIGKILL the SMP; its shared memory stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(DEADLINE_S)
            if self._process.stdout is not None:
                self._process.stdout.close()

    def lose(self) -> SmpProcess:
        """SIGKILL the SMP and remove its arena, as if its node had lost power. A drained one has removed it itself."""
        self.kill()
        if self.arena.exists():
            shutil.rmtree(self.arena)
        return self

    def restart(self) -> SmpProcess:
        """SIGKILL the SMP and start a successor in the same arena."""
        self.kill()
        return self.launch().wait_ready()

    def wait_end(self) -> int:
        """Block until the SMP has ended by itself; return its exit status."""
        return self.process.wait(DEADLINE_S)

    def bugs(self) -> str:
        """The SMP's standard error if it contains a traceback; otherwise empty."""
        text = self._errors.read_text() if self._errors.exists() else ""
        return f"{self.name}: {text}" if "Traceback" in text else ""


def owner_of(arena: Path) -> Owner:
    """What the SMP of an arena says of itself."""
    owner = read_owner(arena)
    assert owner is not None
    return owner


class Ground:
    """A temporary directory on tmpfs, the SMPs in it, and the connections to them."""

    def __init__(self, *, own_python: bool = False, grace_s: float = DEADLINE_S / 4) -> None:
        """`own_python`: start each SMP as a new Python, as in a job, instead of forking it from a zygote.

        `grace_s`: how long processes may take to end at the end of the test.
        """
        self.zygote = None if own_python else shared_zygote()
        """The process that SMPs are forked from; None if each is a new Python."""
        self._grace_s = grace_s
        self._scratch = Scratch("test").__enter__()
        self.base = self._scratch.path
        self.points = Points(self.base / "points")
        self.on_end = ExitStack()
        self._network = "127." + ".".join(str(random.SystemRandom().randint(16, 250)) for _ in range(2))
        self._hosts = 0
        self._smps: list[SmpProcess] = []
        self._clients: list[SmpClient] = []
        self._threads = ThreadPoolExecutor(8)

    def smp(self, name: str = "node0", *, job: str = JOB, rules: Rules = ()) -> SmpProcess:
        """Start an SMP and wait until it serves."""
        return self.prepare(name, job=job, rules=rules).launch().wait_ready()

    def smps(self, count: int, *, job: str = JOB, rules: Mapping[int, Rules] | None = None) -> list[SmpProcess]:
        """Start ``node0``, ``node1``, ... at the same time; ``rules[i]`` are the points at which node i stops."""
        started = [self.prepare(f"node{i}", job=job, rules=(rules or {}).get(i, ())).launch() for i in range(count)]
        return [smp.wait_ready() for smp in started]

    def job(
        self, sizes: Sequence[Sequence[int]], *, rules: Mapping[int, Rules] | None = None, **options: Any
    ) -> tuple[list[SmpProcess], Run]:
        """SMPs, and a job in its first epoch on them, as `run_on` makes it."""
        smps = self.smps(len(sizes), rules=rules)
        return smps, run_on(smps, sizes, **options)

    def prepare(self, name: str = "node0", *, job: str = JOB, rules: Rules = ()) -> SmpProcess:
        """An SMP with its own address that is not started yet."""
        smp = SmpProcess(self, name, self.host(), job)
        smp.rules = rules
        self._smps.append(smp)
        return smp

    def host(self) -> str:
        """A loopback address that is not used by anything, including other tests on this machine."""
        self._hosts += 1
        return f"{self._network}.{self._hosts}"

    def keep(self, client: SmpClient) -> SmpClient:
        """Close `client` at the end."""
        self._clients.append(client)
        return client

    def let_go(self) -> None:
        """Close and forget all clients, so that this process uses no arena any more."""
        for client in self._clients:
            client.close()
        self._clients.clear()

    def meanwhile(self, client_call: Any, *arguments: Any) -> Future[Any]:
        """Make a blocking call in another thread."""
        return self._threads.submit(client_call, *arguments)

    def close(self) -> None:
        """End and remove everything.

        Raises:
            LeftBehind: a process or a file is still there, or an SMP has run into a bug.
        """
        self.let_go()
        for smp in self._smps:
            smp.kill()
        self._threads.shutdown()
        self.on_end.close()
        self.points.close()
        problems = [bug for smp in self._smps if (bug := smp.bugs())]
        problems += [f"process {p.pid} was left: {end(p)}" for p in processes_left(self.base, self._grace_s)]
        shutil.rmtree(self.base)
        self._scratch.remove()
        if problems:
            raise LeftBehind("\n".join(problems))


@cache
def shared_zygote() -> Zygote:
    """A zygote for all tests of this process."""
    made = Zygote()
    atexit.register(made.close)
    return made


def launch_by_fork(command: Sequence[str], deadline_s: float, processes: object) -> Owner:
    """`spawn.launch` without the half second that imports take in a new interpreter."""
    arguments = command[command.index("holdfast.smp_daemon") + 1 :]
    with tempfile.NamedTemporaryFile() as errors:
        smp = shared_zygote().start(arguments, os.environ, Path(errors.name))
        text = read_all(smp.stdout, deadline_s)
        smp.wait(DEADLINE_S)
        return parse_report(text, Path(errors.name).read_text())


@contextmanager
def limited(what: int, limit: int, pid: int = 0) -> Iterator[None]:
    """Set a (soft) limit of resources of a process, by default this one, for a ``with`` block."""
    before = resource.prlimit(pid, what)
    resource.prlimit(pid, what, (limit, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, what, before)


@contextmanager
def mounted(path: Path, size: str) -> Iterator[None]:
    """Mount a tmpfs of that size for a ``with`` block, or skip the test."""
    path.mkdir(mode=0o700, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "holdfast-test", str(path)]
    if os.geteuid() != 0 or completed(command).returncode != 0:
        pytest.skip("mounting a small tmpfs takes root")
    try:
        yield
    finally:
        completed(["umount", "-l", str(path)], check=True)


@contextmanager
def playground(*, own_python: bool = False) -> Iterator[Ground]:
    """A ground for a ``with`` block. Leftovers do not hide an exception of the block, but are added to it as a note."""
    ground = Ground(own_python=own_python)
    try:
        yield ground
    except BaseException as error:
        try:
            ground.close()
        except LeftBehind as more:
            error.add_note(str(more))
        raise
    ground.close()


def processes_left(path: Path, grace_s: float) -> list[psutil.Process]:
    """All processes that have `path` in their command line and do not end by themselves within `grace_s`."""
    limit = time.monotonic() + grace_s
    return [p for p in psutil.process_iter() if mentions(p, path) and not ends(p, limit - time.monotonic())]


def open_files(pid: int) -> dict[int, str]:
    """What each file descriptor of a process leads to. Its threads may close some meanwhile."""
    found = {}
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):
            found[int(path.name)] = str(path.readlink())
    return found


def mentions(process: psutil.Process, path: Path) -> bool:
    try:
        return str(path) in " ".join(process.cmdline())
    except psutil.Error:
        return False


def ends(process: psutil.Process, deadline_s: float) -> bool:
    """Whether a process, which need not be our child, ends in time, whether reaped or not."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        return not process.is_running() or bool(select.select([pidfd], [], [], max(0.0, deadline_s))[0])
    finally:
        os.close(pidfd)


def end(process: psutil.Process) -> str:
    """SIGKILL a process that is not our child and wait for its end; return a description of the process."""
    text = str(process)
    try:
        process.kill()
    except psutil.NoSuchProcess:
        return text
    if not ends(process, DEADLINE_S):
        raise DeadlineExceeded(f"{text} did not end")
    return text


def kill_smps(base: Path) -> None:
    """SIGKILL every SMP whose arena is below `base`."""
    for owner in (read_owner(path.parent) for path in base.glob("**/smp.json")):
        if owner is not None and psutil.pid_exists(owner.pid):
            end(psutil.Process(owner.pid))


def read_line(stream: IO[str] | None, deadline_s: float = DEADLINE_S) -> str:
    """The next line that a process prints. Blocks; raises `DeadlineExceeded`."""
    assert stream is not None, "its output is a pipe"
    if not select.select([stream], [], [], deadline_s)[0]:
        raise DeadlineExceeded(f"a process said nothing for {deadline_s:.0f} s")
    return stream.readline()


def read_all(stream: IO[str], deadline_s: float) -> str:
    """All output until the last process has closed `stream`. Blocks; raises `DeadlineExceeded`."""
    said = b""
    while select.select([stream], [], [], deadline_s)[0]:
        more = os.read(stream.fileno(), 1 << 16)
        if not more:
            return said.decode()
        said += more
    raise DeadlineExceeded(f"the SMP did not start within {deadline_s:.0f} s")


def refusal(command: list[str]) -> HoldfastError:
    """The error with which an SMP refuses to start."""
    done = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=DEADLINE_S, check=False
    )
    try:
        owner = parse_report(done.stdout, done.stderr)
    except HoldfastError as error:
        assert done.returncode == (2 if isinstance(error, ConfigError) else 1), done
        assert done.stderr.endswith(f"holdfast: {error}\n"), done
        return error
    raise AssertionError(f"it started: {owner}")


# ---------------------------------------------------------------------- trainers

PIECE_BYTES = 64 << 20
"""Bytes that are drawn at a time: `Random.randbytes` draws less than 2**28."""


class Trainer:
    """Writes snapshots of one shard as a training process would. The bytes are pseudorandom and reproducible."""

    def __init__(self, smp: SmpProcess, coord: str, elements: int = 3000, run: str = UNNAMED.id) -> None:
        """The shard has a leaf of `elements` floats, and leaves of other types and odd sizes. `run`: id of its run."""
        self.coord = coord
        self.client = smp.client()
        self.begun: dict[SnapshotId, tuple[TakenSlot, Any, Any, Any]] = {}
        leaves = [
            Leaf("weight", "F32", (elements,)),
            Leaf("moment", "BF16", (elements // 7 + 1, 3)),
            Leaf("mask", "U8", (13,)),
        ]
        self.form = plan_slot(smp.job, coord, leaves, RECORD_BYTES, run)

    def image(self, snapshot: SnapshotId) -> bytes:
        """Every byte of the slot file that holds `snapshot`."""
        slot = bytearray(self.form.total_bytes)
        slot[: len(self.form.header)] = self.form.header
        write_stamp(memoryview(slot), snapshot)
        source = random.Random(f"{self.coord} {snapshot}")
        for offset, leaf in self.form.offsets.values():
            for begin in range(offset, offset + leaf.bytes, PIECE_BYTES):
                end = min(begin + PIECE_BYTES, offset + leaf.bytes)
                slot[begin:end] = source.randbytes(end - begin)
        offset, capacity = self.form.record
        record = json.dumps({"step": snapshot.step, "coord": self.coord, "rng": source.getrandbits(64)}).encode()
        slot[offset : offset + capacity] = record.ljust(capacity)
        return bytes(slot)

    def write(
        self, snapshot: SnapshotId, keep: Collection[SnapshotId] = (), protected: SnapshotId | None = None
    ) -> memoryview:
        """Take a slot and fill it, without sealing it."""
        slot = self.begin(snapshot, keep, protected)
        slot[:] = self.image(snapshot)
        return slot

    def begin(
        self,
        snapshot: SnapshotId,
        keep: Collection[SnapshotId] = (),
        protected: SnapshotId | None = None,
        with_parity: Collection[SnapshotId] | None = None,
    ) -> memoryview:
        """Take a slot. `seal` says the rest."""
        slot = self.client.take(self.coord, keep)
        self.begun[snapshot] = slot, keep, protected, with_parity
        return slot.view

    def seal(self, snapshot: SnapshotId, **options: Any) -> None:
        self.client.seal(snapshot, self.coord, *self.begun[snapshot], **options)

    def take(
        self, snapshot: SnapshotId, keep: Collection[SnapshotId] = (), protected: SnapshotId | None = None
    ) -> None:
        """Write and seal."""
        self.write(snapshot, keep, protected)
        self.seal(snapshot)

    def outcome(self, snapshot: SnapshotId, deadline_s: float = DEADLINE_S / 2) -> SnapshotOutcome:
        """Wait for the outcome of `snapshot` on this trainer's node."""
        return self.client.await_outcome(snapshot, deadline_s)

    def recover(self, plan: RestorePlan) -> RecoveredShard:
        return self.client.recover(plan.sources, self.coord)

    def rank(self) -> Node:
        """What this trainer tells the other ranks of itself."""
        return node_of_rank(self.client.inventory(), self.coord, self.form.total_bytes)


class Run:
    """The trainers of one job, which move in lockstep as under the training hook."""

    def __init__(
        self,
        trainers: Sequence[Trainer],
        *,
        protect: str = "auto",
        slots: int = 3,
        job: str = JOB,
        identity: JobRun = UNNAMED,
    ) -> None:
        self.identity = identity
        self.trainers = {trainer.coord: trainer for trainer in trainers}
        self.job = job
        self.epoch = 0
        self.layout: Layout
        self.protected: SnapshotId | None = None
        self._protect = parse_protect(protect)
        self._slots = slots

    def __getitem__(self, coord: str) -> Trainer:
        return self.trainers[coord]

    def start(self, epoch: int = 1) -> Run:
        """Enter an epoch and reserve memory on every node."""
        self.epoch = epoch
        ranks = [t.rank() for t in self]
        self.layout = arrange(self.job, epoch, ranks, self._protect, self._slots, run=self.identity)
        self.join(epoch, None if self.identity is UNNAMED else Start(epoch, 0, run=self.identity))
        self.configure(self.layout)
        return self

    def join(self, epoch: int, start: Start | None = None) -> None:
        """Make every trainer enter an epoch."""
        for trainer in self:
            trainer.client.join(epoch, start)

    def configure(self, layout: Layout) -> None:
        """Make every node reserve what a layout needs."""
        for trainer in self:
            trainer.client.configure(layout)

    def __iter__(self) -> Iterator[Trainer]:
        return iter(self.trainers.values())

    def snapshot(self, step: int) -> SnapshotId:
        return SnapshotId(self.epoch, step)

    @property
    def kept(self) -> tuple[SnapshotId, ...]:
        """Snapshots that must not be freed."""
        return (self.protected,) if self.protected else ()

    def write(self, step: int) -> SnapshotId:
        """Make every trainer fill a slot."""
        for trainer in self:
            trainer.write(self.snapshot(step), self.kept, self.protected)
        return self.snapshot(step)

    def take(self, step: int) -> SnapshotId:
        """Make every trainer fill a slot and seal it."""
        snapshot = self.write(step)
        self.seal(snapshot)
        return snapshot

    def seal(self, snapshot: SnapshotId, **options: Any) -> None:
        """Make every trainer seal the slot that it has filled."""
        for trainer in self:
            trainer.seal(snapshot, **options)

    def outcomes(self, snapshot: SnapshotId) -> set[SnapshotOutcome]:
        """The outcomes of a snapshot on all nodes."""
        return {trainer.outcome(snapshot) for trainer in self}

    def protect(self, step: int) -> SnapshotId:
        """Take a snapshot and assert that it becomes protected on every node."""
        snapshot = self.take(step)
        outcomes = {trainer.coord: trainer.outcome(snapshot) for trainer in self}
        assert set(outcomes.values()) == {PROTECTED}, outcomes
        self.protected = snapshot
        return snapshot

    def inventories(self) -> list[Inventory]:
        """What every trainer's node holds."""
        return [trainer.client.inventory() for trainer in self]

    def plan(self, *inventories: Inventory) -> RestorePlan:
        """The restore plan of a restart of this job, by default from what all its nodes hold."""
        plan = plan_restore(inventories or self.inventories(), self.trainers)
        assert plan is not None
        return plan


def run_on(
    smps: Sequence[SmpProcess],
    sizes: Sequence[Sequence[int]],
    *,
    epoch: int = 1,
    identity: JobRun = UNNAMED,
    **options: Any,
) -> Run:
    """A job in its first epoch; ``sizes[i]`` are the elements of the shards on node i: ``dp0``, ``dp1``, ..."""
    places = [(smp, elements) for smp, row in zip(smps, sizes, strict=True) for elements in row]
    trainers = [Trainer(smp, f"dp{rank}", elements, identity.id) for rank, (smp, elements) in enumerate(places)]
    return Run(trainers, job=smps[0].job, identity=identity, **options).start(epoch)


class DetachedSmp(SmpProcess):
    """An SMP that is not our child, to run trainers on."""

    def __init__(self, ground: Ground, arena: Path) -> None:
        super().__init__(ground, "node0", "", JOB)
        self.arena = arena


@contextmanager
def stopped(*smps: SmpProcess) -> Iterator[Callable[[], None]]:
    """Stop these SMPs during the block, or until the function that it gets is called."""

    def go_on() -> None:
        for smp in smps:
            smp.process.send_signal(signal.SIGCONT)

    for smp in smps:
        suspend(smp.process.pid)
    try:
        yield go_on
    finally:
        go_on()


# ---------------------------------------------------------------------- doubles


class ManualClock(System):
    """A machine whose clock the test moves."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Watched:
    """A method, or a function of a module, whose calls a test watches, and holds up until `go_on` is set if `hold`.

    Attributes:
        calls: the arguments of each call but the first, and whether `lock` was held.
        ended: set once a call has returned or raised.
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        owner: Any,
        name: str,
        lock: threading.Condition | None = None,
        *,
        hold: bool = False,
    ) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.begun, self.go_on, self.ended = threading.Event(), threading.Event(), threading.Event()
        original = getattr(owner, name)

        def instead(of: Any, *arguments: Any) -> Any:
            self.calls.append((*arguments, lock is not None and lock._is_owned()))  # type: ignore[attr-defined]
            self.begun.set()
            assert not hold or self.go_on.wait(DEADLINE_S)
            try:
                return original(of, *arguments)
            finally:
                self.ended.set()

        monkeypatch.setattr(owner, name, instead)

    @property
    def held(self) -> list[bool]:
        """Whether the lock was held in each call."""
        return [call[-1] for call in self.calls]


# ---------------------------------------------------------------------- contents of arenas


def just_before(call: Callable[..., Any], name: str, happens: Callable[[], object]) -> Callable[..., Any]:
    """`call`, with something that happens before it is first asked about a file of that name."""
    left = [happens]

    def instead(path: Any, *more: Any, **options: Any) -> Any:
        if left and Path(path).name == name:
            left.pop()()
        return call(path, *more, **options)

    return instead


def shard_file(smp: SmpProcess, snapshot: SnapshotId, coord: str) -> Path:
    """The slot file of a sealed shard, found by its commit record."""
    return _recorded(smp, snapshot, f"{coord}.*.safetensors.json")


def parity_file(smp: SmpProcess, snapshot: SnapshotId, tag: str, position: int) -> Path:
    """The slot file of a parity of the group with that tag, found by its commit record."""
    return _recorded(smp, snapshot, f"{tag}-{position}.*.parity.json")


def parity_units(smp: SmpProcess, snapshot: SnapshotId, tag: str, position: int) -> list[bytes]:
    """The units of a parity, located by its commit record; bytes between them in the file are undefined."""
    path = parity_file(smp, snapshot, tag, position)
    record, content = decode_digested(record_of(path).read_bytes()), path.read_bytes()
    places = [(index * record["unit_bytes"], length) for index, length in enumerate(record["lengths"])]
    assert len(content) == len(places) * record["unit_bytes"], "a slot has a place of a whole unit for each"
    return [content[offset : offset + length] for offset, length in places]


def record_of(path: Path) -> Path:
    """The commit record of a slot file."""
    return path.with_name(path.name + ".json")


def _recorded(smp: SmpProcess, snapshot: SnapshotId, pattern: str) -> Path:
    records = [p for p in smp.arena.glob(pattern) if decode_digested(p.read_bytes())["snapshot"] == list(snapshot)]
    assert len(records) == 1, (pattern, sorted(p.name for p in smp.arena.iterdir()))
    return records[0].with_suffix("")


def flip_a_byte(path: Path, at: int = -1) -> None:
    """Flip a bit of a file, by default in its last byte, as a faulty memory cell would."""
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        file.write(bytes([byte ^ 0x10]))


def memory_of(arena: Path) -> int:
    """Bytes of memory that an arena occupies, without its log."""
    return sum(p.stat().st_blocks * 512 for p in arena.iterdir() if p.is_file() and p.name != "smp.log")


def parities_by_xor(run: Run, group: int, snapshot: SnapshotId) -> dict[int, list[bytes]]:
    """The parity units of each position of a group with one parity per stripe, computed from the trainers' bytes.

    The parity of stripe r is at position r (mod n). It covers the next unit of each of the k positions that follow, if
    they have any left, and is as long as the longest of these units.
    """
    data, parity = run.layout.code(group)
    assert parity == 1
    hands = [
        [u for shard in node.shards for u in _units(run[shard.coord].image(snapshot), run.layout.unit_bytes)]
        for node in run.layout.members(group)
    ]
    parities: dict[int, list[bytes]] = {position: [] for position in range(len(hands))}
    stripe = 0
    while any(hands):
        seats = [(stripe + i) % len(hands) for i in range(1 + data)]
        units = [hands[seat].pop(0) for seat in seats[1:] if hands[seat]]
        parities[seats[0]].append(_xor(units))
        stripe += 1
    return parities


def _xor(units: Sequence[bytes]) -> bytes:
    """The XOR of units, padded with zeros to the length of the longest."""
    length = max(map(len, units), default=0)
    total = 0
    for unit in units:
        total ^= int.from_bytes(unit.ljust(length, b"\0"), "little")
    return total.to_bytes(length, "little")


def _units(image: bytes, length: int) -> list[bytes]:
    return [image[i : i + length] for i in range(0, len(image), length)]
