"""Where to go back to, tier by tier, and how often each is tried. Pure; the same on every rank.

The tiers, best first: ``local``, what every node still holds; ``group``, what others hold or parity gives;
``previous``, an older snapshot in memory, never older than one that was protected; ``persisted``, if that tier is on.
The first two cost no step. The last is taken only if memory has nothing that may be taken, for then steps are lost
that were protected: what was asked for by switching it on.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.smp_daemon.shared.errors import ConfigError, PlaceError
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.plan import RestorePlan, candidates

ATTEMPTS = 4
"""So often is memory tried, and so often are persisted snapshots."""

ENOUGH_FAILURES = 2
"""So often is a snapshot tried that was never promised, if it cannot be had after all; or a persisted one, unless it
is seen to be damaged: then it is not tried again."""

PERSISTED = "persisted"


@dataclass(slots=True)
class Course:
    """What was tried so far.

    Attributes:
        passed_over: why each snapshot and each tier that was tried was not taken, in order.
        given_up: why memory is not tried any more; empty if it is.
    """

    failures: Counter[SnapshotId] = field(default_factory=Counter)
    persisted_failures: Counter[SnapshotId] = field(default_factory=Counter)
    passed_over: list[str] = field(default_factory=list)
    given_up: str = ""

    def hopeless(self, unpromised: Collection[SnapshotId]) -> set[SnapshotId]:
        """What of memory is not tried again, of what was never promised."""
        return {snapshot for snapshot, count in self.failures.items() if count >= ENOUGH_FAILURES} & set(unpromised)

    def failed(self, plan: RestorePlan, reason: str, *, damaged: bool) -> None:
        """An attempt failed. `damaged`: a rank has seen that its bytes are not what was written."""
        if plan.sources.persisted:
            self.persisted_failures[plan.snapshot] += ENOUGH_FAILURES if damaged else 1
        else:
            self.failures[plan.snapshot] += 1
            if self.failures.total() == ATTEMPTS:
                self.given_up = f"recovery failed {ATTEMPTS} times; last: {reason}"
        where = PERSISTED if plan.sources.persisted else "in memory"
        self.note(f"{plan.snapshot}, {where}: {reason}")

    def passed(self, snapshot: SnapshotId, reason: str) -> None:
        """A persisted snapshot cannot be looked into."""
        self.persisted_failures[snapshot] += 1
        self.note(f"{snapshot}, {PERSISTED}: {reason}")

    def note(self, reason: str) -> None:
        """A reason why something was passed over; once."""
        if reason not in self.passed_over:
            self.passed_over.append(reason)

    def choose_persisted(self, answers: Sequence[Persisted]) -> SnapshotId | None:
        """The newest persisted snapshot that every rank's SMP sees, whole, and that has not failed; None if there is
        none, or the tier is off.

        Raises:
            ConfigError: the tier is on for some of them only, or not at the same place.
            PlaceError: one of them cannot see what is there. To start from nothing then might undo all that is.
        """
        if self.persisted_failures.total() >= ATTEMPTS:
            return None
        if problems := sorted({answer.problem for answer in answers if answer.problem}):
            raise PlaceError(
                f"memory holds nothing to go back to, and what is persisted cannot be seen: {problems[0]}. "
                "Bring the storage back, or start without HOLDFAST_PERSIST"
            )
        places = {answer.place for answer in answers}
        if places == {""}:
            return None
        if len(places) > 1:
            named = ", ".join(sorted(place or "nowhere" for place in places))
            raise ConfigError(f"the SMPs of this job persist at different places ({named}): set HOLDFAST_PERSIST alike")
        for reason in sorted({reason for answer in answers for reason in answer.others}):
            self.note(f"{reason} ({PERSISTED})")
        seen = frozenset.intersection(*(answer.snapshots for answer in answers))
        tried = {snapshot for snapshot, count in self.persisted_failures.items() if count >= ENOUGH_FAILURES}
        return max(seen - tried, default=None)


def tier_of(plan: RestorePlan, inventories: Sequence[Inventory], coords: Mapping[str, str]) -> str:
    """Which tier a plan is of, for the job as a whole. `coords`: the node of every coordinate, as it is now."""
    if plan.sources.persisted:
        return PERSISTED
    held = {
        (inventory.node, coord) for inventory in inventories for of, coord in inventory.shards if of == plan.snapshot
    }
    if plan.snapshot != candidates(inventories, None)[0]:
        return "previous"
    if set(coords) != set(plan.sources.layout.coords):
        return "group"  # cut anew for another number of ranks
    return "local" if all((node, coord) in held for coord, node in coords.items()) else "group"
