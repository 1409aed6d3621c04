"""How each fault of the catalogue (`chaos.faults`) is done: to real processes, files, limits, clocks and links."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from holdfast.chaos.ground import Fault, Ground
from holdfast.chaos.network.namespaces import inside
from holdfast.smp_daemon.persist.manifest import SNAPSHOT, shard_name
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.paths import ARENA_ENV

# ---------------------------------------------------------------------- trainers


def to_ranks(*signals: signal.Signals) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(ground.pid_of_rank(rank), *signals)

    return do


def hang(ground: Ground, fault: Fault) -> None:
    """They stop, and some time later the launcher ends the job."""
    to_ranks(signal.SIGSTOP)(ground, fault)
    ground.later(fault.for_s, ground.end_job)


def zombie(ground: Ground, fault: Fault) -> None:
    """They stop, the job is started again without them, and they wake up in the middle of it."""
    pids = [ground.pid_of_rank(rank) for rank in fault.targets]
    to_ranks(signal.SIGSTOP)(ground, fault)
    ground.end_job(spare=fault.targets)
    ground.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def pause_ranks(ground: Ground, fault: Fault) -> None:
    _stop_for_a_while(ground, fault, [ground.pid_of_rank(rank) for rank in fault.targets])


def oom(ground: Ground, fault: Fault) -> None:
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


def end_launcher(ground: Ground, fault: Fault) -> None:
    ground.kill_launcher()


# ---------------------------------------------------------------------- SMPs and nodes


def end_smps(by: signal.Signals) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        for index in fault.targets:
            ground.replace_smp(index, by)

    return do


def pause_smps(ground: Ground, fault: Fault) -> None:
    """Half-open: the kernel still takes what is sent to them, and nobody answers."""
    _stop_for_a_while(ground, fault, [ground.pid_of_smp(index) for index in fault.targets])


SLICE_S = 0.02


def slow_smps(ground: Ground, fault: Fault) -> None:
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


def lose_nodes(ground: Ground, fault: Fault) -> None:
    for index in fault.targets:
        ground.unplug(index)
        for rank in ground.ranks_on(index):
            send_signals(ground.pid_of_rank(rank), signal.SIGKILL)
        ground.power_cut(index)


def freeze(ground: Ground, fault: Fault) -> None:
    """Nothing to do: who reached the point is not told to go on."""


# ---------------------------------------------------------------------- network


def cut(ground: Ground, fault: Fault) -> None:
    """Every TCP connection to a node breaks at both ends, as after a switch's restart; new ones may be made."""
    for index in fault.targets:
        host = ground.host_of(index)
        for namespace in ground.namespaces():
            with inside(namespace):
                for side in ("dst", "src"):
                    _command("ss", "-K", "-tnH", side, host)


def impair(ground: Ground, fault: Fault) -> None:
    """What the kind says is done to packets, from now on, by the wire: `chaos.network.impairments`."""
    ground.impair(fault)


# ---------------------------------------------------------------------- clocks


def jump(ground: Ground, fault: Fault) -> None:
    """The wall clock of every process of a node jumps; back again when it is over."""
    for index in fault.targets:
        ground.set_clock(index, fault.amount)
        if fault.for_s:
            ground.later(fault.for_s, partial(ground.set_clock, index, 0))


YEAR_S = 366 * 24 * 3600

# ---------------------------------------------------------------------- memory and limits


def flip(pattern: str) -> Callable[[Ground, Fault], None]:
    def do(ground: Ground, fault: Fault) -> None:
        source = random.Random(fault.seed)
        for index in fault.targets:
            files = sorted(path for path in ground.arena_of(index).glob(pattern) if path.stat().st_size)
            if not files:
                raise ConfigError(f"node {index} holds no {pattern} to flip a bit in")
            for path in files:
                _flip_bits(path, max(1, fault.amount), source)

    return do


def cut_short(ground: Ground, fault: Fault) -> None:
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


def flip_persisted(ground: Ground, fault: Fault) -> None:
    source = random.Random(fault.seed)
    for path in _persisted_shards(ground, fault):
        _flip_bits(path, max(1, fault.amount), source)


def cut_persisted(ground: Ground, fault: Fault) -> None:
    for path in _persisted_shards(ground, fault):
        os.truncate(path, path.stat().st_size // 2)


def break_place(ground: Ground, fault: Fault) -> None:
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


few_files = _limit(psutil.RLIMIT_NOFILE, psutil.Process.num_fds)
no_space = _limit(psutil.RLIMIT_FSIZE, lambda process: 0)


# ---------------------------------------------------------------------- tools


def send_signals(pid: int | None, *signals: signal.Signals) -> None:
    """Send signals, if the process is there: it may have ended by itself."""
    for each in signals if pid is not None else ():
        try:
            os.kill(pid or 0, each)
        except ProcessLookupError:
            return


def using_arenas(folder: Path) -> list[psutil.Process]:
    """Processes that were told of an arena in `folder` or below it, in whatever session, SMPs too."""
    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):  # it has ended, or is another user's
            told = Path(process.environ().get(ARENA_ENV, "/"))
            if process.status() != psutil.STATUS_ZOMBIE and told.is_relative_to(folder):
                found.append(process)
    return found


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
