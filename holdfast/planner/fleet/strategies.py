"""Ways to protect a job: what each costs, what it survives, how long it takes to load. Pure.

All of them save and load at the same rates, and those that keep copies in memory disturb training alike; what differs
is what they send, where copies are, and when they can be had.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from holdfast.planner.fleet.groups import Groups, place
from holdfast.planner.fleet.job import FleetJob, Site
from holdfast.planner.fleet.progress import Save
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.limits import MAX_SLOTS, MIN_SLOTS
from holdfast.snapshot.collective.routes import distances
from holdfast.snapshot.interval.periods import optimal
from holdfast.snapshot.step.ledger import ProtectEvery, parity_slots

COPY_COST = 0.09
"""Training time lost to a snapshot, over the time of one copy of the state: measured, `holdfast bench stall`, one rank
with an idle core beside it, a snapshot every step."""

ASYNC_COST = 6.3
"""The same for a checkpoint by DCP's `async_save` in a thread, every 10 steps."""

NETWORK_COST = 0.05
"""Training time lost while a node sends, over the time it sends. An assumption."""

ROUND_S = 0.27e-3
"""One round of the ranks' agreement, and `HELD_S` of it on the training thread: measured between two processes, `make
bench-scale`. There are log2 of the ranks."""

HELD_S = 0.036e-3
ENTERING_S = 0.41 / 16_384
"""Seconds, for each rank of the job, in which each takes in what all say as it enters: from the same."""

BUDGET = 0.01
"""Most training time that snapshots in memory may take; the interval is lengthened to keep to it, as this system does
by itself."""

SLOTS_TO_SEAL = 4
"""The protected snapshot, the one that is encoded, the newest sealed one and the one that is written."""

PERSIST_S = 3600.0
"""How often what is in memory is also written to storage."""


@dataclass(frozen=True, slots=True)
class Design:
    """What a strategy comes to for one job. All bytes are a node's.

    Attributes:
        saves: what is saved how often.
        groups: who protects whom; None: the loss of one node's memory loses all copies in memory.
        load_s: seconds to load a step that is ``sealed``, ``protected``, ``persisted``, or the ``start``.
        group_repair_s: from a restart with a new node until its group is whole again.
        regroup_after_s: how long a node's place may be empty before the others go on without it; infinite: for ever.
        regroup_s: how long that takes.
        memory_bytes: reserved for copies.
        network_bytes: sent to other nodes for each save.
        storage_bytes: sent to storage for each save that is written there.
    """

    saves: tuple[Save, ...]
    groups: Groups | None
    load_s: dict[str, float]
    group_repair_s: float = 0.0
    regroup_after_s: float = math.inf
    regroup_s: float = 0.0
    memory_bytes: float = 0.0
    network_bytes: float = 0.0
    storage_bytes: float = 0.0


class Strategy(Protocol):
    """A way to protect a job."""

    @property
    def name(self) -> str:
        """What it is called in tables."""

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """What it comes to for a job that fails every `mtbf_s` seconds. Raises `ConfigError` if it cannot be had."""


@dataclass(frozen=True, slots=True)
class InMemoryCode:
    """This system: snapshots in memory, `parity` parity units for every `data` units, across racks; survivors form new
    groups if nobody replaces a node.

    Attributes:
        every: steps between snapshots; more where they would not be done in time, or would cost more than `BUDGET`.
        protect_every: of so many snapshots one is protected; ``"auto"``: as often as encoding keeps up.
        slots: for each shard.
        persist_s: time between those that are also written to storage; infinite: none are.
        regroup_after_s: how long a node may be missing before the others protect each other without it.
    """

    data: int
    parity: int
    every: int = 1
    slots: int = 3
    persist_s: float = PERSIST_S
    regroup_after_s: float = 30.0
    protect_every: ProtectEvery = 1

    def __post_init__(self) -> None:
        _check(self.every, self.persist_s)
        if self.protect_every != "auto" and self.protect_every < 1:
            raise ConfigError(f"one of {self.protect_every} snapshots protected: use 1 or more, or 'auto'")
        if self.protect_every != 1 and self.slots < SLOTS_TO_SEAL:
            raise ConfigError(
                f"{self.slots} slots, and not every snapshot protected: use {SLOTS_TO_SEAL} or more here, so that "
                "snapshots are sealed while one is encoded"
            )
        if self.data < 1 or self.parity < 1:
            raise ConfigError(f"{self.data}+{self.parity}: k and m must be at least 1")
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS or not self.regroup_after_s >= 0:
            raise ConfigError(
                f"{self.slots} slots, {self.regroup_after_s} s: use {MIN_SLOTS} to {MAX_SLOTS} slots, and 0 s or more"
            )

    @property
    def name(self) -> str:
        """Such as ``holdfast 6+2, every 10``."""
        code = f"copies:{self.parity}" if self.data == 1 else f"{self.data}+{self.parity}"
        some = {1: "", "auto": ", one at a time protected"}.get(
            self.protect_every, f", 1 of {self.protect_every} protected"
        )
        return f"holdfast {code}" + (f", every {self.every}" if self.every > 1 else "") + some

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`."""
        encode_s = self.parity * job.node_bytes / site.network_rate
        seal_s = job.node_bytes / site.digest_rate
        agreement_s = ROUND_S * len(distances(job.gpus))
        entering_s = ENTERING_S * job.gpus
        return Design(
            saves=_in_memory(
                job,
                site,
                encode_s,
                self.every,
                self.slots,
                self.persist_s,
                seal_s,
                agreement_s,
                HELD_S,
                self.protect_every,
            ),
            groups=place(job.nodes, self.data + self.parity, self.parity, site.rack, spread=True),
            load_s={source: entering_s + load_s for source, load_s in _loads(job, site).items()},
            group_repair_s=encode_s,
            regroup_after_s=self.regroup_after_s,
            regroup_s=job.node_bytes / site.network_rate + encode_s,
            memory_bytes=job.node_bytes
            * (self.slots + parity_slots(self.slots, self.protect_every) * self.parity / self.data),
            network_bytes=self.parity * job.node_bytes,
            storage_bytes=job.node_bytes if self.persist_s < math.inf else 0.0,
        )


@dataclass(frozen=True, slots=True)
class PairReplication:
    """GEMINI (SOSP 2023): each node's state also whole in the memory of the others of its group.

    Attributes:
        copies: m, the node's own among them; any m - 1 nodes of a group may go.
        spread: whether groups keep apart the nodes of a rack; the published placement groups neighbours.
        every: steps between snapshots; more where traffic does not fit, or costs more than `BUDGET`.
    """

    copies: int = 2
    spread: bool = False
    every: int = 1
    persist_s: float = PERSIST_S

    def __post_init__(self) -> None:
        _check(self.every, self.persist_s)
        if self.copies < 2:
            raise ConfigError(f"{self.copies} copies: a node's own and at least one other's make 2")

    @property
    def name(self) -> str:
        """Such as ``gemini, 2 copies``."""
        return f"gemini {self.copies} copies" + (" over racks" if self.spread else "")

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`. Two buffers for each copy, as its author's library has."""
        others = self.copies - 1
        send_s = others * job.node_bytes / site.network_rate
        return Design(
            saves=_in_memory(job, site, send_s, self.every, 2, self.persist_s),
            groups=place(job.nodes, self.copies, others, site.rack, spread=self.spread),
            load_s=_loads(job, site),
            group_repair_s=send_s,
            memory_bytes=2 * self.copies * job.node_bytes,
            network_bytes=others * job.node_bytes,
            storage_bytes=job.node_bytes if self.persist_s < math.inf else 0.0,
        )


@dataclass(frozen=True, slots=True)
class DiskSync:
    """Checkpoints to shared storage; training waits until they are written. `every` steps; None: what loses least."""

    every: int | None = None

    def __post_init__(self) -> None:
        _check(self.every or 1 if self.every is None else self.every, math.inf)

    @property
    def name(self) -> str:
        """``disk, sync``."""
        return "disk, sync"

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`."""
        write_s = job.state_bytes / site.storage_rate
        every = self.every or _best(job, write_s, mtbf_s)
        save = Save(every, write_s, persisted_s=write_s)
        return Design((save,), None, _loads(job, site), storage_bytes=job.node_bytes)


@dataclass(frozen=True, slots=True)
class DiskAsync:
    """Checkpoints to shared storage while training goes on, one at a time. `every` steps; None: what loses least."""

    every: int | None = None

    def __post_init__(self) -> None:
        _check(self.every or 1 if self.every is None else self.every, math.inf)

    @property
    def name(self) -> str:
        """``disk, async``."""
        return "disk, async"

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`."""
        copy_s = _copy_s(job, site)
        write_s = copy_s + job.state_bytes / site.storage_rate
        stall_s = ASYNC_COST * copy_s
        every = max(self.every or _best(job, stall_s, mtbf_s), _at_least(write_s, job))
        save = Save(every, stall_s, persisted_s=write_s)
        loads = _loads(job, site)
        return Design((save,), None, loads, memory_bytes=job.node_bytes, storage_bytes=job.node_bytes)


@dataclass(frozen=True, slots=True)
class Nothing:
    """No protection: every failure begins again at step 0."""

    @property
    def name(self) -> str:
        """``nothing``."""
        return "nothing"

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`."""
        return Design((), None, _loads(job, site))


def _in_memory(
    job: FleetJob,
    site: Site,
    send_s: float,
    every: int,
    slots: int,
    persist_s: float,
    seal_s: float = 0.0,
    agreement_s: float = 0.0,
    held_s: float = 0.0,
    protect_every: ProtectEvery = 1,
) -> tuple[Save, ...]:
    """Snapshots as often as they are done in time and cost no more than `BUDGET`, and some of them to storage.

    Args:
        seal_s: until what is copied is sealed.
        agreement_s: until all know that one is protected. held_s: how long that holds up training.
        protect_every: of so many one is protected; fewer if that is not done in time.
    """
    copy_s = _copy_s(job, site)
    copy_s = _copy_s(job, site)
    sealed_s = copy_s + seal_s
    protected_s = sealed_s + send_s + agreement_s
    seal_cost_s, send_cost_s = COPY_COST * copy_s + held_s, NETWORK_COST * send_s
    snapshots: tuple[Save, ...]
    if protect_every == 1:
        least_s = max(sealed_s, send_s, (sealed_s + send_s) / (slots - 1), (seal_cost_s + send_cost_s) / BUDGET)
        steps = max(every, _at_least(least_s, job))
        snapshots = (Save(steps, seal_cost_s + send_cost_s, sealed_s=sealed_s, protected_s=protected_s),)
    else:
        wanted = protect_every if isinstance(protect_every, int) else 1
        steps = max(every, _at_least(max(sealed_s, (seal_cost_s + send_cost_s / wanted) / BUDGET), job))
        rarer = max(wanted, math.ceil(send_s / (steps * job.step_s) - 1e-9))
        snapshots = (
            Save(steps, seal_cost_s, sealed_s=sealed_s),
            Save(rarer * steps, send_cost_s, protected_s=protected_s),
        )
    if persist_s == math.inf:
        return snapshots
    write_s = sealed_s + send_s + job.state_bytes / site.storage_rate
    each = snapshots[-1].every
    rarely = max(1, round(persist_s / job.step_s / each), math.ceil(write_s / job.step_s / each))
    return *snapshots, Save(rarely * each, 0.0, persisted_s=write_s)


def _loads(job: FleetJob, site: Site) -> dict[str, float]:
    """From the node's own memory; over the new node's link (a chain of helpers brings it no more than its own bytes);
    from storage; and nothing to load."""
    copy_s = _copy_s(job, site)
    stored_s = job.state_bytes / site.storage_rate
    return {
        "sealed": copy_s,
        "protected": copy_s + job.node_bytes / site.network_rate,
        "persisted": copy_s + stored_s,
        "start": 0.0,
    }


def _copy_s(job: FleetJob, site: Site) -> float:
    """Between a node's GPUs and its memory."""
    return job.node_bytes / (site.gpu_rate * job.gpus_per_node)


def _best(job: FleetJob, cost_s: float, mtbf_s: float) -> int:
    """Steps between two saves that lose least; a job that never fails saves as if it did once in a hundred years."""
    return max(1, round(optimal(cost_s, min(mtbf_s, 3.2e9)) / job.step_s))


def _at_least(seconds: float, job: FleetJob) -> int:
    return max(1, math.ceil(seconds / job.step_s - 1e-9))


def _check(every: int, persist_s: float) -> None:
    if every < 1:
        raise ConfigError(f"a save every {every} steps: use 1 or more")
    if not persist_s > 0:
        raise ConfigError(f"a save to storage every {persist_s} s: use more than 0 s")
