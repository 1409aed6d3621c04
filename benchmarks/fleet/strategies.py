"""Ways to protect a job: what each costs, what it survives, and how long it takes to load. Pure.

All strategies save and load at the same rates, and those that keep copies in memory slow training equally. They differ
in what they send, where the copies are, and when a copy can be restored.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from benchmarks.exact_interval import optimal
from benchmarks.fleet.groups import Groups, place
from benchmarks.fleet.job import FleetJob, Site
from benchmarks.fleet.progress import Save
from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.failures import NODE_LOST
from holdfast.smp_daemon.shared.limits import MAX_SLOTS, MIN_SLOTS
from holdfast.smp_daemon.shared.settings import OVERHEAD_BUDGET, PERSIST_EVERY
from holdfast.snapshot.collective.mesh import distances
from holdfast.snapshot.interval.rule import choose
from holdfast.snapshot.resume.arrange import Protection
from holdfast.snapshot.step.ledger import ProtectEvery, parity_slots

COPY_COST = 0.09
"""Training time lost to a snapshot, divided by the time of one copy of the state. Measured by `benchmarks.stall`
for one rank with an idle core beside it and a snapshot every step."""

ASYNC_COST = 6.3
"""The same for a checkpoint by DCP's `async_save` in a thread, every 10 steps."""

ROUND_S = 0.27e-3
"""Duration of one round of the ranks' agreement, which has log2(ranks) rounds. Measured between two processes by
`make bench-scale`."""

HELD_S = 0.036e-3
"""Time of the training thread that the agreement on one snapshot takes. Measured by `make bench-scale`."""

ENTERING_S = 0.41 / 16_384
"""Seconds for each rank of the job that every rank needs to read all ranks' messages as it enters. Measured by `make
bench-scale`."""

NEVER_S = 3.2e9
"""A job that never fails saves as if it failed every hundred years."""

OLD = 10**9
"""Number of steps of a job that is not young, to the rule for the interval: a young job has no weight in months."""

SLOTS_TO_SEAL = 4
"""Slots for the protected snapshot, the one being encoded, the newest sealed one and the one being written."""

PERSIST_S = PERSIST_EVERY.value({})
"""How often state in memory is also written to storage, in seconds: as trainers do by default."""


@dataclass(frozen=True, slots=True)
class Design:
    """The parameters of a strategy for one job. All bytes are per node.

    Attributes:
        saves: the kinds of saves, and how often each is made.
        groups: which nodes protect each other; None: the loss of one node's memory loses all copies in memory.
        load_s: seconds to load a step that is ``sealed``, ``protected``, ``persisted``, or the ``start``.
        group_repair_s: time from a restart with a new node until its group is whole again.
        regroup_after_s: how long a node's place may be empty before the others regroup without it; infinite: they never
            do.
        regroup_s: how long regrouping takes.
        memory_bytes: memory reserved for copies.
        network_bytes: bytes sent to other nodes for each save.
        storage_bytes: bytes sent to storage for each save that is written there.
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
        """The name in tables."""

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """The parameters for a job that fails every `mtbf_s` seconds. Raises `ConfigError` if they are impossible."""


@dataclass(frozen=True, slots=True)
class InMemoryCode:
    """This system: snapshots in memory, with `parity` parity units for every `data` units, across racks. Survivors
    regroup if no node replaces a lost one.

    Attributes:
        data: k; 0: as the hook chooses it by the number of nodes.
        every: steps between snapshots; None: the interval that trainers choose by default. It is raised if snapshots
            would not be done in time.
        slots: slots per shard.
        persist_s: time between snapshots that are also written to storage; infinite: none are.
        regroup_after_s: how long a node may be missing before the others regroup without it.
        protect_every: one of this many snapshots is protected; ``"auto"``: as often as encoding keeps up.
    """

    data: int
    parity: int
    every: int | None = None
    slots: int = 3
    persist_s: float = PERSIST_S
    regroup_after_s: float = 30.0
    protect_every: ProtectEvery = 1

    def __post_init__(self) -> None:
        _check(1 if self.every is None else self.every, self.persist_s)
        if self.protect_every != "auto" and self.protect_every < 1:
            raise ConfigError(f"one of {self.protect_every} snapshots protected: use 1 or more, or 'auto'")
        if self.protect_every != 1 and self.slots < SLOTS_TO_SEAL:
            raise ConfigError(
                f"{self.slots} slots, and not every snapshot protected: use {SLOTS_TO_SEAL} or more here, so that "
                "snapshots are sealed while one is encoded"
            )
        if self.data < 0 or self.parity < 1:
            raise ConfigError(f"{self.data}+{self.parity}: m must be at least 1")
        if not MIN_SLOTS <= self.slots <= MAX_SLOTS or not self.regroup_after_s >= 0:
            raise ConfigError(
                f"{self.slots} slots, regrouping after {self.regroup_after_s} s: use {MIN_SLOTS} to {MAX_SLOTS} "
                "slots, and 0 s or more"
            )

    @property
    def name(self) -> str:
        """Such as ``holdfast 6+2, every 10``."""
        code = {0: "by default", 1: f"copies:{self.parity}"}.get(self.data, f"{self.data}+{self.parity}")
        some = {1: "", "auto": ", one at a time protected"}.get(
            self.protect_every, f", 1 of {self.protect_every} protected"
        )
        return f"holdfast {code}" + (f", every {self.every}" if self.every else "") + some

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`."""
        code = Protection(self.data, self.parity).for_nodes(job.nodes)
        parity = self.parity if self.data else min(self.parity, job.nodes - 1)
        encode_s = parity * job.node_bytes / site.network_rate
        seal_s = job.node_bytes / site.digest_rate
        agreement_s = ROUND_S * len(distances(job.gpus))
        entering_s = ENTERING_S * job.gpus
        return Design(
            saves=_in_memory(
                job,
                site,
                mtbf_s,
                encode_s,
                self.every,
                self.slots,
                self.persist_s,
                seal_s,
                agreement_s,
                HELD_S,
                self.protect_every,
            ),
            groups=place(job.nodes, code.data + parity, parity, site.rack, spread=True) if parity else None,
            load_s={source: entering_s + load_s for source, load_s in _loads(job, site).items()},
            group_repair_s=encode_s,
            regroup_after_s=self.regroup_after_s,
            regroup_s=job.node_bytes / site.network_rate + encode_s,
            memory_bytes=job.node_bytes
            * (self.slots + parity_slots(self.slots, self.protect_every) * parity / code.data),
            network_bytes=parity * job.node_bytes,
            storage_bytes=job.node_bytes if self.persist_s < math.inf else 0.0,
        )


@dataclass(frozen=True, slots=True)
class PairReplication:
    """GEMINI (SOSP 2023): the other nodes of a group also hold each node's whole state in memory, and neighbours are a
    group. The same copies at holdfast's interval, and over racks, are holdfast's ``copies:1``.

    Attributes:
        copies: m, the number of copies, including the node's own. Any m - 1 nodes of a group may be lost.
        every: steps between snapshots: each one, as published. It is raised if the traffic does not fit.
        persist_s: time between snapshots that are also written to storage; infinite: none are.
    """

    copies: int = 2
    every: int = 1
    persist_s: float = PERSIST_S

    def __post_init__(self) -> None:
        _check(self.every, self.persist_s)
        if self.copies < 2:
            raise ConfigError(f"{self.copies} copies: a node's own and at least one other's make 2")

    @property
    def name(self) -> str:
        """Such as ``gemini 2 copies``."""
        return f"gemini {self.copies} copies"

    def design(self, job: FleetJob, site: Site, mtbf_s: float) -> Design:
        """See `Strategy`. There are two buffers for each copy, as in the library of GEMINI's author."""
        others = min(self.copies, job.nodes) - 1
        send_s = others * job.node_bytes / site.network_rate
        return Design(
            saves=_in_memory(job, site, mtbf_s, send_s, self.every, 2, self.persist_s),
            groups=place(job.nodes, 1 + others, others, site.rack, spread=False) if others else None,
            load_s=_loads(job, site),
            group_repair_s=send_s,
            memory_bytes=2 * (1 + others) * job.node_bytes,
            network_bytes=others * job.node_bytes,
            storage_bytes=job.node_bytes if self.persist_s < math.inf else 0.0,
        )


@dataclass(frozen=True, slots=True)
class DiskSync:
    """Checkpoints to shared storage; training waits until they are written.

    Attributes:
        every: steps between checkpoints; None: the interval that loses least.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        _check(1 if self.every is None else self.every, math.inf)

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
    """Checkpoints to shared storage while training goes on, one at a time.

    Attributes:
        every: steps between checkpoints, raised if writing takes longer; None: the interval that loses least.
    """

    every: int | None = None

    def __post_init__(self) -> None:
        _check(1 if self.every is None else self.every, math.inf)

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
    """No protection: after every failure, training begins again at step 0."""

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
    mtbf_s: float,
    send_s: float,
    every: int | None,
    slots: int,
    persist_s: float,
    seal_s: float = 0.0,
    agreement_s: float = 0.0,
    held_s: float = 0.0,
    protect_every: ProtectEvery = 1,
) -> tuple[Save, ...]:
    """The saves of a strategy in memory: snapshots every `every` steps, or more rarely, so that they are done in time;
    and some of them to storage.

    Args:
        send_s: time to send what protects a snapshot.
        seal_s: time to seal a snapshot that is copied.
        agreement_s: time until all ranks know that a snapshot is protected. held_s: how long that holds up training.
        protect_every: one of this many snapshots is protected; fewer if they would not be done in time.
    """
    copy_s = _copy_s(job, site)
    sealed_s = copy_s + seal_s
    protected_s = sealed_s + send_s + agreement_s
    seal_cost_s, send_cost_s = COPY_COST * copy_s + held_s, site.interference * send_s
    snapshots: tuple[Save, ...]
    wanted = protect_every if isinstance(protect_every, int) else 1
    if every is None:
        rate = (1 + NODE_LOST * (wanted - 1)) / min(mtbf_s, NEVER_S)
        cost_s = seal_cost_s + send_cost_s / wanted
        every = choose(
            step_s=job.step_s, cost_s=cost_s, failure_rate=rate, budget=OVERHEAD_BUDGET.value({}), done=OLD
        ).steps
        if protect_every == 1:
            every = max(every, _at_least(protected_s, job) + 1)  # a step in between has none
    if protect_every == 1:
        steps = max(every, _at_least(max(sealed_s, send_s, (sealed_s + send_s) / (slots - 1)), job))
        snapshots = (Save(steps, seal_cost_s + send_cost_s, sealed_s=sealed_s, protected_s=protected_s),)
    else:
        steps = max(every, _at_least(sealed_s, job))
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
    return *snapshots, Save(rarely * each, 0.0, persisted_s=write_s)  # steps beside a write took no longer, measured


def _loads(job: FleetJob, site: Site) -> dict[str, float]:
    """Seconds to load: from the node's own memory; over the new node's link (a chain of helpers brings no more than the
    node's own bytes); from storage; and at the start, where there is nothing to load."""
    copy_s = _copy_s(job, site)
    stored_s = job.state_bytes / site.storage_rate
    return {
        "sealed": copy_s,
        "protected": copy_s + job.node_bytes / site.network_rate,
        "persisted": copy_s + stored_s,
        "start": 0.0,
    }


def _copy_s(job: FleetJob, site: Site) -> float:
    """Seconds to copy a node's state between its GPUs and its memory."""
    return job.node_bytes / (site.gpu_rate * job.gpus_per_node)


def _best(job: FleetJob, cost_s: float, mtbf_s: float) -> int:
    """Steps between saves that lose least time."""
    return max(1, round(optimal(cost_s, min(mtbf_s, NEVER_S)) / job.step_s))


def _at_least(seconds: float, job: FleetJob) -> int:
    return max(1, math.ceil(seconds / job.step_s - 1e-9))


def _check(every: int, persist_s: float) -> None:
    if every < 1:
        raise ConfigError(f"a save every {every} steps: use 1 or more")
    if not persist_s > 0:
        raise ConfigError(f"a save to storage every {persist_s} s: use more than 0 s")
