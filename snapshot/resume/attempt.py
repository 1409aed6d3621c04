"""One attempt to restore one snapshot. There is one way from the bytes that SMPs hold to live tensors:

* recover: the bytes that a rank reads first are brought within its reach;
* plan: which bytes of which shards fill which live tensors;
* agree: all ranks have a plan, or nothing is written;
* fill: bytes are checked and copied into live tensors;
* agree: all ranks have filled theirs, or no rank goes on from them;
* take over: plain values are loaded, random generators last.

Mostly the world is the same as when the snapshot was taken (`SameWorld`). Then a rank's plan is its own shard, whole,
which its SMP holds: the bytes are checked and copied in one pass, where they lie. Only what replicas kept for each
other comes from elsewhere. A rank of another world (`snapshot.resume.elastic`) plans reads from any shards.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from holdfast.smp_daemon.shared.belief import Claim
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.errors import (
    ConfigError,
    DamagedSnapshot,
    HoldfastError,
    IncompleteSnapshot,
    ProtocolError,
    StateMismatch,
    failure_of,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import Run
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.quantities import duration
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.starts import ScriptBlock
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CopyEngine, SlotTensor
from holdfast.snapshot.copy.tensors import flat, octets
from holdfast.snapshot.resume.blocks import check_block, check_given
from holdfast.snapshot.resume.choice import PERSISTED
from holdfast.snapshot.resume.loading import check_range, load_checked
from holdfast.snapshot.resume.regions import (
    Fill,
    Read,
    held_in,
    index_of,
    plan_fills,
    refuse_unfit,
    unclaimed,
)
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.live import At, Tree
from holdfast.snapshot.state.record import (
    BEGAN,
    INPUTS,
    LOOP,
    NOTES,
    HeldLeaf,
    SavedShard,
    leaves_in,
    restore_strides,
    whole_leaves,
)
from holdfast.snapshot.state.replicas import is_part_of
from holdfast.snapshot.step.position import Position

REFUSALS = (StateMismatch, ConfigError)
"""What no other snapshot could mend."""

log = get_log(__name__)


@dataclass(slots=True)
class Restored:
    """How this rank started.

    Attributes:
        epoch: the epoch that begins.
        run: the run that goes on, or begins.
        snapshot: the snapshot that was restored; None on a cold start.
        protected: the newest snapshot that is known to be protected: `snapshot`, or an older one.
        only_sealed: whether nobody can have been told that `snapshot` is protected.
        order_repairs: has this node's SMP repair this rank's part of the parity of `snapshot`, and returns whether
            there is such a part. Raises `HoldfastError`. None: the parity stays as it is.
        how: ``held``, ``repaired``, ``fetched``, ``rebuilt``, ``persisted`` or ``resharded``; empty on a cold start.
        bytes_fetched: bytes fetched over the network for this rank's state.
        notes: what the snapshot's record holds besides the state; may be empty.
        loop: the position of the loop; see `SnapshotHook`.
        inputs: digest of the inputs of that step's first forward. Empty: there was nothing to sample, or the snapshot
            is of another number of ranks. None: it was sealed before they were known.
        began: what `snapshot.step.capture.read_state` returned when the step began that is now repeated; None: the loop
            said where it begins.
        rewind: puts the random generators back to their restored state.
        clock: `time.monotonic` at the end of each phase: ``enter``, ``plan``, ``fetch``, ``load``.
        tier: the tier that the job as a whole was restored from, see `snapshot.resume.choice`; empty on a cold start.
        passed_over: why better snapshots or tiers were not used.
        earlier: older snapshots that are whole, oldest first.
        abandoned: newer snapshots, if an older one was chosen.
        steps_again: how many steps that the previous start had finished are repeated; None: no node knows.
    """

    epoch: int
    run: Run
    snapshot: SnapshotId | None = None
    protected: SnapshotId | None = None
    only_sealed: bool = False
    order_repairs: Callable[[], bool] | None = None
    how: str = ""
    bytes_fetched: int = 0
    notes: dict[str, Any] = field(default_factory=dict)
    loop: dict[str, Any] = field(default_factory=dict)
    inputs: str | None = None
    began: Tree | None = None
    rewind: Callable[[], None] = lambda: None
    clock: dict[str, float] = field(default_factory=dict)
    tier: str = ""
    passed_over: tuple[str, ...] = ()
    earlier: tuple[SnapshotId, ...] = ()
    abandoned: tuple[SnapshotId, ...] = ()
    steps_again: int | None = None

    def __str__(self) -> str:
        """A line for people."""
        if self.snapshot is None:
            return "nothing was restored: the job begins"
        source = SOURCES[self.tier] + (", resharded for another number of ranks" if self.how == "resharded" else "")
        again = "unknown" if self.steps_again is None else f"{self.steps_again:,}"
        took = duration(self.clock["load"] - self.clock["enter"])
        return f"restored step {self.snapshot.step:,} from {source} in {took}; finished steps done again: {again}"


SOURCES = {
    "local": "the memory of its own nodes",
    "group": "the memory of other nodes",
    "previous": "memory, not the newest snapshot",
    PERSISTED: "storage",
}
"""The tiers of `resume.choice`, in words."""


@dataclass(eq=False)
class Attempt(ABC):
    """One rank's part in restoring one snapshot.

    Args:
        _coords: the node of every coordinate, in the order of ranks. _coord: this rank's.
        _block: the block of the script that is entered.

    Attributes:
        restored: what the attempt finds out and does is noted here.
        fills: the plan.
    """

    _client: SmpClient
    _sources: Sources
    _coords: Mapping[str, str]
    _coord: str
    _block: ScriptBlock
    restored: Restored
    fills: list[Fill] = field(default_factory=list)
    _values: tuple[Tree, Tree, Tree] = field(default_factory=lambda: ({}, {}, {}))

    @property
    def snapshot(self) -> SnapshotId:
        """The snapshot that is restored."""
        return self._sources.snapshot

    @abstractmethod
    def recover(self) -> None:
        """Bring what this rank reads first within its reach. Blocks; raises `HoldfastError` if that fails."""

    @abstractmethod
    def plan(self, agreement: Agreement, adapter: Adapter) -> HoldfastError | None:
        """Plan what fills the live job, which may get tensors for it. Returns why it cannot. A collective call."""

    @abstractmethod
    def fill(self, agreement: Agreement, engine: CopyEngine) -> HoldfastError | None:
        """Fill the live tensors as planned. Returns why it failed. A collective call; blocks."""

    def take_over(self, agreement: Agreement, adapter: Adapter) -> None:
        """Load the plain values, once every rank has filled its tensors. A collective call."""
        early, late, fixed = self._values
        adapter.load(early, late, fixed)
        self.restored.loop, self.restored.began = early.get(LOOP, {}), late.get(BEGAN)
        self.restored.rewind = adapter.rewinding(early)

    def rebuild(self, adapter: Adapter, early: Tree) -> None:
        """Have the job make what it had added in training. Raises `ConfigError` if that fails, or in another block."""
        check_block(early.get(LOOP, {}), self._block)
        loop = Position(self.snapshot.step, early.get(LOOP, {}), {})
        try:
            adapter.rebuild(At(loop.number(self.snapshot.step), loop.epoch))
        except LookupError as error:  # which `problem_of` would take for one of the record's
            raise ConfigError(f"what snap.rebuild was given has failed: {error!r}") from error

    def midway(self) -> None:
        """Half of the bytes are loaded."""
        failpoint("restore.middle", self.snapshot.step)

    def problem_of(self, work: Callable[[], object]) -> HoldfastError | None:
        """The error that `work` raised. The other ranks wait for this one, so a record that lacks an entry is one, too;
        no other copy has more in it."""
        try:
            work()
        except (LookupError, ProtocolError) as error:
            log.exception("the record of %s cannot be understood", self.snapshot, extra=about(self.snapshot))
            return IncompleteSnapshot(f"no copy of it can be loaded: {error!r}")
        except HoldfastError as error:
            return error
        return None

    def check(self) -> None:
        """Check what fits, tensor by tensor: that the job is given what the snapshot was taken of."""
        check_given(self._values[0].get(LOOP, {}), self._block)


class Verdict(NamedTuple):
    """What has become of an attempt on all ranks: whether it has succeeded so far (`whole`), and whether no rank has
    seen that the snapshot does not fit the job (`fits`), met damage (`unspoilt`), or missed something (`complete`)."""

    whole: bool
    fits: bool
    unspoilt: bool
    complete: bool


def agree_on(
    agreement: Agreement, failure: HoldfastError | None, refusals: tuple[type[HoldfastError], ...] = REFUSALS
) -> Verdict:
    """The verdict on all ranks. `failure`: why the attempt failed on this one. A collective call."""
    met = [int(not isinstance(failure, kind)) for kind in (refusals, DamagedSnapshot, IncompleteSnapshot)]
    return Verdict(*map(bool, agreement.minimum([int(failure is None), *met])()))


def refuse_misfit(verdict: Verdict, failure: HoldfastError | None) -> None:
    """Raise `StateMismatch` or `ConfigError` on every rank if one has seen that the snapshot does not fit the job."""
    if not verdict.fits:
        if isinstance(failure, REFUSALS):
            raise failure
        raise StateMismatch("the snapshot does not fit the job on another rank; see its log") from failure


def load(
    attempt: Attempt, agreement: Agreement, adapter: Adapter, engine: CopyEngine
) -> tuple[HoldfastError | None, Verdict]:
    """Fill the live job. Nothing is written unless the snapshot fits on every rank. A collective call; blocks.

    Returns why it failed on this rank, if it did, and the verdict. If bytes are damaged or cannot be had, another copy
    must be found.

    Raises:
        StateMismatch, ConfigError: see `refuse_misfit`.
    """
    problem = attempt.plan(agreement, adapter) or attempt.problem_of(attempt.check)
    verdict = agree_on(agreement, problem)
    if not verdict.whole:
        adapter.withdraw()
    refuse_misfit(verdict, problem)
    if not verdict.whole:
        return problem, verdict
    failure = attempt.fill(agreement, engine)
    verdict = agree_on(agreement, failure)
    if verdict.whole:
        attempt.take_over(agreement, adapter)
    return failure, verdict


# ------------------------------------------------------------------ the same world


class SameWorld(Attempt):
    """The ranks are those that took the snapshot. Each has a shard of its own, which its SMP holds.

    Attributes:
        shard: the shard, mapped. Whoever reads it past `read` must check it.
    """

    shard: RecoveredShard

    def recover(self) -> None:
        self._taken: set[int] = set()  # units that something was read from
        self.shard = self._client.recover(self._sources, self._coord, check=False)
        self.restored.how, self.restored.bytes_fetched = self.shard.how, self.shard.bytes_fetched

    def open(self) -> SavedShard:
        """What the shard says. Raises as `SavedShard`."""
        return SavedShard(self.read, Claim.of_shard(self.snapshot, self._coord, self._sources.layout))

    def read(self, offset: int, length: int) -> memoryview:
        """Some bytes of the shard, in place, once their units are checked.

        Raises:
            DamagedSnapshot: they cannot be repaired.
            ProtocolError: the shard has no such bytes.
        """
        check_range(self.shard, offset, length, self._taken, self.repair, self._client.system)
        return self.shard.view[offset : offset + length]

    def repair(self, units: list[int]) -> None:
        """Have damaged units repaired in place.

        Raises:
            DamagedSnapshot: they cannot be; or something was read from one of them, maybe after it was damaged.
        """
        if changed := self._taken.intersection(units):
            raise DamagedSnapshot(f"unit {min(changed)} of the slot changed after it was read: start again")
        self.restored.how = self._client.recover(self._sources, self._coord).how

    def plan(self, agreement: Agreement, adapter: Adapter) -> HoldfastError | None:
        mine: list[HeldLeaf] | None = None
        if (problem := self.problem_of(lambda: self._read(adapter))) is None:
            mine = [leaf for leaf in leaves_in(self._form) if is_part_of(leaf[0], self._shared)]
        self._ask_replicas(agreement, adapter.replica_set(), mine)
        return problem or self.problem_of(lambda: self._plan(adapter))

    def _read(self, adapter: Adapter) -> None:
        """Read the record, and make the tensors that the job had."""
        saved = self.open()
        early, late, fixed = self._values = saved.values()
        # Not `saved`, which reads through this attempt: such a circle would keep the slot mapped until the next
        # garbage collection.
        self._form, self._record, self._shared = saved.form, saved.record, saved.shared
        self.restored.notes, self.restored.inputs = self._record.get(NOTES) or {}, self._record.get(INPUTS)
        self.rebuild(adapter, early)
        adapter.check(early, late, fixed)
        adapter.materialise(whole_leaves(leaves_in(self._form), self._shared))

    def _ask_replicas(self, agreement: Agreement, replica_set: str, mine: list[HeldLeaf] | None) -> None:
        """Tell the other replicas which parts of shared state this rank kept, None if it could not read that, and hear
        theirs; nothing if nobody shares anything. A collective call."""
        self._sets: tuple[tuple[int, ...], ...] = ()
        self._kept: dict[str, list[HeldLeaf] | None] = {}
        if agreement.minimum([-len(mine or ())])() == [0]:
            return
        named = [text.decode() for text in agreement.gather(replica_set.encode())]
        self._sets = tuple(tuple(rank for rank, name in enumerate(named) if name == one) for one in sorted(set(named)))
        members = next(ranks for ranks in self._sets if agreement.rank in ranks)
        told = agreement.gather(json.dumps(mine).encode(), members)
        coords = list(self._coords)
        self._kept = {coords[rank]: json.loads(text) for rank, text in zip(members, told, strict=True)}

    def _plan(self, adapter: Adapter) -> None:
        if None in self._kept.values():
            raise HoldfastError("a replica could not read its own shard; see its log")
        others = {coord: leaves for coord, leaves in self._kept.items() if coord != self._coord}
        leaves = {self._coord: leaves_in(self._form)} | others
        held = (each for coord, its in leaves.items() for each in held_in(coord, its or (), self._shared, {}))
        index = index_of(held, list(leaves))
        self.fills, problems = plan_fills(adapter.tensors(), index, divided=False)
        refuse_unfit(problems + unclaimed(index, (fill.item.name for fill in self.fills)))

    def fill(self, agreement: Agreement, engine: CopyEngine) -> HoldfastError | None:
        restore_strides(self._record, (fill.item for fill in self.fills))
        pieces = [
            SlotTensor(_part_of(fill.item.tensor, read), read.source, read.bytes, fill.item.name)
            for fill in self.fills
            for read in fill.reads
            if read.coord == self._coord
        ]
        load = partial(
            load_checked, engine, pieces, self.shard, self.repair, midway=self.midway, system=self._client.system
        )
        return failure_of(load, HoldfastError)

    def take_over(self, agreement: Agreement, adapter: Adapter) -> None:
        if self._sets:
            agreement.spread(self._sets, list(self._parts()), list(self._coords.values()))
        super().take_over(agreement, adapter)

    def _parts(self) -> Iterator[tuple[int, torch.Tensor]]:
        """Every part that a replica kept, with the rank that has it: the same on all replicas, in the same order."""
        tensors = {fill.item.name: fill.item.tensor for fill in self.fills}
        ranks = {coord: rank for rank, coord in enumerate(self._coords)}
        for coord, leaves in self._kept.items():
            for held in held_in(coord, leaves or (), self._shared, {}):
                for first, last, _ in held.region.runs:
                    yield ranks[coord], flat(tensors[held.region.key])[first:last]


def _part_of(tensor: torch.Tensor, read: Read) -> torch.Tensor:
    """What `read` fills of a tensor: all of it, or bytes of a contiguous one."""
    if read.bytes == tensor.nbytes:
        return tensor.detach()
    return octets(tensor)[read.target : read.target + read.bytes]
