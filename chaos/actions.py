"""How virtual clusters inject each fault of the catalogue: to real processes, files, limits, clocks and links.

A fault is due when a process reaches a named point of a step; it may be put off by some time after that, and those
that pass by themselves last for a while. `inject` does one; the `FaultContext` knows the processes.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

import psutil

from holdfast.chaos.faults import CATALOGUE, Fault
from holdfast.chaos.network import clocks, namespaces
from holdfast.chaos.network.namespaces import inside
from holdfast.chaos.runner import send_signals
from holdfast.smp_daemon.persist.manifest import SNAPSHOT, shard_name
from holdfast.smp_daemon.shared.errors import ConfigError


class FaultContext(Protocol):
    """What faults need of the cluster that they are injected into. Called in its thread."""

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


Action = Callable[[FaultContext, Fault], None]


def obstacle(kinds: Iterable[str]) -> str:
    """Why this machine does not let us inject faults of these kinds, or an empty text."""
    wanted = [CATALOGUE[kind] for kind in kinds]
    if any(kind.rooted for kind in wanted) and os.geteuid() != 0:
        return "needs root"
    if any(kind.wired for kind in wanted) and (reason := namespaces.unavailable()):
        return reason
    return clocks.unavailable() if any(kind.clocked for kind in wanted) else ""


def inject(context: FaultContext, fault: Fault) -> None:
    """Do it. Raises `ConfigError` if this machine does not let us."""
    if reason := obstacle([fault.kind]):
        raise ConfigError(f"{fault.kind} cannot be done here: {reason}")
    ACTIONS[fault.kind](context, fault)


# ---------------------------------------------------------------------- trainers


def to_ranks(*signals: signal.Signals) -> Action:
    def do(context: FaultContext, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(context.pid_of_rank(rank), *signals)

    return do


def hang(context: FaultContext, fault: Fault) -> None:
    """They stop, and some time later the launcher ends the job."""
    to_ranks(signal.SIGSTOP)(context, fault)
    context.later(fault.for_s, context.end_job)


def zombie(context: FaultContext, fault: Fault) -> None:
    """They stop, the job is started again without them, and they wake up in the middle of it."""
    pids = [context.pid_of_rank(rank) for rank in fault.targets]
    to_ranks(signal.SIGSTOP)(context, fault)
    context.end_job(spare=fault.targets)
    context.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def pause_ranks(context: FaultContext, fault: Fault) -> None:
    _stop_for_a_while(context, fault, [context.pid_of_rank(rank) for rank in fault.targets])


def oom(context: FaultContext, fault: Fault) -> None:
    """The kernel's own out-of-memory killer, by a memory cgroup with no room for what they allocate next."""
    for rank in fault.targets:
        pid = context.pid_of_rank(rank)
        if pid is not None:
            group = _starve(pid, f"{CGROUP}-{os.getpid()}-{rank}")
            context.later(1.0, group.rmdir)  # it is empty by then


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


def end_launcher(context: FaultContext, fault: Fault) -> None:
    context.kill_launcher()


# ---------------------------------------------------------------------- SMPs and nodes


def end_smps(by: signal.Signals) -> Action:
    def do(context: FaultContext, fault: Fault) -> None:
        for index in fault.targets:
            context.replace_smp(index, by)

    return do


def pause_smps(context: FaultContext, fault: Fault) -> None:
    """Half-open: the kernel still takes what is sent to them, and nobody answers."""
    _stop_for_a_while(context, fault, [context.pid_of_smp(index) for index in fault.targets])


SLICE_S = 0.02


def slow_smps(context: FaultContext, fault: Fault) -> None:
    """They run for one slice of time in five."""
    pids = [context.pid_of_smp(index) for index in fault.targets]
    slices = max(1, round(fault.for_s / (5 * SLICE_S)))

    def turn(left: int) -> None:
        _signal_all(pids, signal.SIGCONT)
        if left:
            context.later(SLICE_S, lambda: stop(left))

    def stop(left: int) -> None:
        _signal_all(pids, signal.SIGSTOP)
        context.later(4 * SLICE_S, lambda: turn(left - 1))

    stop(slices)


def lose_nodes(context: FaultContext, fault: Fault) -> None:
    for index in fault.targets:
        context.unplug(index)
        for rank in context.ranks_on(index):
            send_signals(context.pid_of_rank(rank), signal.SIGKILL)
        context.power_cut(index)


def freeze(context: FaultContext, fault: Fault) -> None:
    """Nothing to do: who reached the point is not told to go on."""


# ---------------------------------------------------------------------- network


def cut(context: FaultContext, fault: Fault) -> None:
    """Every TCP connection to a node breaks at both ends, as after a switch's restart; new ones may be made."""
    for index in fault.targets:
        host = context.host_of(index)
        for namespace in context.namespaces():
            with inside(namespace):
                for side in ("dst", "src"):
                    _command("ss", "-K", "-tnH", side, host)


def impair(context: FaultContext, fault: Fault) -> None:
    """What the kind says is done to packets, from now on, by the wire: `chaos.network.impairments`."""
    context.impair(fault)


# ---------------------------------------------------------------------- clocks


def jump(context: FaultContext, fault: Fault) -> None:
    """The wall clock of every process of a node jumps; back again when it is over."""
    for index in fault.targets:
        context.set_clock(index, fault.amount)
        if fault.for_s:
            context.later(fault.for_s, partial(context.set_clock, index, 0))


# ---------------------------------------------------------------------- memory and limits


def flip(pattern: str) -> Action:
    def do(context: FaultContext, fault: Fault) -> None:
        source = random.Random(fault.seed)
        for index in fault.targets:
            files = sorted(path for path in context.arena_of(index).glob(pattern) if path.stat().st_size)
            if not files:
                raise ConfigError(f"node {index} holds no {pattern} to flip a bit in")
            for path in files:
                _flip_bits(path, max(1, fault.amount), source)

    return do


def cut_short(context: FaultContext, fault: Fault) -> None:
    for index in fault.targets:
        for path in sorted(context.arena_of(index).glob("*.safetensors")):
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


def _persisted_shards(context: FaultContext, fault: Fault) -> Iterator[Path]:
    """What the nodes have written of the newest whole snapshot."""
    whole = sorted(path.parent for path in context.place().glob(f"*/{SNAPSHOT}"))
    if not whole:
        raise ConfigError("nothing is persisted yet")
    for index in fault.targets:
        yield from (whole[-1] / shard_name(f"dp{rank}") for rank in context.ranks_on(index))


def flip_persisted(context: FaultContext, fault: Fault) -> None:
    source = random.Random(fault.seed)
    for path in _persisted_shards(context, fault):
        _flip_bits(path, max(1, fault.amount), source)


def cut_persisted(context: FaultContext, fault: Fault) -> None:
    for path in _persisted_shards(context, fault):
        os.truncate(path, path.stat().st_size // 2)


def break_place(context: FaultContext, fault: Fault) -> None:
    """Nothing can be read or written there for a while."""
    place = context.place()
    aside = place.with_name(f"{place.name}.aside")
    if place.exists():
        place.rename(aside)
    place.write_text("in the way")

    def repair() -> None:
        place.unlink()
        if aside.exists():
            aside.rename(place)

    context.later(fault.for_s, repair)


def _limit(resource: int, beyond: Callable[[psutil.Process], int]) -> Action:
    """A limit of the kernel's on the SMPs for a while."""

    def do(context: FaultContext, fault: Fault) -> None:
        for index in fault.targets:
            process = psutil.Process(context.pid_of_smp(index))
            before = process.rlimit(resource)
            process.rlimit(resource, (beyond(process) + fault.amount, before[1]))
            context.later(fault.for_s, partial(_lift, process, resource, before))

    return do


def _lift(process: psutil.Process, resource: int, before: tuple[int, int]) -> None:
    if process.is_running():  # compares the time it was started at, too
        process.rlimit(resource, before)


few_files = _limit(psutil.RLIMIT_NOFILE, psutil.Process.num_fds)
no_space = _limit(psutil.RLIMIT_FSIZE, lambda process: 0)


# ---------------------------------------------------------------------- tools


def _signal_all(pids: Sequence[int | None], each: signal.Signals) -> None:
    for pid in pids:
        send_signals(pid, each)


def _stop_for_a_while(context: FaultContext, fault: Fault, pids: Sequence[int | None]) -> None:
    _signal_all(pids, signal.SIGSTOP)
    context.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def _command(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not installed: it comes with iproute2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(words)} failed: {done.stderr.strip()}")


ACTIONS: dict[str, Action] = {
    "kill-trainer": to_ranks(signal.SIGKILL),
    "term-trainer": to_ranks(signal.SIGTERM),
    "segv-trainer": to_ranks(signal.SIGSEGV),
    "abort-trainer": to_ranks(signal.SIGABRT),
    "oom-trainer": oom,
    "hang-trainer": hang,
    "zombie-trainer": zombie,
    "pause-trainer": pause_ranks,
    "kill-launcher": end_launcher,
    "kill-smp": end_smps(signal.SIGKILL),
    "segv-smp": end_smps(signal.SIGSEGV),
    "term-smp": end_smps(signal.SIGTERM),
    "pause-smp": pause_smps,
    "slow-smp": slow_smps,
    "freeze": freeze,
    "hold": freeze,
    "lose-node": lose_nodes,
    "cut-links": cut,
    "jump-clock": jump,
    "flip-shards": flip("*.safetensors"),
    "flip-parity": flip("*.parity"),
    "cut-shards": cut_short,
    "flip-persisted": flip_persisted,
    "cut-persisted": cut_persisted,
    "break-place": break_place,
    "few-files": few_files,
    "no-space": no_space,
    **{kind.name: impair for kind in CATALOGUE.values() if kind.wired},
}
"""Of every kind that clusters can inject."""
