"""All faults of all backends: virtual clusters (`tests.proof.chaos`), a user's command (`holdfast.chaos.user`), Ray
(`tests.proof.ray`) and the simulation (`tests.proof.sim`). Each injects them in its own way, and has a table of those
that it can inject.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field

from holdfast.chaos import faults as product
from holdfast.chaos.faults import Kind

YEAR_S = 366 * 24 * 3600


@dataclass(frozen=True, slots=True)
class TrialKind(Kind):
    """One entry of the catalogue. What it adds to `Kind` applies to virtual clusters only.

    Attributes:
        rooted: whether it needs root.
        wired: whether packets between the nodes must be in its reach (`tests.proof.chaos.network`).
        clocked: whether it needs clocks that can be set (`tests.proof.chaos.network.clocks`).
        amounts: the smallest and largest `Fault.amount`; None: the kind takes no amount, or any.
        forever: whether it may last to the end of the run (`Fault.for_s` of 0).
    """

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
class Fault(product.Fault):
    """A fault that a virtual cluster is to inject.

    Attributes:
        delay_s: how long after the point it is injected; the process goes on meanwhile.
        for_s: how long it lasts, for kinds that end; for those of the network and the clock, 0 is until the end.
        amount: bits to flip, descriptors or bytes to leave, percent of packets, milliseconds, seconds, kB/s: as the
            kind says.
        seed: seed for what is random about it.
        nth: which arrival of the process at the point triggers it, counted from 1; `seen` counts them.
    """

    delay_s: float = 0.0
    for_s: float = 0.0
    amount: int = 0
    seed: int = 0
    nth: int = 1
    seen: int = field(default=0, compare=False)


def due_at(faults: Sequence[Fault], who: str, point: str, step: int) -> list[Fault]:
    """The faults that wait for this process at this point. A fault without a step strikes the recovery from the faults
    before it in the list, so it waits until those have been injected."""
    found, all_done = [], True
    for fault in faults:
        if fault.matches(who, point, step) and (fault.step is not None or all_done):
            found.append(fault)
        all_done = all_done and fault.fired_at is not None
    return found


_PERCENT = (1, 90)

CATALOGUE: dict[str, TrialKind] = {
    kind.name: kind
    for kind in (
        *(TrialKind(**asdict(kind)) for kind in product.CATALOGUE.values()),
        # trainers
        TrialKind("abort-trainer", "SIGABRT", "rank", ends_job=True),
        TrialKind("oom-trainer", "the kernel's out-of-memory killer", "rank", ends_job=True, rooted=True),
        TrialKind("hang-trainer", "stops; the launcher ends the job", "rank", ends_job=True),
        TrialKind("zombie-trainer", "stops, is replaced, wakes up", "rank", ends_job=True),
        TrialKind("kill-process", "SIGKILL to whichever process comes to a point", ""),
        TrialKind("grow-state", "from now on every rank has more state", ""),
        # SMPs
        TrialKind("segv-smp", "SIGSEGV; another takes over", "node"),
        TrialKind("term-smp", "SIGTERM; another takes over", "node"),
        TrialKind("slow-smp", "runs a fifth of the time", "node"),
        TrialKind("freeze", "stays where it is until it dies"),
        TrialKind("hold", "one thread stays where it is for a while"),
        # what launchers and Ray are made of
        TrialKind("kill-controller", "SIGKILL to what restarts the trainers of Ray Train", "", ends_job=True),
        TrialKind("kill-raylet", "SIGKILL; what it started dies with it, but for the SMP", "node", ends_job=True),
        TrialKind("kill-gcs", "SIGKILL to the GCS of Ray's head, which is started again", ""),
        TrialKind("lose-head", "Ray's head and all of Ray with it; memory stays", "", ends_job=True),
        # nodes
        TrialKind("drain-node", "announced: the job ends at a boundary, and the node goes", "node", ends_job=True),
        TrialKind("lose-nodes", "power cut of two or three at once", "", ends_job=True),
        TrialKind("freeze-node", "its raylet, and what that started, stop", "node", ends_job=True),
        TrialKind("thaw-node", "what was frozen there goes on, although it was replaced", "node"),
        TrialKind("slow-node", "all its processes run more slowly for a while", "node"),
        # links
        TrialKind("cut-links", "every connection to it breaks", "node", rooted=True),
        TrialKind("lose-packets", "percent of its packets are lost", "node", wired=True, amounts=_PERCENT),
        TrialKind("delay-packets", "its packets are late: ms, on average", "node", wired=True, amounts=(1, 500)),
        TrialKind("reorder-packets", "percent of its packets are overtaken", "node", wired=True, amounts=_PERCENT),
        TrialKind("repeat-packets", "percent of its packets come twice", "node", wired=True, amounts=_PERCENT),
        TrialKind("throttle", "its links are limited to this many kB/s", "node", wired=True, amounts=(10, 1 << 20)),
        TrialKind("partition", "they do not reach the others, nor these them", "node", wired=True, forever=False),
        TrialKind("mute-node", "it hears others, and nobody hears it", "node", wired=True, forever=False),
        TrialKind("deaf-node", "others hear it, and it hears nobody", "node", wired=True, forever=False),
        TrialKind("flip-in-flight", "bits of units flip on its links", "node", wired=True, amounts=(1, 10_000)),
        # clocks
        TrialKind(
            "jump-clock",
            "its wall clock jumps this many seconds ahead, or back",
            "node",
            clocked=True,
            amounts=(-YEAR_S, YEAR_S),
        ),
        # memory, storage and limits
        TrialKind("flip-shards", "bits flip in its slots", "node"),
        TrialKind("flip-parity", "bits flip in its parity", "node"),
        TrialKind("flip-stored", "a bit flips in one of its slots, of data or of parity", "node"),
        TrialKind("cut-shards", "its slot files lose their second half", "node"),
        TrialKind("flip-persisted", "bits flip in what it persisted last", "node"),
        TrialKind("cut-persisted", "what it persisted last loses its second half", "node"),
        TrialKind("break-place", "storage fails for a while", forever=False),
        TrialKind("few-files", "EMFILE in its SMP", "node"),
        TrialKind("no-space", "its SMP's files cannot grow", "node"),
    )
}
"""Every kind, by name."""
