"""The catalogue of faults: the name of each, what it does, and where it can be injected. Nothing is injected here.

Virtual clusters (`chaos.cluster`), a user's command (`chaos.user`), Ray (`tests.proof.ray`) and the simulation
(`tests.proof.sim`) take names and descriptions from here, and each injects faults in its own way.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.errors import ConfigError

YEAR_S = 366 * 24 * 3600


class Where(enum.Flag):
    """Which backends can inject a fault."""

    CLUSTER = enum.auto()
    COMMAND = enum.auto()
    RAY = enum.auto()
    SIMULATION = enum.auto()


STEP_POINTS = ("train.step", "copy.before", "copy.middle", "copy.done")
"""Failpoints that a trainer passes in every step."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue.

    Attributes:
        what: a description for people.
        of: the kind of its targets: ``rank``, ``node`` or empty.
        where: the backends that can inject it. Of the following, only `ends_job` applies beyond virtual clusters.
        ends_job: whether trainers die of it, so that the job starts again.
        wipes_memory: whether a node's memory is lost.
        rooted: whether it needs root.
        wired: whether packets between the nodes must be in its reach (`tests.proof.chaos.network`).
        clocked: whether it needs clocks that can be set (`tests.proof.chaos.network.clocks`).
        amounts: the smallest and largest `Fault.amount`; None: the kind takes no amount, or any.
        forever: whether it may last to the end of the run (`Fault.for_s` of 0).
    """

    name: str
    what: str
    of: str = ""
    where: Where = Where.CLUSTER
    ends_job: bool = False
    wipes_memory: bool = False
    rooted: bool = False
    wired: bool = False
    clocked: bool = False
    amounts: tuple[int, int] | None = None
    forever: bool = True

    @property
    def needs(self) -> str:
        """What the fault needs that not every machine has, or an empty text."""
        if self.wired:
            return "root and /dev/net/tun"
        return "root" if self.rooted else "a C compiler" if self.clocked else ""


@dataclass(slots=True)
class Fault:
    """A fault that a virtual cluster is to inject when a process reaches a point.

    Attributes:
        who: the process that triggers it: ``rank3`` or ``smp2``.
        step: the step or snapshot at which it is triggered; None: any, see `due_at`.
        kind: the name of a kind that clusters can inject.
        targets: ranks or node indices, as the kind says.
        delay_s: how long after the point it is injected; the process goes on meanwhile.
        for_s: how long it lasts, for kinds that end; for those of the network and the clock, 0 is until the end.
        amount: bits to flip, descriptors or bytes to leave, percent of packets, milliseconds, seconds, kB/s: as the
            kind says.
        seed: seed for what is random about it.
        nth: which arrival of the process at the point triggers it, counted from 1; `seen` counts them.
        due: whether it has been triggered.
        fired_at: when it was injected (`time.monotonic`); None before.
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
        """Whether the fault still waits for this process to reach this point of this step."""
        return not self.due and (self.who, self.point) == (who, point) and self.step in (None, step)


def due_at(faults: Sequence[Fault], who: str, point: str, step: int) -> list[Fault]:
    """The faults that wait for this process at this point. A fault without a step strikes the recovery from the faults
    before it in the list, so it waits until those have been injected."""
    found, all_done = [], True
    for fault in faults:
        if fault.matches(who, point, step) and (fault.step is not None or all_done):
            found.append(fault)
        all_done = all_done and fault.fired_at is not None
    return found


def check(fault: Fault) -> None:
    """Raises `ConfigError` if clusters cannot inject such a kind, or not with this amount or for this long."""
    known = injected_by(Where.CLUSTER)
    if fault.kind not in known:
        raise ConfigError(f"there is no fault {fault.kind!r}: choose one of {', '.join(known)}")
    kind = known[fault.kind]
    if kind.amounts is not None and not kind.amounts[0] <= fault.amount <= kind.amounts[1]:
        raise ConfigError(
            f"{kind.name} with amount = {fault.amount}: choose {kind.amounts[0]} to {kind.amounts[1]} ({kind.what})"
        )
    if fault.for_s < 0 or (not fault.for_s and not kind.forever):
        raise ConfigError(f"{kind.name} with for_s = {fault.for_s}: set for_s to the seconds that it lasts")


def injected_by(where: Where) -> dict[str, Kind]:
    """The kinds that a backend can inject, by name, in the order of the catalogue."""
    return {name: kind for name, kind in CATALOGUE.items() if where in kind.where}


_PERCENT = (1, 90)
_C, _U, _R, _S = Where.CLUSTER, Where.COMMAND, Where.RAY, Where.SIMULATION

CATALOGUE: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        # trainers
        Kind("kill-trainer", "SIGKILL", "rank", _C | _U | _R | _S, ends_job=True),
        Kind("term-trainer", "SIGTERM, not handled", "rank", _C | _U, ends_job=True),
        Kind("segv-trainer", "SIGSEGV", "rank", _C | _U, ends_job=True),
        Kind("abort-trainer", "SIGABRT", "rank", ends_job=True),
        Kind("oom-trainer", "the kernel's out-of-memory killer", "rank", ends_job=True, rooted=True),
        Kind("hang-trainer", "stops; the launcher ends the job", "rank", ends_job=True),
        Kind("zombie-trainer", "stops, is replaced, wakes up", "rank", _C | _S, ends_job=True),
        Kind("pause-trainer", "stops for a while", "rank", _C | _U),
        Kind("kill-trainers", "SIGKILL to all of them at once", "", _U | _S, ends_job=True),
        Kind("kill-launcher", "SIGKILL; trainers die with it", "", _C | _U, ends_job=True),
        Kind("kill-process", "SIGKILL to whichever process comes to a point", "", _S),
        Kind("grow-state", "from now on every rank has more state", "", _S),
        # SMPs
        Kind("kill-smp", "SIGKILL; another takes over", "node", _C | _U | _S),
        Kind("segv-smp", "SIGSEGV; another takes over", "node"),
        Kind("term-smp", "SIGTERM; another takes over", "node"),
        Kind("pause-smp", "half-open: connected and silent", "node", _C | _U | _S),
        Kind("slow-smp", "runs a fifth of the time", "node"),
        Kind("freeze", "stays where it is until it dies"),
        Kind("hold", "one thread stays where it is for a while"),
        # what launchers and Ray are made of
        Kind("kill-other", "SIGKILL to other processes of the command, such as raylets", "", _U, ends_job=True),
        Kind("kill-controller", "SIGKILL to what restarts the trainers of Ray Train", "", _R, ends_job=True),
        Kind("kill-raylet", "SIGKILL; what it started dies with it, but for the SMP", "node", _R, ends_job=True),
        Kind("kill-gcs", "SIGKILL to the GCS of Ray's head, which is started again", "", _R),
        Kind("lose-head", "Ray's head and all of Ray with it; memory stays", "", _R, ends_job=True),
        # nodes
        Kind("lose-node", "power cut: memory gone", "node", _C | _U | _R | _S, ends_job=True, wipes_memory=True),
        Kind("drain-node", "announced: the job ends at a boundary, and the node goes", "node", ends_job=True),
        Kind("lose-nodes", "power cut of two or three at once", "", _S, ends_job=True, wipes_memory=True),
        Kind("freeze-node", "its raylet, and what that started, stop", "node", _R, ends_job=True),
        Kind("thaw-node", "what was frozen there goes on, although it was replaced", "node", _R),
        Kind("slow-node", "all its processes run more slowly for a while", "node", _S),
        # links
        Kind("cut-links", "every connection to it breaks", "node", rooted=True),
        Kind("lose-packets", "percent of its packets are lost", "node", wired=True, amounts=_PERCENT),
        Kind("delay-packets", "its packets are late: ms, on average", "node", wired=True, amounts=(1, 500)),
        Kind("reorder-packets", "percent of its packets are overtaken", "node", wired=True, amounts=_PERCENT),
        Kind("repeat-packets", "percent of its packets come twice", "node", wired=True, amounts=_PERCENT),
        Kind("throttle", "its links are limited to this many kB/s", "node", wired=True, amounts=(10, 1 << 20)),
        Kind("partition", "they do not reach the others, nor these them", "node", _C | _S, wired=True, forever=False),
        Kind("mute-node", "it hears others, and nobody hears it", "node", wired=True, forever=False),
        Kind("deaf-node", "others hear it, and it hears nobody", "node", wired=True, forever=False),
        Kind("flip-in-flight", "bits of units flip on its links", "node", _C | _S, wired=True, amounts=(1, 10_000)),
        # clocks
        Kind(
            "jump-clock",
            "its wall clock jumps this many seconds ahead, or back",
            "node",
            clocked=True,
            amounts=(-YEAR_S, YEAR_S),
        ),
        # memory, storage and limits
        Kind("flip-shards", "bits flip in its slots", "node"),
        Kind("flip-parity", "bits flip in its parity", "node"),
        Kind("flip-stored", "a bit flips in one of its slots, of data or of parity", "node", _S),
        Kind("cut-shards", "its slot files lose their second half", "node"),
        Kind("flip-persisted", "bits flip in what it persisted last", "node"),
        Kind("cut-persisted", "what it persisted last loses its second half", "node"),
        Kind("break-place", "storage fails for a while", forever=False),
        Kind("few-files", "EMFILE in its SMP", "node"),
        Kind("no-space", "its SMP's files cannot grow", "node"),
    )
}
"""Every kind, by name, in the order in which people see them."""
