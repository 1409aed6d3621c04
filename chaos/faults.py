"""The faults that users see: what `holdfast chaos run` injects into a command, and the demo into a virtual cluster.

`tests.proof.chaos.faults` adds those that only this project's own tests inject.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_POINTS = ("train.step", "copy.before", "copy.middle", "copy.done")
"""Failpoints that a trainer passes in every step."""

RECORDS = ("node", "layout", "shard", "parity", "smp")
"""Kinds of JSON files in an arena."""

TRAINER_FAILPOINTS = ("copy.before", "copy.middle", "copy.done", "restore.before", "restore.middle")
"""Points that trainers reach."""

PERSIST_FAILPOINTS = ("persist.middle", "persist.written", "persist.done")

SMP_FAILPOINTS = (
    # an SMP starts, and takes over what a predecessor left
    *("arena.made", "adopt.before", "adopt.board", "adopt.slot", "adopt.done"),
    *("start.adopted", "start.bound", "start.serving", "adopt.verify", "rejoin.before", "rejoin.done"),
    # a start of the job, or a change of its layout
    *(
        "fence.marked",
        "join.fenced",
        "join.noted",
        "join.done",
        "configure.reserved",
        "configure.done",
        "slot.opened",
        "slot.made",
    ),
    "reserve.slice",
    # a snapshot
    *("seal.released", "seal.before", "seal.digested", "seal.committed", "seal.done"),
    *("encode.before", "encode.middle", "encode.done", "parity.taken", "parity.accumulated", "parity.complete"),
    *("parity.committed", "parity.announced", "parity.told", "outcome.protected", "outcome.failed"),
    *("slot.freed", "slot.removed", "layout.removed"),
    # bytes are recovered and repaired
    *("receive.taken", "receive.checked", "receive.done", "rebuild.middle", "drop.done"),
    *("repair.before", "repair.done", "repair_parity.taken", "repair_parity.accumulated", "repair_parity.done"),
    *("regroup.declined", "regroup.planned", "regroup.adopt", "regroup.encode", "regroup.release", "regroup.done"),
    # a snapshot is written to storage
    *PERSIST_FAILPOINTS,
    # the end
    *("finish.told", "finish.closing", "arena.emptied", "arena.removed"),
    # JSON records: before the write, once written beside the old file, and once renamed over it
    *(f"record.{kind}.{when}" for kind in RECORDS for when in ("before", "part", "done")),
)
"""Points that SMPs reach: before and after every change to files that outlive the process."""

FAILPOINTS = (*TRAINER_FAILPOINTS, *SMP_FAILPOINTS)
"""Every failpoint inside holdfast. Jobs may add their own, such as ``train.step``."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One entry of the catalogue.

    Attributes:
        what: a description for people.
        of: the kind of its targets: ``rank``, ``node`` or empty.
        ends_job: whether trainers die of it, so that the job starts again.
    """

    name: str
    what: str
    of: str = ""
    ends_job: bool = False


@dataclass(slots=True)
class Fault:
    """A fault that a virtual cluster is to inject when a process reaches a point.

    Attributes:
        who: the process that triggers it: ``rank3`` or ``smp2``.
        step: the step or snapshot at which it is triggered; None: any.
        kind: the name of a kind that the cluster can inject.
        targets: ranks or node indices, as the kind says.
        due: whether it has been triggered.
        fired_at: when it was injected (`time.monotonic`); None before.
    """

    who: str
    point: str
    step: int | None
    kind: str
    targets: tuple[int, ...]
    due: bool = field(default=False, compare=False, kw_only=True)
    fired_at: float | None = field(default=None, compare=False, kw_only=True)

    def matches(self, who: str, point: str, step: int) -> bool:
        """Whether the fault still waits for this process to reach this point of this step."""
        return not self.due and (self.who, self.point) == (who, point) and self.step in (None, step)


CATALOGUE: dict[str, Kind] = {
    kind.name: kind
    for kind in (
        Kind("kill-trainer", "SIGKILL", "rank", ends_job=True),
        Kind("term-trainer", "SIGTERM, not handled", "rank", ends_job=True),
        Kind("segv-trainer", "SIGSEGV", "rank", ends_job=True),
        Kind("pause-trainer", "stops for a while", "rank"),
        Kind("kill-trainers", "SIGKILL to all of them at once", ends_job=True),
        Kind("kill-launcher", "SIGKILL; trainers die with it", ends_job=True),
        Kind("kill-smp", "SIGKILL; another takes over", "node"),
        Kind("pause-smp", "half-open: connected and silent", "node"),
        Kind("kill-other", "SIGKILL to other processes of the command, such as raylets", ends_job=True),
        Kind("lose-node", "power cut: memory gone", "node", ends_job=True),
    )
}
"""Every kind, by name, in the order in which people see them."""
