"""What can be broken in a virtual cluster: a catalogue, each fault done to real processes, files and connections.

A fault is due when a process reaches a named point of a step; it may be put off by some time after that, and those
that pass by themselves last for a while. `inject` does one; the cluster knows the processes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from chaos import clocks, namespaces
from chaos.namespaces import inside
from smp_daemon.errors import ConfigError
from smp_daemon.persist.manifest import SNAPSHOT, shard_name


@dataclass(slots=True)
class Fault:
    """Something to be done when a process reaches a point.

    Attributes:
        who: ``rank3`` or ``smp2``: the process that triggers it.
        step: of which step or snapshot; None: the first time.
        kind: one of `CATALOGUE`.
        targets: ranks or node indices, as the kind says.
        delay_s: how long after the point; the process goes on meanwhile.
        for_s: how long it lasts, for kinds that pass; of the network's and the clock's, 0 is to the end.
        amount: bits to flip, descriptors or bytes to leave, percent of packets, milliseconds, seconds, kB/s: as the
            kind says.
        seed: for what is drawn.
        nth: at the how-many-th time that the process comes to the point.
        fired_at: `time.monotonic`, once it has been done.
    """

    who: str
    point: str
    step: int | None
    kind: str
    targets: tuple[int, ...]
    delay_s: float = 0.0
    for_s: float = 0.0
    amount: int = 0
    seed: int = 0
    nth: int = 1
    seen: int = field(default=0, compare=False)
    due: bool = field(default=False, compare=False)
    fired_at: float | None = field(default=None, compare=False)

    def matches(self, who: str, point: str, step: int) -> bool:
        """Whether it is due."""
        return not self.due and (self.who, self.point) == (who, point) and self.step in (None, step)


class Ground(Protocol):
    """What faults need of a cluster."""

    def pid_of_rank(self, rank: int) -> int | None:
        """The trainer's process, if it runs."""
        ...

    def pid_of_smp(self, index: int) -> int:
        """The SMP's process."""
        ...

    def arena_of(self, index: int) -> Path:
        """Where the node's snapshots lie."""
        ...

    def place(self) -> Path:
        """Where the job's snapshots are persisted. Raises `ConfigError` if they are not."""
        ...

    def host_of(self, index: int) -> str:
        """The node's address."""
        ...

    def ranks_on(self, index: int) -> list[int]:
        """The trainers of a node."""
        ...

    def namespaces(self) -> Sequence[str | None]:
        """Where connections of the nodes end: paths of network namespaces, or None for this machine's."""
        ...

    def impair(self, fault: Fault) -> None:
        """Spoil what goes over the links of its targets."""
        ...

    def set_clock(self, index: int, ahead_s: int) -> None:
        """The node's wall clock is so far ahead of this machine's from now on."""
        ...

    def unplug(self, index: int) -> None:
        """Nothing leaves the node any more; where nodes have no links of their own, nothing happens."""
        ...

    def power_cut(self, index: int) -> None:
        """Kill the SMP and wipe the node's memory."""
        ...

    def replace_smp(self, index: int, by: signal.Signals = signal.SIGKILL) -> None:
        """End the SMP by a signal, or SIGKILL if it outlives that; note how it ended; start another in its arena."""
        ...

    def end_job(self, spare: Sequence[int] = ()) -> None:
        """Kill all trainers but those spared, as a launcher does that has lost patience."""
        ...

    def kill_launcher(self) -> None:
        """Kill what starts trainers; they die with it."""
        ...

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        """Do something in a while."""
        ...


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue.

    Attributes:
        of: what its targets are: ``rank``, ``node`` or nothing.
        ends_job: whether trainers die of it, so that the job is started again.
        loses: whether a node's memory is gone.
        rooted: whether it needs root.
        wired: whether it needs a `chaos.wire` between the nodes.
        clocked: whether it needs clocks that can be set (`chaos.clocks`).
        amounts: the least and the most `Fault.amount`; None: it has none, or any will do.
        forever: whether it may last to the end of the run (`Fault.for_s` of 0).
    """

    name: str
    what: str
    of: str
    do: Callable[[Ground, Fault], None]
    ends_job: bool = False
    loses: bool = False
    rooted: bool = False
    wired: bool = False
    clocked: bool = False
    amounts: tuple[int, int] | None = None
    forever: bool = True

    @property
    def needs(self) -> str:
        """What not every machine has, or an empty text."""
        if self.wired:
            return "root and /dev/net/tun"
        return "root" if self.rooted else "a C compiler" if self.clocked else ""


def check(fault: Fault) -> None:
    """Raises `ConfigError` if there is no such kind, or not with such an amount or for such a time."""
    if fault.kind not in CATALOGUE:
        raise ConfigError(f"there is no fault {fault.kind!r}: choose one of {', '.join(CATALOGUE)}")
    kind = CATALOGUE[fault.kind]
    if kind.amounts is not None and not kind.amounts[0] <= fault.amount <= kind.amounts[1]:
        raise ConfigError(
            f"{kind.name} with amount = {fault.amount}: choose {kind.amounts[0]} to {kind.amounts[1]} ({kind.what})"
        )
    if fault.for_s < 0 or (not fault.for_s and not kind.forever):
        raise ConfigError(f"{kind.name} with for_s = {fault.for_s}: say after how many seconds it is over")


def obstacle(kinds: Iterable[str]) -> str:
    """Why this machine does not let us do faults of these kinds, or an empty text."""
    wanted = [CATALOGUE[kind] for kind in kinds]
    if any(kind.rooted for kind in wanted) and os.geteuid() != 0:
        return "needs root"
    if any(kind.wired for kind in wanted) and (reason := namespaces.unavailable()):
        return reason
    return clocks.unavailable() if any(kind.clocked for kind in wanted) else ""


def inject(ground: Ground, fault: Fault) -> None:
    """Do it. Raises `ConfigError` if this machine does not let us."""
    if reason := obstacle([fault.kind]):
        raise ConfigError(f"{fault.kind} cannot be done here: {reason}")
    CATALOGUE[fault.kind].do(ground, fault)


# ---------------------------------------------------------------------- trainers


def _to_ranks(*signals: signal.Signals) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(ground.pid_of_rank(rank), *signals)

    return do


def _hang(ground: Ground, fault: Fault) -> None:
    """They stop, and some time later the launcher ends the job."""
    _to_ranks(signal.SIGSTOP)(ground, fault)
    ground.later(fault.for_s, ground.end_job)


def _zombie(ground: Ground, fault: Fault) -> None:
    """They stop, the job is started again without them, and they wake up in the middle of it."""
    pids = [ground.pid_of_rank(rank) for rank in fault.targets]
    _to_ranks(signal.SIGSTOP)(ground, fault)
    ground.end_job(spare=fault.targets)
    ground.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def _pause_ranks(ground: Ground, fault: Fault) -> None:
    _stop_for_a_while(ground, fault, [ground.pid_of_rank(rank) for rank in fault.targets])


def _oom(ground: Ground, fault: Fault) -> None:
    """The kernel's own out-of-memory killer, by a memory cgroup with no room for what they allocate next."""
    for rank in fault.targets:
        pid = ground.pid_of_rank(rank)
        if pid is not None:
            group = _starve(pid, f"{CGROUP}-{os.getpid()}-{rank}")
            ground.later(1.0, group.rmdir)  # it is empty by then


CGROUP = "holdfast-chaos"


def _starve(pid: int, name: str) -> Path:
    """Put a process into a memory cgroup of its own, in which there is no room; the cgroup."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / name
        if (Path(base) / limit).exists() or (base == "/sys/fs/cgroup" and (Path(base) / "cgroup.procs").exists()):
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(1 << 16))
            (group / "cgroup.procs").write_text(str(pid))
            return group
    raise ConfigError("there is no memory cgroup that can be written to here")


def _end_launcher(ground: Ground, fault: Fault) -> None:
    ground.kill_launcher()


# ---------------------------------------------------------------------- SMPs and nodes


def _end_smps(by: signal.Signals) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        for index in fault.targets:
            ground.replace_smp(index, by)

    return do


def _pause_smps(ground: Ground, fault: Fault) -> None:
    """Half-open: the kernel still takes what is sent to them, and nobody answers."""
    _stop_for_a_while(ground, fault, [ground.pid_of_smp(index) for index in fault.targets])


SLICE_S = 0.02


def _slow_smps(ground: Ground, fault: Fault) -> None:
    """They run for one slice of time in five."""
    pids = [ground.pid_of_smp(index) for index in fault.targets]
    slices = max(1, round(fault.for_s / (5 * SLICE_S)))

    def turn(left: int) -> None:
        _signal_all(pids, signal.SIGCONT)
        if left:
            ground.later(SLICE_S, lambda: stop(left))

    def stop(left: int) -> None:
        _signal_all(pids, signal.SIGSTOP)
        ground.later(4 * SLICE_S, lambda: turn(left - 1))

    stop(slices)


def _lose_nodes(ground: Ground, fault: Fault) -> None:
    for index in fault.targets:
        ground.unplug(index)
        for rank in ground.ranks_on(index):
            send_signals(ground.pid_of_rank(rank), signal.SIGKILL)
        ground.power_cut(index)


def _freeze(ground: Ground, fault: Fault) -> None:
    """Nothing to do: who reached the point is not told to go on."""


# ---------------------------------------------------------------------- network


def _cut(ground: Ground, fault: Fault) -> None:
    """Every TCP connection to a node breaks at both ends, as after a switch's restart; new ones may be made."""
    for index in fault.targets:
        host = ground.host_of(index)
        for namespace in ground.namespaces():
            with inside(namespace):
                for side in ("dst", "src"):
                    _command("ss", "-K", "-tnH", side, host)


def _impair(ground: Ground, fault: Fault) -> None:
    """What the kind says is done to packets, from now on, by the wire: `chaos.impairments`."""
    ground.impair(fault)


# ---------------------------------------------------------------------- clocks


def _jump(ground: Ground, fault: Fault) -> None:
    """The wall clock of every process of a node jumps; back again when it is over."""
    for index in fault.targets:
        ground.set_clock(index, fault.amount)
        if fault.for_s:
            ground.later(fault.for_s, partial(ground.set_clock, index, 0))


YEAR_S = 366 * 24 * 3600

# ---------------------------------------------------------------------- memory and limits


def _flip(pattern: str) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        source = random.Random(fault.seed)
        for index in fault.targets:
            files = sorted(path for path in ground.arena_of(index).glob(pattern) if path.stat().st_size)
            if not files:
                raise ConfigError(f"node {index} holds no {pattern} to flip a bit in")
            for path in files:
                _flip_bits(path, max(1, fault.amount), source)

    return do


def _cut_short(ground: Ground, fault: Fault) -> None:
    for index in fault.targets:
        for path in sorted(ground.arena_of(index).glob("*.safetensors")):
            os.truncate(path, path.stat().st_size // 2)


def _flip_bits(path: Path, count: int, source: random.Random) -> None:
    """Flip bits in the last half of a file: of the snapshot's bytes, not of its header."""
    with path.open("r+b") as file:
        length = path.stat().st_size
        for _ in range(count):
            file.seek(source.randrange(length // 2, length))
            octet = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([octet ^ 1 << source.randrange(8)]))


# ---------------------------------------------------------------------- storage


def _persisted_shards(ground: Ground, fault: Fault) -> Iterator[Path]:
    """What the nodes have written of the newest whole snapshot."""
    whole = sorted(path.parent for path in ground.place().glob(f"*/{SNAPSHOT}"))
    if not whole:
        raise ConfigError("nothing is persisted yet")
    for index in fault.targets:
        yield from (whole[-1] / shard_name(f"dp{rank}") for rank in ground.ranks_on(index))


def _flip_persisted(ground: Ground, fault: Fault) -> None:
    source = random.Random(fault.seed)
    for path in _persisted_shards(ground, fault):
        _flip_bits(path, max(1, fault.amount), source)


def _cut_persisted(ground: Ground, fault: Fault) -> None:
    for path in _persisted_shards(ground, fault):
        os.truncate(path, path.stat().st_size // 2)


def _break_place(ground: Ground, fault: Fault) -> None:
    """Nothing can be read or written there for a while."""
    place = ground.place()
    aside = place.with_name(f"{place.name}.aside")
    if place.exists():
        place.rename(aside)
    place.write_text("in the way")

    def mend() -> None:
        place.unlink()
        if aside.exists():
            aside.rename(place)

    ground.later(fault.for_s, mend)


def _limit(resource: int, beyond: Callable[[psutil.Process], int]) -> Callable[[Ground, Fault], None]:
    """A limit of the kernel's on the SMPs for a while."""

    def do(ground: Ground, fault: Fault) -> None:
        for index in fault.targets:
            process = psutil.Process(ground.pid_of_smp(index))
            before = process.rlimit(resource)
            process.rlimit(resource, (beyond(process) + fault.amount, before[1]))
            ground.later(fault.for_s, partial(_lift, process, resource, before))

    return do


def _lift(process: psutil.Process, resource: int, before: tuple[int, int]) -> None:
    if process.is_running():  # compares the time it was started at, too
        process.rlimit(resource, before)


_few_files = _limit(psutil.RLIMIT_NOFILE, psutil.Process.num_fds)
_no_space = _limit(psutil.RLIMIT_FSIZE, lambda process: 0)


# ---------------------------------------------------------------------- tools


def send_signals(pid: int | None, *signals: signal.Signals) -> None:
    """Send signals, if the process is there: it may have ended by itself."""
    for each in signals if pid is not None else ():
        try:
            os.kill(pid or 0, each)
        except ProcessLookupError:
            return


def _signal_all(pids: Sequence[int | None], each: signal.Signals) -> None:
    for pid in pids:
        send_signals(pid, each)


def _stop_for_a_while(ground: Ground, fault: Fault, pids: Sequence[int | None]) -> None:
    _signal_all(pids, signal.SIGSTOP)
    ground.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def _command(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not installed: it comes with iproute2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(words)} failed: {done.stderr.strip()}")


CATALOGUE: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill-trainer", "SIGKILL", "rank", _to_ranks(signal.SIGKILL), ends_job=True),
        Kind("term-trainer", "SIGTERM, not handled", "rank", _to_ranks(signal.SIGTERM), ends_job=True),
        Kind("segv-trainer", "SIGSEGV", "rank", _to_ranks(signal.SIGSEGV), ends_job=True),
        Kind("abort-trainer", "SIGABRT", "rank", _to_ranks(signal.SIGABRT), ends_job=True),
        Kind("oom-trainer", "the kernel's out-of-memory killer", "rank", _oom, ends_job=True, rooted=True),
        Kind("hang-trainer", "stops; the launcher ends the job", "rank", _hang, ends_job=True),
        Kind("zombie-trainer", "stops, is replaced, wakes up", "rank", _zombie, ends_job=True),
        Kind("pause-trainer", "stops for a while", "rank", _pause_ranks),
        Kind("kill-launcher", "SIGKILL; trainers die with it", "", _end_launcher, ends_job=True),
        Kind("kill-smp", "SIGKILL; another takes over", "node", _end_smps(signal.SIGKILL)),
        Kind("segv-smp", "SIGSEGV; another takes over", "node", _end_smps(signal.SIGSEGV)),
        Kind("term-smp", "SIGTERM; another takes over", "node", _end_smps(signal.SIGTERM)),
        Kind("pause-smp", "half-open: connected and silent", "node", _pause_smps),
        Kind("slow-smp", "runs a fifth of the time", "node", _slow_smps),
        Kind("freeze", "stays where it is until it dies", "", _freeze),
        Kind("hold", "one thread stays where it is for a while", "", _freeze),
        Kind("lose-node", "power cut: memory gone", "node", _lose_nodes, ends_job=True, loses=True),
        Kind("cut-links", "every connection to it breaks", "node", _cut, rooted=True),
        Kind("lose-packets", "percent of its packets are lost", "node", _impair, wired=True, amounts=(1, 90)),
        Kind("delay-packets", "its packets are late: ms, on average", "node", _impair, wired=True, amounts=(1, 500)),
        Kind("reorder-packets", "percent of its packets are overtaken", "node", _impair, wired=True, amounts=(1, 90)),
        Kind("repeat-packets", "percent of its packets come twice", "node", _impair, wired=True, amounts=(1, 90)),
        Kind("throttle", "its links carry so many kB/s", "node", _impair, wired=True, amounts=(10, 1 << 20)),
        Kind("partition", "they do not reach the others, nor these them", "node", _impair, wired=True, forever=False),
        Kind("mute-node", "it hears others, and nobody hears it", "node", _impair, wired=True, forever=False),
        Kind("deaf-node", "others hear it, and it hears nobody", "node", _impair, wired=True, forever=False),
        Kind("flip-in-flight", "bits of units flip on its links", "node", _impair, wired=True, amounts=(1, 10_000)),
        Kind(
            "jump-clock",
            "its wall clock is so many s ahead, or behind",
            "node",
            _jump,
            clocked=True,
            amounts=(-YEAR_S, YEAR_S),
        ),
        Kind("flip-shards", "bits flip in its slots", "node", _flip("*.safetensors")),
        Kind("flip-parity", "bits flip in its parity", "node", _flip("*.parity")),
        Kind("cut-shards", "its slot files lose their second half", "node", _cut_short),
        Kind("flip-persisted", "bits flip in what it persisted last", "node", _flip_persisted),
        Kind("cut-persisted", "what it persisted last loses its second half", "node", _cut_persisted),
        Kind("break-place", "storage fails for a while", "", _break_place, forever=False),
        Kind("few-files", "EMFILE in its SMP", "node", _few_files),
        Kind("no-space", "its SMP's files cannot grow", "node", _no_space),
    )
}
"""Every kind, by name."""
