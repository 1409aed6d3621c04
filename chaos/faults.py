"""What can be broken in a virtual cluster: a catalogue, each fault done to real processes, files and connections.

A fault is due when a process reaches a named point of a step; it may be put off by some time after that, and those
that pass by themselves last for a while. `inject` does one; the cluster knows the processes.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from holdfast.chaos import harm
from holdfast.chaos.ground import Fault, Ground
from holdfast.chaos.network import clocks, namespaces
from holdfast.smp_daemon.shared.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue.

    Attributes:
        of: what its targets are: ``rank``, ``node`` or nothing.
        ends_job: whether trainers die of it, so that the job is started again.
        loses: whether a node's memory is gone.
        rooted: whether it needs root.
        wired: whether it needs a `chaos.network.wire` between the nodes.
        clocked: whether it needs clocks that can be set (`chaos.network.clocks`).
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


CATALOGUE: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill-trainer", "SIGKILL", "rank", harm.to_ranks(signal.SIGKILL), ends_job=True),
        Kind("term-trainer", "SIGTERM, not handled", "rank", harm.to_ranks(signal.SIGTERM), ends_job=True),
        Kind("segv-trainer", "SIGSEGV", "rank", harm.to_ranks(signal.SIGSEGV), ends_job=True),
        Kind("abort-trainer", "SIGABRT", "rank", harm.to_ranks(signal.SIGABRT), ends_job=True),
        Kind("oom-trainer", "the kernel's out-of-memory killer", "rank", harm.oom, ends_job=True, rooted=True),
        Kind("hang-trainer", "stops; the launcher ends the job", "rank", harm.hang, ends_job=True),
        Kind("zombie-trainer", "stops, is replaced, wakes up", "rank", harm.zombie, ends_job=True),
        Kind("pause-trainer", "stops for a while", "rank", harm.pause_ranks),
        Kind("kill-launcher", "SIGKILL; trainers die with it", "", harm.end_launcher, ends_job=True),
        Kind("kill-smp", "SIGKILL; another takes over", "node", harm.end_smps(signal.SIGKILL)),
        Kind("segv-smp", "SIGSEGV; another takes over", "node", harm.end_smps(signal.SIGSEGV)),
        Kind("term-smp", "SIGTERM; another takes over", "node", harm.end_smps(signal.SIGTERM)),
        Kind("pause-smp", "half-open: connected and silent", "node", harm.pause_smps),
        Kind("slow-smp", "runs a fifth of the time", "node", harm.slow_smps),
        Kind("freeze", "stays where it is until it dies", "", harm.freeze),
        Kind("hold", "one thread stays where it is for a while", "", harm.freeze),
        Kind("lose-node", "power cut: memory gone", "node", harm.lose_nodes, ends_job=True, loses=True),
        Kind("cut-links", "every connection to it breaks", "node", harm.cut, rooted=True),
        Kind("lose-packets", "percent of its packets are lost", "node", harm.impair, wired=True, amounts=(1, 90)),
        Kind(
            "delay-packets", "its packets are late: ms, on average", "node", harm.impair, wired=True, amounts=(1, 500)
        ),
        Kind(
            "reorder-packets", "percent of its packets are overtaken", "node", harm.impair, wired=True, amounts=(1, 90)
        ),
        Kind("repeat-packets", "percent of its packets come twice", "node", harm.impair, wired=True, amounts=(1, 90)),
        Kind("throttle", "its links carry so many kB/s", "node", harm.impair, wired=True, amounts=(10, 1 << 20)),
        Kind(
            "partition", "they do not reach the others, nor these them", "node", harm.impair, wired=True, forever=False
        ),
        Kind("mute-node", "it hears others, and nobody hears it", "node", harm.impair, wired=True, forever=False),
        Kind("deaf-node", "others hear it, and it hears nobody", "node", harm.impair, wired=True, forever=False),
        Kind("flip-in-flight", "bits of units flip on its links", "node", harm.impair, wired=True, amounts=(1, 10_000)),
        Kind(
            "jump-clock",
            "its wall clock is so many s ahead, or behind",
            "node",
            harm.jump,
            clocked=True,
            amounts=(-harm.YEAR_S, harm.YEAR_S),
        ),
        Kind("flip-shards", "bits flip in its slots", "node", harm.flip("*.safetensors")),
        Kind("flip-parity", "bits flip in its parity", "node", harm.flip("*.parity")),
        Kind("cut-shards", "its slot files lose their second half", "node", harm.cut_short),
        Kind("flip-persisted", "bits flip in what it persisted last", "node", harm.flip_persisted),
        Kind("cut-persisted", "what it persisted last loses its second half", "node", harm.cut_persisted),
        Kind("break-place", "storage fails for a while", "", harm.break_place, forever=False),
        Kind("few-files", "EMFILE in its SMP", "node", harm.few_files),
        Kind("no-space", "its SMP's files cannot grow", "node", harm.no_space),
    )
}
"""Every kind, by name."""
