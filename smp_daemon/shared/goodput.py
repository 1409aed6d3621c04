"""Where the time of a run goes: into steps that count, or into something else. Pure.

Each rank keeps account in `Spent`, which every snapshot carries to the next start. So steps that are done again never
count twice, and no restart, however the one before it ended, loses the account.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.smp_daemon.shared.quantities import duration
from holdfast.smp_daemon.shared.stragglers import UNKNOWN, Own

PARTS = {
    "steps": "steps that count",
    "stall": "waiting for snapshots",
    "repeated": "steps that had to be done again",
    "detecting": "failures, until new processes began",
    "starting": "new processes, until they asked for their state",
    "loading": "loading it",
}
"""What time goes into, by the names of attributes of `Spent`."""


@dataclass(frozen=True, slots=True)
class Spent:
    """Where the time of a run went, as one of its ranks has seen it. Moments are seconds since 1970, durations seconds.

    Attributes:
        since, until: when the account begins, and how far it goes.
        steps, stall, repeated, detecting, starting, loading: see `PARTS`. Whatever a loop does between two steps counts
            as a part of the step that follows.
        count: number of steps that count. `again`: number of finished steps that had to be done again.
        own: what of a step this rank does by itself, at present.
    """

    since: float = 0.0
    until: float = 0.0
    steps: float = 0.0
    stall: float = 0.0
    repeated: float = 0.0
    detecting: float = 0.0
    starting: float = 0.0
    loading: float = 0.0
    count: int = 0
    again: int = 0
    own: Own = UNKNOWN

    def stepped(self, now: float, stall_s: float, count: int = 1) -> Spent:
        """`count` steps were done since `until`, the last of which ended `now`; for `stall_s` of that time the training
        thread was in the hook."""
        passed = max(0.0, now - self.until)
        stall = min(stall_s, passed)
        return replace(
            self,
            until=self.until + passed,
            steps=self.steps + passed - stall,
            stall=self.stall + stall,
            count=self.count + count,
        )

    def restarted(self, began: float, asked: float, loaded: float, again: int) -> Spent:
        """A start goes on from the snapshot that carried this account.

        Args:
            began: when this process began; before `until` if it is one of the previous start.
            asked, loaded: when it asked for its state, and when it had it.
            again: how many steps after the snapshot had been finished. How long they took is known by the others.
        """
        step_s = (self.steps + self.stall) / self.count if self.count else 0.0
        loaded = max(loaded, self.until)
        asked = min(max(asked, self.until), loaded)
        ended = min(self.until + again * step_s, asked)
        began = asked if began < self.until else min(max(began, ended), asked)
        return replace(
            self,
            until=loaded,
            repeated=self.repeated + ended - self.until,
            detecting=self.detecting + began - ended,
            starting=self.starting + asked - began,
            loading=self.loading + loaded - asked,
            again=self.again + again,
            own=UNKNOWN,
        )

    def effective(self, now: float | None = None) -> float | None:
        """The effective training time ratio: the share of time that went into steps that count. None: there is no time
        yet.

        Args:
            now: until then, as nothing has trained since `until`; None: until `until`.
        """
        passed = max(self.until, now or 0.0) - self.since
        return self.steps / passed if self.count and passed > 0 else None

    def scalars(self) -> dict[str, float]:
        """The account as numbers by name, for a logger such as W&B or TensorBoard."""
        own = {f"holdfast/{name}_s": float(getattr(self, name)) for name in PARTS}
        return {**own, "holdfast/effective": self.effective() or 0.0, "holdfast/steps_again": float(self.again)}

    def sentence(self, now: float | None = None) -> str:
        """The account in words; empty if there is no time yet. `now`: see `effective`."""
        effective = self.effective(now)
        if effective is None:
            return ""
        passed = max(self.until, now or 0.0) - self.since
        lost = {PARTS[name]: getattr(self, name) for name in PARTS if name != "steps"}
        if now is not None and now > self.until:
            lost["no training since then"] = now - self.until
        parts = [f"{seconds / passed:.1%} into {what}" for what, seconds in lost.items() if seconds / passed >= 0.0005]
        steps = [f"steps done again: {self.again:,}"] if self.again else []
        told = [f"{effective:.1%} of {duration(passed)} went into steps that count", *parts, *steps]
        return ", ".join(told)


UNTOLD = Spent()
"""The account of a run of which nobody has told."""
