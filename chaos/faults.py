"""The faults that users see: what `holdfast chaos run` injects into a command, and the demo into a virtual cluster.

`tests.proof.chaos.faults` adds those that only this project's own tests inject.
"""

from __future__ import annotations

from dataclasses import dataclass, field

STEP_POINTS = ("train.step", "copy.before", "copy.middle", "copy.done")
"""Failpoints that a trainer passes in every step."""


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
