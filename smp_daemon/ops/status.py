"""How an SMP is: what it holds, since when, and in how much memory. Plain data for people and monitoring."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

import psutil

from holdfast.smp_daemon.node.core import Core
from holdfast.smp_daemon.persist.persister import TierState
from holdfast.smp_daemon.recovery.census import ask_all
from holdfast.smp_daemon.recovery.recoveries import Recovery
from holdfast.smp_daemon.shared.counters import Counters
from holdfast.smp_daemon.shared.errors import ProtocolError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import LogEvent, last_events
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.storage.pool import SlotState
from holdfast.smp_daemon.watchdog.liveness import Health, WatchedTrainer, judge_lease


@dataclass(frozen=True, slots=True)
class Status:
    """One SMP.

    Attributes:
        pid: its process. `up_s`: how long that has run.
        arena: the directory of its slots. `arena_bytes`: how much memory slots take there. `memory_bytes`: how much
            they may take, reserved from the start; 0: there is no limit.
        slots: how many slots are in each `SlotState`.
        rss_bytes: memory of the process, with what it has mapped of the arena.
        ages_s: seconds since the newest shard here of each snapshot was sealed.
        counters: see `smp_daemon.shared.counters.Counts`.
        trainers: of this node, see `smp_daemon.watchdog.liveness.WatchedTrainer`.
        leases: seconds since each other member of the group was last heard of. `lease_s`: after how many it is given
            up; 0: never.
        said: what a trainer wants operators to know; empty if nothing.
        tier: the state of the persist tier here; None if it is off.
        recoveries: the last ones here, the newest first.
        events: the last lines of its log, the newest first, see `smp_daemon.shared.logs.LogEvent`.
        access: how it tells friend from foe, see `smp_daemon.shared.credentials.access_of`.
    """

    inventory: Inventory
    pid: int
    up_s: float
    arena: str
    arena_bytes: int
    memory_bytes: int
    slots: dict[str, int]
    rss_bytes: int
    ages_s: dict[SnapshotId, float]
    counters: dict[str, int]
    trainers: tuple[WatchedTrainer, ...] = ()
    leases: dict[str, float] = field(default_factory=dict)
    lease_s: float = 0.0
    said: str = ""
    tier: TierState | None = None
    recoveries: tuple[Recovery, ...] = ()
    events: tuple[LogEvent, ...] = ()
    access: str = ""

    @property
    def troubles(self) -> list[str]:
        """Trainers and peers that are not well, in words."""
        bad = [str(trainer) for trainer in self.trainers if trainer.health != Health.ALIVE]
        for name, age_s in sorted(self.leases.items()):
            health = judge_lease(age_s, self.lease_s)
            if health is not Health.ALIVE:
                bad.append(f"peer {name} is {health} to {self.inventory.node}: quiet for {age_s:,.1f} s")
        return bad

    def to_json(self, known: Collection[str] = ()) -> dict[str, Any]:
        """A JSON object that `from_json` reads back. `known`: see `Inventory.to_json`."""
        data = {name: getattr(self, name) for name in self.__dataclass_fields__}
        ages = sorted([*snapshot, seconds] for snapshot, seconds in self.ages_s.items())
        return data | {
            "inventory": self.inventory.to_json(known),
            "ages_s": ages,
            "trainers": [trainer.to_json() for trainer in self.trainers],
            "troubles": self.troubles,
            "tier": self.tier.to_json() if self.tier else None,
            "recoveries": [recovery.to_json() for recovery in self.recoveries],
            "events": [event.to_json() for event in self.events],
        }

    @classmethod
    def from_json(cls, data: Any, known: Mapping[str, Layout] | None = None) -> Status:
        """Raises `ProtocolError` if `data` is not what `to_json` makes. `known`: layouts by their digests."""
        try:
            return cls(
                inventory=Inventory.from_json(data["inventory"], known),
                pid=int(data["pid"]),
                up_s=float(data["up_s"]),
                arena=str(data["arena"]),
                arena_bytes=int(data["arena_bytes"]),
                memory_bytes=int(data["memory_bytes"]),
                slots={str(state): int(count) for state, count in data["slots"].items()},
                rss_bytes=int(data["rss_bytes"]),
                ages_s={SnapshotId(int(e), int(s)): float(seconds) for e, s, seconds in data["ages_s"]},
                counters={str(name): int(count) for name, count in data["counters"].items()},
                trainers=tuple(WatchedTrainer.from_json(trainer) for trainer in data["trainers"]),
                leases={str(name): float(age_s) for name, age_s in data["leases"].items()},
                lease_s=float(data["lease_s"]),
                said=str(data["said"]),
                tier=TierState.from_json(data["tier"]) if data["tier"] else None,
                recoveries=tuple(Recovery.from_json(recovery) for recovery in data["recoveries"]),
                events=tuple(LogEvent.from_json(event) for event in data["events"]),
                access=str(data["access"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise ProtocolError(f"not a status: {error!r}") from error


def take_status(smp: Core) -> Status:
    """How it is now. Thread-safe; holds the store's lock for as long as it takes to look at every slot."""
    store, now = smp.store, time.time()
    inventory = smp.inventory()
    ages: dict[SnapshotId, float] = {}
    slots = dict.fromkeys(map(str, SlotState), 0)
    reserved = 0
    with store.changed:
        for pool in store.arena.pools():
            for slot in pool.slots:
                slots[slot.state] += 1
                reserved += slot.bytes
                if slot.state is SlotState.SEALED and slot.snapshot is not None:
                    age = max(0.0, now - pool.record_path(slot).stat().st_mtime)
                    ages[slot.snapshot] = min(age, ages.get(slot.snapshot, age))
    process = psutil.Process()
    return Status(
        inventory,
        os.getpid(),
        max(0.0, now - process.create_time()),
        str(store.arena.path),
        reserved,
        store.arena.budget.limit,
        slots,
        process.memory_info().rss,
        ages,
        store.counters.read(),
        tuple(smp.watchdog.trainers()),
        smp.monitor.leases(),
        smp.settings.regroup_after_s,
        smp.said,
        smp.persister.state,
        tuple(smp.recoveries.last()),
        last_events(),
        smp.access,
    )


def take_statuses(
    job: str, addresses: Collection[Address], counters: Counters, known: Collection[Layout] = ()
) -> list[Status]:
    """Of all SMPs of a job that answer, by node. Blocks as `recovery.census.take_census`; `known` as there."""
    found = ask_all("status", job, addresses, counters, known, Status.from_json)
    return sorted(found, key=lambda status: status.inventory.node)
