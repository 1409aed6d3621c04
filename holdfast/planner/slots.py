"""How many slots to use, and which snapshots to protect: the memory of each choice, and what failures then cost. Pure.

The simulation uses the same `Ledger` as trainers, so it skips and gives up the same snapshots.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery, SnapshotState, parity_slots

SLOTS = (2, 3, 4)
PROTECT_EVERY: tuple[ProtectEvery, ...] = (1, 2, 4, 8, 16, "auto")
PLAYED = 400
"""Number of simulated intervals; the first `WARM` do not count."""
WARM = 100
MOMENTS = 16
"""Number of moments in each interval at which to compute what a failure would cost."""

CLOSE = 1.1
"""A choice counts as equal to the best if it loses at most this many times as much; of these, the one of least memory
wins."""


@dataclass(frozen=True, slots=True)
class SlotChoice:
    """One way to use memory.

    Attributes:
        memory: memory of a node, as a multiple of its state.
        skipped: share of due snapshots that are not taken, for lack of a slot.
        protected: one of this many snapshots is protected, as simulated; 0 if none is.
        crash_s, loss_s: mean work that a crash of processes, and the loss of a node, cost: the time since the snapshot
            that the job goes back to.
    """

    slots: int
    protect_every: ProtectEvery
    memory: float
    skipped: float
    protected: float
    crash_s: float
    loss_s: float

    def lost_s(self, memory_share: float) -> float:
        """Mean work that a failure costs, if a share of `memory_share` of all failures takes a node's memory."""
        return (1 - memory_share) * self.crash_s + memory_share * self.loss_s


def play(
    slots: int, protect_every: ProtectEvery, *, interval_s: float, commit_s: float, encode_s: float, code: float
) -> SlotChoice:
    """Simulate taking snapshots for a while, without failures.

    Args:
        interval_s: time between snapshots if none is skipped.
        commit_s: time until a snapshot is sealed.
        encode_s: time from then until it is protected; one is encoded at a time.
        code: m/k.
    """
    ledger = Ledger(slots, protect_every=protect_every)
    sealed: dict[SnapshotId, float] = {}
    protected: dict[SnapshotId, float] = {}
    idle_s, due, taken, encoded = 0.0, 0, 0, 0
    crashes: list[float] = []
    losses: list[float] = []

    def state(snapshot: SnapshotId, now_s: float) -> SnapshotState:
        if now_s < sealed[snapshot]:
            return SnapshotState.PENDING
        if snapshot not in protected:
            return SnapshotState.SEALED
        return SnapshotState.PROTECTED if now_s >= protected[snapshot] else SnapshotState.ENCODING

    for turn in range(1, PLAYED + 1):
        now_s = turn * interval_s
        ledger = ledger.settle([state(snapshot, now_s) for snapshot in ledger.pending])
        due += turn > WARM
        if ledger.may_begin:
            snapshot = SnapshotId(1, turn)
            encodes = ledger.protects_next
            ledger = ledger.begin(snapshot)
            sealed[snapshot] = now_s + commit_s
            if encodes:
                protected[snapshot] = idle_s = max(idle_s, sealed[snapshot]) + encode_s
            taken += turn > WARM
            encoded += encodes and turn > WARM
        if turn <= WARM:
            continue
        for moment in range(MOMENTS):
            at_s = now_s + (moment + 0.5) / MOMENTS * interval_s
            held = [each for each in ledger.keep if sealed[each] <= at_s]
            safe = [each for each in held if protected.get(each, at_s + 1) <= at_s]
            crashes.append(at_s - interval_s * max((each.step for each in held), default=0))
            losses.append(at_s - interval_s * max((each.step for each in safe), default=0))
    parities = parity_slots(slots, protect_every)
    return SlotChoice(
        slots,
        protect_every,
        slots + parities * code,
        1 - taken / due,
        taken / encoded if encoded else 0.0,
        sum(crashes) / len(crashes),
        sum(losses) / len(losses),
    )


def choices(*, interval_s: float, commit_s: float, encode_s: float, code: float) -> Iterator[SlotChoice]:
    """All choices to consider, ordered by `SLOTS` and `PROTECT_EVERY`."""
    for slots, every in product(SLOTS, PROTECT_EVERY):
        yield play(slots, every, interval_s=interval_s, commit_s=commit_s, encode_s=encode_s, code=code)


def best(found: list[SlotChoice], memory_share: float, most: float = float("inf")) -> SlotChoice | None:
    """The choice of least memory whose loss is `CLOSE` to the least loss of all that fit; None if none fits.

    Args:
        memory_share: share of all failures that take a node's memory.
        most: largest memory of a node, as a multiple of its state.
    """
    fitting = [each for each in found if each.memory <= most]
    if not fitting:
        return None
    least = min(each.lost_s(memory_share) for each in fitting)
    good = [each for each in fitting if each.lost_s(memory_share) <= CLOSE * least]
    return min(good, key=lambda each: (round(each.memory, 6), each.lost_s(memory_share)))
