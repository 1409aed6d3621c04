"""Which snapshots are skipped with few slots, played with the `Ledger` that trainers use. Pure.

It skips and gives up the same snapshots as trainers do. `holdfast.planner` asks for as many slots as skip none, by a
formula that is tested against this.
"""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.snapshot.step.ledger import Ledger, ProtectEvery, SnapshotState, parity_slots

PLAYED = 400
"""Number of simulated intervals; the first `WARM` do not count."""
WARM = 100
MOMENTS = 16
"""Number of moments in each interval at which to compute what a failure would cost."""


@dataclass(frozen=True, slots=True)
class PlayedSlots:
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


def play(
    slots: int, protect_every: ProtectEvery, *, interval_s: float, commit_s: float, encode_s: float, code: float
) -> PlayedSlots:
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
    return PlayedSlots(
        slots,
        protect_every,
        slots + parities * code,
        1 - taken / due,
        taken / encoded if encoded else 0.0,
        sum(crashes) / len(crashes),
        sum(losses) / len(losses),
    )


def parse_protect_every(text: str) -> ProtectEvery:
    """A number of snapshots, or ``auto``. Raises `ConfigError`."""
    if text == "auto":
        return "auto"
    if not text.isascii() or not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"--protect-every {text!r}: give a whole number of 1 or more, or auto")
    return int(text)
