"""How virtual clusters inject each fault of the catalogue: into real processes, files, limits, clocks and links.

A fault is due when a process reaches a named point of a step, or some time later. Some faults end on their own after a
while.
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
from typing import TYPE_CHECKING

import psutil

from holdfast.chaos.cluster import Action, lose_nodes
from holdfast.chaos.runner import send_signals
from holdfast.smp_daemon.persist.manifest import SNAPSHOT, shard_name
from holdfast.smp_daemon.shared.errors import ConfigError
from tests.proof.chaos.faults import CATALOGUE, Fault
from tests.proof.chaos.network import clocks, namespaces
from tests.proof.chaos.network.namespaces import inside

if TYPE_CHECKING:
    from tests.proof.chaos.cluster import ChaosCluster


def obstacle(kinds: Iterable[str]) -> str:
    """Why faults of these kinds cannot be injected on this machine, or an empty text."""
    wanted = [CATALOGUE[kind] for kind in kinds]
    if any(kind.rooted for kind in wanted) and os.geteuid() != 0:
        return "needs root"
    if any(kind.wired for kind in wanted) and (reason := namespaces.unavailable()):
        return reason
    return clocks.unavailable() if any(kind.clocked for kind in wanted) else ""


def check(fault: Fault) -> None:
    """Raises `ConfigError` if clusters cannot inject such a kind, or not with this amount or for this long."""
    if fault.kind not in ACTIONS:
        raise ConfigError(f"there is no fault {fault.kind!r}: choose one of {', '.join(ACTIONS)}")
    kind = CATALOGUE[fault.kind]
    if kind.amounts is not None and not kind.amounts[0] <= fault.amount <= kind.amounts[1]:
        raise ConfigError(
            f"{kind.name} with amount = {fault.amount}: choose {kind.amounts[0]} to {kind.amounts[1]} ({kind.what})"
        )
    if fault.for_s < 0 or (not fault.for_s and not kind.forever):
        raise ConfigError(f"{kind.name} with for_s = {fault.for_s}: set for_s to the seconds that it lasts")


# ---------------------------------------------------------------------- trainers


def to_ranks(*signals: signal.Signals) -> Action:
    """An action that sends signals to the trainers of the target ranks."""

    def do(cluster: ChaosCluster, fault: Fault) -> None:
        for rank in fault.targets:
            send_signals(cluster.pid_of_rank(rank), *signals)

    return do


def hang(cluster: ChaosCluster, fault: Fault) -> None:
    """Stop the targets; after `for_s` the launcher ends the job."""
    to_ranks(signal.SIGSTOP)(cluster, fault)
    cluster.later(fault.for_s, cluster.end_job)


def zombie(cluster: ChaosCluster, fault: Fault) -> None:
    """Stop the targets, let the job start again without these processes, and wake them up after `for_s`."""
    pids = [cluster.pid_of_rank(rank) for rank in fault.targets]
    to_ranks(signal.SIGSTOP)(cluster, fault)
    cluster.end_job(spare=fault.targets)
    cluster.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def pause_ranks(cluster: ChaosCluster, fault: Fault) -> None:
    _stop_for_a_while(cluster, fault, [cluster.pid_of_rank(rank) for rank in fault.targets])


def oom(cluster: ChaosCluster, fault: Fault) -> None:
    """Let the kernel's out-of-memory killer end the targets: their memory cgroup has no room for more."""
    for rank in fault.targets:
        pid = cluster.pid_of_rank(rank)
        if pid is not None:
            group = _starve(pid, f"{CGROUP}-{os.getpid()}-{rank}")
            cluster.later(1.0, group.rmdir)  # the process is gone by then, so the cgroup is empty


CGROUP = "holdfast-chaos"


def _starve(pid: int, name: str) -> Path:
    """Put a process into a memory cgroup of its own, limited to 64 KiB, and return the cgroup."""
    for base, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        group = Path(base) / name
        if (Path(base) / limit).exists() or (base == "/sys/fs/cgroup" and (Path(base) / "cgroup.procs").exists()):
            group.mkdir(exist_ok=True)
            (group / limit).write_text(str(1 << 16))
            (group / "cgroup.procs").write_text(str(pid))
            return group
    raise ConfigError("no memory cgroup can be made here: /sys/fs/cgroup has none to put the process in")


def end_launcher(cluster: ChaosCluster, fault: Fault) -> None:
    cluster.kill_launcher()


# ---------------------------------------------------------------------- SMPs and nodes


def end_smps(by: signal.Signals) -> Action:
    """An action that ends the SMPs of the target nodes with a signal, and starts successors."""

    def do(cluster: ChaosCluster, fault: Fault) -> None:
        for index in fault.targets:
            cluster.replace_smp(index, by)

    return do


def drain_nodes(cluster: ChaosCluster, fault: Fault) -> None:
    """Announce that the target nodes are to be taken away."""
    for index in fault.targets:
        cluster.drain(index)


def freeze(cluster: ChaosCluster, fault: Fault) -> None:
    """Do nothing: the cluster keeps the process at the point, until it dies (``freeze``) or for `for_s` (``hold``)."""


def pause_smps(cluster: ChaosCluster, fault: Fault) -> None:
    """Stop SMPs for a while. Connections to them are half-open: the kernel accepts bytes, but nobody answers."""
    _stop_for_a_while(cluster, fault, [cluster.pid_of_smp(index) for index in fault.targets])


SLICE_S = 0.02


def slow_smps(cluster: ChaosCluster, fault: Fault) -> None:
    """Let SMPs run for one time slice in five."""
    pids = [cluster.pid_of_smp(index) for index in fault.targets]
    slices = max(1, round(fault.for_s / (5 * SLICE_S)))

    def turn(left: int) -> None:
        _signal_all(pids, signal.SIGCONT)
        if left:
            cluster.later(SLICE_S, lambda: stop(left))

    def stop(left: int) -> None:
        _signal_all(pids, signal.SIGSTOP)
        cluster.later(4 * SLICE_S, lambda: turn(left - 1))

    stop(slices)


# ---------------------------------------------------------------------- network


def lose(cluster: ChaosCluster, fault: Fault) -> None:
    """Cut the power of nodes: nobody hears that their connections end."""
    for index in fault.targets:
        cluster.unplug(index)
    lose_nodes(cluster, fault)


def cut(cluster: ChaosCluster, fault: Fault) -> None:
    """Break every TCP connection of a node at both ends, as after a switch's restart; new connections work."""
    for index in fault.targets:
        host = cluster.host_of(index)
        for namespace in cluster.namespaces():
            with inside(namespace):
                for side in ("dst", "src"):
                    _command("ss", "-K", "-tnH", side, host)


def impair(cluster: ChaosCluster, fault: Fault) -> None:
    """Have the wire impair packets from now on, as the kind says: `tests.proof.chaos.network.impairments`."""
    cluster.impair(fault)


# ---------------------------------------------------------------------- clocks


def jump(cluster: ChaosCluster, fault: Fault) -> None:
    """Make the wall clock of every process of a node jump, and jump back after `for_s`, unless that is 0."""
    for index in fault.targets:
        cluster.set_clock(index, fault.amount)
        if fault.for_s:
            cluster.later(fault.for_s, partial(cluster.set_clock, index, 0))


# ---------------------------------------------------------------------- memory and limits


def flip(pattern: str) -> Action:
    def do(cluster: ChaosCluster, fault: Fault) -> None:
        source = random.Random(fault.seed)
        for index in fault.targets:
            files = sorted(path for path in cluster.arena_of(index).glob(pattern) if path.stat().st_size)
            if not files:
                raise ConfigError(f"node {index} holds no {pattern} to flip a bit in")
            for path in files:
                _flip_bits(path, max(1, fault.amount), source)

    return do


def cut_short(cluster: ChaosCluster, fault: Fault) -> None:
    for index in fault.targets:
        for path in sorted(cluster.arena_of(index).glob("*.safetensors")):
            os.truncate(path, path.stat().st_size // 2)


def _flip_bits(path: Path, count: int, source: random.Random) -> None:
    """Flip bits in the second half of a file, so in the snapshot's bytes and not in the header."""
    with path.open("r+b") as file:
        length = path.stat().st_size
        for _ in range(count):
            file.seek(source.randrange(length // 2, length))
            octet = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([octet ^ 1 << source.randrange(8)]))


# ---------------------------------------------------------------------- storage


def _persisted_shards(cluster: ChaosCluster, fault: Fault) -> Iterator[Path]:
    """The shards that the targets wrote of the newest complete persisted snapshot."""
    whole = sorted(path.parent for path in cluster.place().glob(f"*/*/{SNAPSHOT}"))
    if not whole:
        raise ConfigError("no complete snapshot is persisted yet, so there is none to damage")
    for index in fault.targets:
        yield from (whole[-1] / shard_name(f"dp{rank}") for rank in cluster.ranks_on(index))


def flip_persisted(cluster: ChaosCluster, fault: Fault) -> None:
    source = random.Random(fault.seed)
    for path in _persisted_shards(cluster, fault):
        _flip_bits(path, max(1, fault.amount), source)


def cut_persisted(cluster: ChaosCluster, fault: Fault) -> None:
    for path in _persisted_shards(cluster, fault):
        os.truncate(path, path.stat().st_size // 2)


def break_place(cluster: ChaosCluster, fault: Fault) -> None:
    """Make the place unreadable and unwritable for a while."""
    place = cluster.place()
    aside = place.with_name(f"{place.name}.aside")
    if place.exists():
        place.rename(aside)
    place.write_text("in the way")

    def repair() -> None:
        place.unlink()
        if aside.exists():
            aside.rename(place)

    cluster.later(fault.for_s, repair)


def _limit(resource: int, beyond: Callable[[psutil.Process], int]) -> Action:
    """An action that lowers a resource limit of SMPs for a while, to the fault's amount above `beyond(process)`."""

    def do(cluster: ChaosCluster, fault: Fault) -> None:
        for index in fault.targets:
            process = psutil.Process(cluster.pid_of_smp(index))
            before = process.rlimit(resource)
            process.rlimit(resource, (beyond(process) + fault.amount, before[1]))
            cluster.later(fault.for_s, partial(_lift, process, resource, before))

    return do


def _lift(process: psutil.Process, resource: int, before: tuple[int, int]) -> None:
    if process.is_running():  # also compares start times, so a reused pid does not match
        process.rlimit(resource, before)


few_files = _limit(psutil.RLIMIT_NOFILE, psutil.Process.num_fds)
no_space = _limit(psutil.RLIMIT_FSIZE, lambda process: 0)


# ---------------------------------------------------------------------- tools


def _signal_all(pids: Sequence[int | None], each: signal.Signals) -> None:
    for pid in pids:
        send_signals(pid, each)


def _stop_for_a_while(cluster: ChaosCluster, fault: Fault, pids: Sequence[int | None]) -> None:
    _signal_all(pids, signal.SIGSTOP)
    cluster.later(fault.for_s, partial(_signal_all, pids, signal.SIGCONT))


def _command(*words: str) -> None:
    if shutil.which(words[0]) is None:
        raise ConfigError(f"{words[0]} is not installed: it comes with iproute2")
    done = subprocess.run(words, capture_output=True, text=True, timeout=10, check=False)
    if done.returncode != 0:
        raise ConfigError(f"{' '.join(words)} failed: {done.stderr.strip()}")


ACTIONS: dict[str, Action] = {
    "kill-trainer": to_ranks(signal.SIGKILL),
    "kill-smp": end_smps(signal.SIGKILL),
    "lose-node": lose,
    "drain-node": drain_nodes,
    "freeze": freeze,
    "term-trainer": to_ranks(signal.SIGTERM),
    "segv-trainer": to_ranks(signal.SIGSEGV),
    "abort-trainer": to_ranks(signal.SIGABRT),
    "oom-trainer": oom,
    "hang-trainer": hang,
    "zombie-trainer": zombie,
    "pause-trainer": pause_ranks,
    "kill-launcher": end_launcher,
    "segv-smp": end_smps(signal.SIGSEGV),
    "term-smp": end_smps(signal.SIGTERM),
    "pause-smp": pause_smps,
    "slow-smp": slow_smps,
    "hold": freeze,
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
"""The action of every kind that clusters can inject, by name."""
