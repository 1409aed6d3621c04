"""The status of an SMP: what it holds, since when, and in how much memory. Plain data for people and monitoring."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import psutil

from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.persist.persister import TierState
from holdfast.smp_daemon.recovery.inventories import ask_all
from holdfast.smp_daemon.recovery.recoveries import Recovery
from holdfast.smp_daemon.shared.errors import HoldfastError
from holdfast.smp_daemon.shared.goodput import Spent
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import LogEvent, last_events, log_file_problem
from holdfast.smp_daemon.shared.messages import PeerStatus
from holdfast.smp_daemon.shared.plain import from_plain, to_plain
from holdfast.smp_daemon.shared.processes import ran_s
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.versions import PROTOCOL_VERSION, RELEASE
from holdfast.smp_daemon.storage.pool import SlotState
from holdfast.smp_daemon.watchdog.liveness import Health, WatchedTrainer, judge_lease

_BLANK = Inventory("", "", 0, 0)


@dataclass(frozen=True, slots=True)
class Status:
    """The status of one SMP.

    Attributes:
        pid: process id of the SMP. `up_s`: how long the process has run.
        arena: the directory of its slots. `arena_bytes`: memory that is reserved for slots. `memory_bytes`: limit for
            slots; 0: no limit. `reserve_bytes`: how much beside the slots is reserved of it. `planned_bytes`: memory of
            all slots and of the reserve while some is still to be reserved; 0: all is.
        unverified_bytes: what a predecessor left and this SMP has not read yet.
        slots: how many slots are in each `SlotState`.
        rss_bytes: resident memory of the process, including what it has mapped of the arena.
        ages_s: for each snapshot, seconds since its first shard here was sealed. Shards recovered for a lost node came
            later.
        counters: see `smp_daemon.shared.counters.COUNTS`.
        trainers: of this node, see `smp_daemon.watchdog.liveness.WatchedTrainer`.
        leases: seconds since each other member of the group was last heard of. `lease_s`: after how many seconds the
            survivors regroup without it; 0: never.
        said: the last message of the training loop to operators; empty: none.
        next_s: how long after its newest snapshot the next one is to be protected, as trainers say; 0: unknown.
        spent: where the time of the run went until that snapshot, as one of its trainers says.
        tier: the state of the persist tier here; None if it is off.
        recoveries: the last recoveries of this node, the newest first.
        events: the last lines of its log, the newest first, see `smp_daemon.shared.logs.LogEvent`.
        access: how it authenticates peers, see `smp_daemon.shared.credentials.access_of`.
        trainerless_s: how long no trainer has been connected; None: none ever was, or all have ended well.
        impaired: optional parts that do not work as requested, in words.
        failing: why the last snapshot failed, if none is protected since, in words.
        version: version of holdfast. `protocol`: the newest protocol it speaks, see `smp_daemon.shared.versions`.
    """

    inventory: Inventory
    pid: int
    up_s: float
    arena: str
    arena_bytes: int
    memory_bytes: int
    slots: dict[str, int]
    rss_bytes: int
    ages_s: tuple[tuple[SnapshotId, float], ...]
    counters: dict[str, int]
    trainers: tuple[WatchedTrainer, ...] = ()
    leases: dict[str, float] = field(default_factory=dict)
    lease_s: float = 0.0
    said: str = ""
    tier: TierState | None = None
    recoveries: tuple[Recovery, ...] = ()
    events: tuple[LogEvent, ...] = ()
    access: str = ""
    trainerless_s: float | None = None
    impaired: tuple[str, ...] = ()
    version: str = ""
    protocol: int = 0
    planned_bytes: int = 0
    unverified_bytes: int = 0
    next_s: float = 0.0
    reserve_bytes: int = 0
    spent: Spent = field(default_factory=Spent)
    failing: str = ""

    @property
    def reserving(self) -> str:
        """Progress of reserving memory, in words; empty if all is reserved."""
        done, of = (f"{count / 1e9:,.1f}" for count in (self.arena_bytes + self.reserve_bytes, self.planned_bytes))
        return f"reserving: {done} of {of} GB" if self.planned_bytes else ""

    @property
    def verifying(self) -> str:
        """Progress of reading what a predecessor left, in words; empty if all is read."""
        left = self.unverified_bytes
        return f"verifying what the last SMP left: {left / 1e9:,.1f} GB to read" if left else ""

    @property
    def troubles(self) -> list[str]:
        """Snapshots, optional parts, trainers and peers that are not well, in words."""
        return troubles([self])

    def to_plain(self, known: Collection[str] = ()) -> dict[str, Any]:
        """What `read` reads back, plus `reserving`, `verifying` and `troubles`. `known`: see `Inventory.to_plain`."""
        blank = replace(self, inventory=_BLANK)
        told = {"inventory": self.inventory.to_plain(known), "reserving": self.reserving, "troubles": self.troubles}
        told["verifying"] = self.verifying
        return {**to_plain(blank), **told}

    @classmethod
    def read(cls, data: object, known: Mapping[str, Layout] | None = None) -> Status:
        """Read what `to_plain` returned. Raises as `plain.from_plain`. `known`: layouts by their digests."""
        told = data if isinstance(data, dict) else {}
        inventory = Inventory.read(told.get("inventory"), known)
        status = from_plain(cls, told | {"inventory": to_plain(_BLANK)}, "a status")
        return replace(status, inventory=inventory)


def troubles(statuses: Sequence[Status]) -> list[str]:
    """Snapshots, optional parts, trainers and peers that are not well, in words: one line for each, even if several
    nodes miss the same peer. Pure."""
    bad = [f"{each.inventory.node}: {how}" for each in statuses for how in (each.failing, *each.impaired) if how]
    bad += [str(trainer) for status in statuses for trainer in status.trainers if trainer.health != Health.ALIVE]
    seen: dict[tuple[str, Health], list[tuple[float, str]]] = {}
    for status in statuses:
        for name, age_s in status.leases.items():
            health = judge_lease(age_s, status.lease_s)
            if health is not Health.ALIVE:
                seen.setdefault((name, health), []).append((age_s, status.inventory.node))
    for (name, health), ages in sorted(seen.items()):
        longest_s = max(age_s for age_s, _ in ages)
        to = ages[0][1] if len(ages) == 1 else f"{len(ages)} nodes"
        bad.append(f"peer {name} is {health} to {to}: quiet for {longest_s:,.1f} s")
    return bad


def take_status(smp: Core) -> Status:
    """The current status of an SMP. Thread-safe; holds the store's lock while it looks at every slot."""
    store, now = smp.store, time.time()
    inventory = smp.inventory()
    ages: dict[SnapshotId, float] = {}
    slots = dict.fromkeys(map(str, SlotState), 0)
    with store.changed:
        for pool in store.arena.pools():
            for slot in pool.slots:
                slots[slot.state] += 1
                if slot.state is SlotState.SEALED and slot.snapshot is not None:
                    with suppress(FileNotFoundError):  # somebody has deleted it; what it says is known here
                        age = max(0.0, now - pool.record_path(slot).stat().st_mtime)
                        ages[slot.snapshot] = max(age, ages.get(slot.snapshot, age))
        everything = sum(slot.bytes for pool in store.arena.pools() for slot in pool.slots)
        missing = store.arena.planned_bytes()
        budget = store.arena.budget
        rest, reserve = budget.missing, budget.held
    problems = (problem for problem in (log_file_problem(), store.reserver.short) if problem)
    process = psutil.Process()
    return Status(
        inventory,
        os.getpid(),
        ran_s(os.getpid()),
        str(store.arena.path),
        everything - missing,
        budget.limit,
        slots,
        process.memory_info().rss,
        tuple(sorted(ages.items())),
        store.counters.read(),
        tuple(smp.watchdog.trainers()),
        smp.monitor.leases(),
        smp.lease_s,
        smp.said,
        smp.persister.state,
        tuple(smp.recoveries.last()),
        last_events(),
        smp.access,
        smp.trainerless_s,
        (*smp.impaired, *problems),
        RELEASE,
        PROTOCOL_VERSION,
        everything + reserve + rest if missing or rest else 0,
        store.holdings.unverified_bytes,
        smp.next_s,
        reserve,
        smp.spent,
        store.outcomes.failing,
    )


def take_statuses(
    job: str,
    addresses: Collection[Address],
    known: Collection[Layout] = (),
    failures: dict[Address, HoldfastError] | None = None,
) -> list[Status]:
    """The statuses of the SMPs that answer, sorted by node. Blocks as `gather_inventories`; `known` as there, and
    `failures` as in `ask_all`."""
    found = ask_all(PeerStatus, job, addresses, Status.read, known, failures=failures)
    return sorted(found, key=lambda status: status.inventory.node)
