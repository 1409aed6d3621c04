"""Restores a snapshot: the ranks agree on one, fetch its bytes, check that they fit, and load them in place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from holdfast.smp_daemon.shared.belief import Claim, believe_slot
from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.client import RecoveredShard, SmpClient
from holdfast.smp_daemon.shared.crash_loop import steps_finished
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    DeadlineExceeded,
    HoldfastError,
    IncompleteSnapshot,
    PlaceError,
    ProtocolError,
    StateMismatch,
    Unrecoverable,
    failure_of,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import Run, next_epoch
from holdfast.smp_daemon.shared.inventory import Inventory, Persisted
from holdfast.smp_daemon.shared.layout import Layout, SnapshotId
from holdfast.smp_daemon.shared.logs import about, get_log
from holdfast.smp_daemon.shared.plain import decode_json, encode_json
from holdfast.smp_daemon.shared.plan import (
    RestorePlan,
    newest_protected,
    parity_repairer,
    plan_persisted,
    plan_restore,
    whole_snapshots,
)
from holdfast.smp_daemon.shared.quantities import duration
from holdfast.smp_daemon.shared.runs import own_inventories
from holdfast.smp_daemon.shared.slotfile import PAGE_BYTES, Leaf, SlotFormat
from holdfast.smp_daemon.shared.starts import Choice, CrashLoop, ScriptBlock, Start
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.copy.tensors import read_leaf
from holdfast.snapshot.resume.blocks import check_block, check_given, check_order, describe
from holdfast.snapshot.resume.choice import (
    PERSISTED,
    RestoreAttempts,
    StartOptions,
    agree,
    check_repeats,
    choose,
    tier_of,
)
from holdfast.snapshot.resume.elastic import Resharding, ask_idle, check_change
from holdfast.snapshot.resume.entering import exchange
from holdfast.snapshot.resume.loading import check_ranges, load_checked, units_of
from holdfast.snapshot.resume.own_run import (
    Reach,
    ask_persisted_runs,
    check_not_at_work,
    check_nothing_is_left,
    reach_of,
    ways_out,
)
from holdfast.snapshot.state.adapter import Adapter
from holdfast.snapshot.state.completeness import check_complete
from holdfast.snapshot.state.live import Tree
from holdfast.snapshot.state.record import (
    BEGAN,
    INPUTS,
    LOOP,
    NOTES,
    check_fit,
    decode_record,
    decode_values,
    is_of_record,
    place_tensors,
    restore_strides,
    shared_leaves,
    whole_leaves,
)
from holdfast.snapshot.state.replicas import is_part_of, part_of, plan_gathering
from holdfast.snapshot.state.shares import Part, parse_part

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
        repairs: makes this node's SMP repair its part of the parity of `snapshot`, and returns how far that is. Raises
            `HoldfastError` if the SMP does not answer.
        how: ``held``, ``repaired``, ``fetched``, ``rebuilt``, ``persisted`` or ``resharded``; empty on a cold start.
        bytes_fetched: bytes fetched over the network for this rank's state.
        notes: what the snapshot's record holds besides the state; may be empty.
        loop: the position of the loop; see `SnapshotHook`.
        inputs: digest of the inputs of that step's first forward. Empty: there was nothing to sample, or the snapshot
            is of another number of ranks. None: it was sealed before they were known.
        began: what `snapshot.step.capture.began_with` returned when the step began that is now repeated; None: the loop
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
    repairs: Callable[[], RepairState] = lambda: RepairState.UNDER_WAY
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
        match self.steps_again:
            case None:
                again = "how many finished steps are done again is not known"
            case 0:
                again = "no finished step is lost"
            case 1:
                again = "1 finished step is done again"
            case _:
                again = f"{self.steps_again:,} finished steps are done again"
        took = duration(self.clock["load"] - self.clock["enter"])
        return f"restored step {self.snapshot.step:,} from {source} in {took}; {again}"


SOURCES = {
    "local": "the memory of its own nodes",
    "group": "the memory of other nodes",
    "previous": "memory, not the newest snapshot",
    PERSISTED: "storage",
}
"""The tiers of `resume.choice`, in words."""


def restore(
    client: SmpClient,
    agreement: Agreement,
    adapter: Adapter,
    engine: CopyEngine,
    options: StartOptions | None = None,
    *,
    elastic: bool = False,
    protect: bool = True,
) -> Restored:
    """Restore the newest snapshot available, tier by tier: see `resume.choice`. A collective call; blocks.

    A copy that turns out to be damaged no longer counts, and planning starts again. A snapshot that failed twice, and
    was never promised, is passed over: an older one may be whole, down to the one that was promised. One that is not
    complete, or whose record cannot be understood, is passed over at once, on all ranks, even if it was promised.
    Storage is only looked at if memory holds nothing that may be restored.

    Args:
        elastic: also accept, from memory, a snapshot of another number of data-parallel ranks; see `resume.elastic`.
        protect: have parity of the restored snapshot made even if it was only sealed, not protected.

    Raises:
        StateMismatch: see `check_fit`. Nothing was written on any rank.
        Unrecoverable: see `plan_restore`; or every copy turned out to be damaged, and tensors may be filled in part.
        ConfigError: another block of the script is held, see `check_order` and `check_block`.
        ConfigError, PlaceError: see `RestoreAttempts.choose_persisted`, `snapshot.resume.choice.agree`.
        Repeated: see `check_repeats`. Nothing was changed anywhere.
    """
    coord = adapter.coordinate()
    block = describe(options.block if options is not None else 1, adapter)
    monotonic = client.system.monotonic
    clock = {"enter": monotonic()}
    failure: HoldfastError | None = None
    course = RestoreAttempts()
    unacknowledged: set[SnapshotId] = set()
    streak: CrashLoop | None = None
    choice: Choice | None = None
    finished: int | None = None
    reach: Reach | None = None
    joined = looked_again = False
    stored = 0
    while True:
        entered = exchange(client, agreement, coord, options)
        everyone, coords, agreed = entered.inventories, entered.coords, agree(entered.options)
        if elastic:
            everyone += ask_idle(client, agreement, everyone)
        if reach is None or not joined:
            persisted = ask_persisted_runs(client, agreement)
            stored = persisted.epoch
            reach = reach_of(everyone, persisted.runs, agreed)
            check_not_at_work(client, agreement, persisted, reach)
        inventories = own_inventories(everyone, reach.run)
        if not joined:
            streak = check_repeats(inventories, agreed)
            check_order(inventories, block)
            choice = choose(inventories, agreed)
            finished = steps_finished(inventories)
        unacknowledged.update(*(inventory.never_acknowledged for inventory in inventories))
        plan, lost = _in_memory(inventories, None if elastic else coords, course, unacknowledged, choice)
        if lost is not None and not joined and not looked_again:
            # The SMPs may have regrouped between their answers, so that these do not fit together. No regrouping begins
            # once a trainer is connected, so the answers to a second look do fit.
            looked_again = True
            log.info("SMPs are asked once more what they hold: %s", lost)
            continue
        if plan is None:
            plan = _in_storage(client, agreement, coords, course, choice, lost, failure, reach)
        resharded = plan is not None and set(plan.sources.layout.coords) != set(coords)
        if plan is not None and resharded:
            check_change(plan.sources.layout.coords, coords)
        run = reach.begun(entered.drawn, entered.now_s) if plan is None else reach.continued(entered.now_s)
        # Above what is only on storage, too: it may be of other nodes, which went on with this run and come back later.
        epoch = next_epoch(max(stored, *(inv.epoch for inv in everyone)), entered.drawn)
        client.join(epoch, replace(_start(epoch, run, plan, everyone, streak, choice), block=block))
        joined = True
        agreement.minimum([1])()  # every older writer is fenced on every node before anyone goes on
        clock["plan"] = monotonic()
        if plan is None:
            return Restored(epoch, run, clock=clock | {"fetch": clock["plan"], "load": clock["plan"]})
        failpoint("restore.before", plan.snapshot.step)
        attempt: _Attempt | Resharding = (
            Resharding(client, plan, coords, coord, agreement.rank)
            if resharded
            else _Attempt(client, plan, coord, block)
        )
        failure = agreement.patiently(partial(failure_of, attempt.recover, HoldfastError))
        whole, unspoilt, complete = _agree(agreement, failure)
        if whole:
            clock["fetch"] = monotonic()
            failure = attempt.load(agreement, adapter, engine)
            whole, unspoilt, complete = _agree(agreement, failure)
        if whole:
            clock["load"] = monotonic()
            tier = tier_of(plan, inventories, coords)
            protected = _known_to_be_protected(plan, inventories)
            only_sealed = plan.sources.persisted or plan.snapshot in unacknowledged
            repairs: Callable[[], RepairState] = _repair_nothing
            if not resharded and (protect or not only_sealed):
                repairs = partial(repair_parity, client, plan, coords, coord)
                repairs()
            _say_what_is_lost(plan, inventories, course)
            if agreement.rank == 0:
                reach.say_others()
            older = choice is not None or bool(course.incomplete)  # than the newest that is held
            held = sorted(whole_snapshots(inventories)) if older or agreed.generations > 1 else []
            return Restored(
                epoch,
                run,
                plan.snapshot,
                protected,
                only_sealed,
                repairs,
                how=attempt.how,
                bytes_fetched=attempt.bytes_fetched,
                notes=attempt.notes,
                loop=attempt.loop,
                began=attempt.began,
                inputs=attempt.inputs,
                rewind=attempt.rewind,
                clock=clock,
                tier=tier,
                passed_over=tuple(course.passed_over),
                earlier=tuple(snapshot for snapshot in held if snapshot < plan.snapshot),
                abandoned=tuple(snapshot for snapshot in held if older and snapshot > plan.snapshot),
                steps_again=None if finished is None else max(0, finished - plan.snapshot.step),
            )
        why = str(failure or "another rank failed; see its log")
        course.failed(plan, why, damaged=not unspoilt, complete=complete)
        text = "recovery of %s is tried again: %s" if complete else "%s is passed over: %s"
        log.warning(text, plan.snapshot, why, extra=about(plan.snapshot))


def _start(
    epoch: int,
    run: Run,
    plan: RestorePlan | None,
    inventories: Sequence[Inventory],
    streak: CrashLoop | None,
    choice: Choice | None,
) -> Start:
    base = plan.snapshot.step if plan is not None else 0
    if plan is None or plan.sources.persisted:
        return Start(epoch, base, streak, choice, run=run)
    known = {node.control for node in plan.sources.layout.nodes}
    newcomers = {inventory.control for inventory in inventories} - known
    return Start(epoch, base, streak, choice, tuple(sorted(newcomers)), run)


def _repair_nothing() -> RepairState:
    """Leaves parity alone: the restored snapshot is kept as it is until a younger one is protected."""
    return RepairState.UNDER_WAY


def _known_to_be_protected(plan: RestorePlan, inventories: Sequence[Inventory]) -> SnapshotId | None:
    """The newest snapshot known to be protected: the restored one, if its parity is whole or an SMP was told so; or an
    older one."""
    if plan.sources.persisted:
        return None  # memory holds nothing that can be restored
    known = {inventory.protected for inventory in inventories if inventory.protected is not None}
    if not plan.repair:
        known.add(plan.snapshot)
    return max((snapshot for snapshot in known if snapshot <= plan.snapshot), default=None)


def _agree(agreement: Agreement, failure: HoldfastError | None) -> tuple[bool, bool, bool]:
    """Whether an attempt succeeded on every rank, whether no rank has met damage, and whether none has found that the
    snapshot is incomplete. A collective call."""
    met = [int(not isinstance(failure, kind)) for kind in (DamagedSnapshot, IncompleteSnapshot)]
    whole, unspoilt, complete = agreement.minimum([int(failure is None), *met])()
    return bool(whole), bool(unspoilt), bool(complete)


def _in_memory(
    inventories: Sequence[Inventory],
    coords: Collection[str] | None,
    course: RestoreAttempts,
    unacknowledged: Collection[SnapshotId],
    choice: Choice | None,
) -> tuple[RestorePlan | None, Unrecoverable | None]:
    """What to restore from memory; else, if memory held anything, why it cannot be restored."""
    if course.given_up:
        return None, Unrecoverable(course.given_up)
    try:
        hopeless = course.hopeless(unacknowledged)
        return plan_restore(inventories, coords, hopeless, choice, course.incomplete), None
    except Unrecoverable as error:
        return None, error


def _in_storage(
    client: SmpClient,
    agreement: Agreement,
    coords: dict[str, str],
    course: RestoreAttempts,
    choice: Choice | None,
    lost: Unrecoverable | None,
    failure: HoldfastError | None,
    reach: Reach,
) -> RestorePlan | None:
    """What to restore from storage; None: start from nothing. A collective call.

    Raises:
        Unrecoverable: there was something to restore, but none of it can be restored.
        ConfigError: see `check_nothing_is_left`.
    """
    if choice is not None:
        raise lost or Unrecoverable(f"{choice.snapshot} was chosen, and nothing of it is held") from failure
    run = reach.run.id if reach.run is not None else ""
    course.note(f"memory: {lost or 'no SMP that answers holds a snapshot'}")
    answers = _ask_what_is_persisted(client, agreement)
    while (snapshot := course.choose_persisted(answers, run)) is not None:
        layout, problem = _layout_of(client, run, snapshot)
        if agreement.minimum([int(layout is not None)])() == [1] and layout is not None:
            return plan_persisted(snapshot, layout, coords)
        course.passed(snapshot, problem or "another rank cannot see it")
    if lost is not None:
        tried = "; ".join(course.passed_over) if course.persisted_failures else str(lost)
        raise Unrecoverable(f"{tried}. {ways_out(reach)}") from failure
    check_nothing_is_left(reach, course.passed_over)
    return None


def _layout_of(client: SmpClient, run: str, snapshot: SnapshotId) -> tuple[Layout | None, str]:
    try:
        return client.persisted_layout(run, snapshot), ""
    except HoldfastError as error:
        return None, str(error)


def _ask_what_is_persisted(client: SmpClient, agreement: Agreement) -> list[Persisted]:
    """What is persisted, as every rank's SMP sees it. A collective call."""
    mine: Persisted
    try:
        mine = client.persisted()
    except (PlaceError, DeadlineExceeded) as error:
        mine = Persisted(PERSISTED, problem=str(error))
    return [decode_json(Persisted, text, "what is persisted") for text in agreement.gather(encode_json(mine))]


def _say_what_is_lost(plan: RestorePlan, inventories: Sequence[Inventory], course: RestoreAttempts) -> None:
    for reason in course.passed_over:
        log.warning("passed over: %s", reason, extra=about(plan.snapshot))
    protected = newest_protected(inventories)
    if not plan.sources.persisted and (protected not in course.incomplete or protected <= plan.snapshot):
        return
    after = f"steps after it, up to {protected}, which was protected, are lost" if protected else "later steps are lost"
    which = "was persisted" if plan.sources.persisted else "is older"
    log.error("going back to %s, which %s: %s", plan.snapshot, which, after, extra=about(plan.snapshot))


class _Attempt:
    """One rank's part in restoring one snapshot. The shard is checked while it is read."""

    shard: RecoveredShard

    def __init__(self, client: SmpClient, plan: RestorePlan, coord: str, block: ScriptBlock) -> None:
        self.snapshot = plan.snapshot
        self.block = block
        self.how = ""
        self.notes: dict[str, Any] = {}
        self.loop: dict[str, Any] = {}
        self.began: Tree | None = None
        self.inputs: str | None = None
        self.rewind: Callable[[], None] = lambda: None
        self.node = client.node
        self._client = client
        self.system = client.system
        self._sources = plan.sources
        self._coord = coord
        self._taken: set[int] = set()  # units that values were read from

    @property
    def bytes_fetched(self) -> int:
        """Bytes fetched over the network for the shard."""
        return self.shard.bytes_fetched

    def recover(self) -> None:
        """Bring the shard to this node. Raises `HoldfastError` if that fails."""
        self.shard = self._client.recover(self._sources, self._coord, check=False)
        self.how = self.shard.how

    def load(self, agreement: Agreement, adapter: Adapter, engine: CopyEngine) -> HoldfastError | None:
        """Load it into the live job; see `_load`."""
        return _load(self, agreement, adapter, engine)

    def repair(self, units: list[int]) -> None:
        """Have damaged units repaired in place.

        Raises:
            DamagedSnapshot: they cannot be repaired; or values were read from one of them, maybe after it was damaged.
        """
        if changed := self._taken.intersection(units):
            raise DamagedSnapshot(f"unit {min(changed)} of the slot changed after it was read: start again")
        self.how = self._client.recover(self._sources, self._coord).how

    def read_format(self) -> SlotFormat:
        """Check the slot's header, and return its format.

        Raises:
            DamagedSnapshot: the header cannot be repaired.
            ProtocolError: it is not what a trainer wrote for this snapshot.
        """
        slot = self.shard.view
        check_ranges(self.shard, [(0, min(slot.nbytes, PAGE_BYTES))], self.repair, self.system)
        header = min(8 + int.from_bytes(slot[:8], "little"), slot.nbytes)
        self._check_and_take([(0, header)])
        return believe_slot(slot, Claim.of_shard(self.snapshot, self._coord, self._sources.layout))

    def read(self) -> tuple[SlotFormat, dict[str, Any]]:
        """The slot's format and its record. Checks the record and all tensors that belong to it.

        Raises:
            DamagedSnapshot: they cannot be repaired.
            ProtocolError: they are not what a trainer wrote.
        """
        form = self.read_format()
        self._check_and_take(
            [(offset, leaf.bytes) for name, (offset, leaf) in form.offsets.items() if is_of_record(name)]
        )
        record = decode_record(self.shard.view, form, self.snapshot)
        self.notes, self.inputs = record.get(NOTES) or {}, record.get(INPUTS)
        return form, record

    def read_values(self) -> tuple[SlotFormat, dict[str, Any], tuple[Tree, Tree, Tree]]:
        """The slot's format, its record, and the early, late and fixed values in that.

        Raises:
            DamagedSnapshot: as `read`.
            IncompleteSnapshot: the record cannot be understood, or lists something that the slot does not hold.
        """
        try:
            form, record = self.read()
            values = decode_values(record, lambda name: read_leaf(self.shard.view, *form.offsets[name]))
            shared = shared_leaves(record)
        except ProtocolError as error:
            raise IncompleteSnapshot(f"no copy of it can be loaded: {error}") from error
        _, late, fixed = values
        check_complete(fixed, late, whole_leaves(form, shared).keys())
        return form, record, values

    def midway(self) -> None:
        """Half of the slot is loaded."""
        failpoint("restore.middle", self.snapshot.step)

    def _check_and_take(self, ranges: list[tuple[int, int]]) -> None:
        check_ranges(self.shard, ranges, self.repair, self.system)
        self._taken |= units_of(self.shard, ranges)


def _load(attempt: _Attempt, agreement: Agreement, adapter: Adapter, engine: CopyEngine) -> HoldfastError | None:
    """Load a slot into the live job, checking it on the way. Nothing is written unless it fits on every rank.

    Returns None, or why it failed on this rank: the copy is damaged, and another must be found.
    """
    made = False
    problem: HoldfastError | None = None
    try:
        form, record, (early, late, fixed) = attempt.read_values()
        shared = shared_leaves(record)
        held = [name for name in form.offsets if is_part_of(name, shared)]
        whole = whole_leaves(form, shared)
        loop = early.get(LOOP, {})
        check_block(loop, attempt.block)
        adapter.check(early, late, fixed)
        adapter.materialise(whole)
        made = True
        live = list(adapter.tensors())
        check_fit(form, live, shared)
        check_given(loop, attempt.block)
    except HoldfastError as error:
        problem = error
    except LookupError as error:  # the other ranks wait for this one, and no other copy of the record has more
        log.exception("the record of %s lacks something", attempt.snapshot, extra=about(attempt.snapshot))
        problem = IncompleteSnapshot(f"its record lacks {error}")
    damaged = isinstance(problem, DamagedSnapshot)
    fits, whole_everywhere = agreement.minimum([int(problem is None or damaged), int(not damaged)])()
    if made and not (fits and whole_everywhere):
        adapter.withdraw()
    if not fits:
        raise problem or StateMismatch("the snapshot does not fit the job on another rank; see its log")
    if not whole_everywhere:
        return problem
    gathering = plan_gathering(agreement, adapter.replica_set(), held, shared, attempt.node)
    restore_strides(record, live)
    tensors = {item.name: item.tensor for item in live}
    pieces = place_tensors(form, _own(tensors, held, shared))
    failure = failure_of(
        lambda: load_checked(
            engine, pieces, attempt.shard, attempt.repair, midway=attempt.midway, system=attempt.system
        ),
        HoldfastError,
    )
    if agreement.minimum([int(failure is None)])() == [1]:
        if gathering is not None:
            gathering.fill(agreement, tensors)
        adapter.load(early, late, fixed)
        attempt.loop, attempt.began = early.get(LOOP, {}), late.get(BEGAN)
        attempt.rewind = adapter.rewinding(early)
    return failure


def _own(
    tensors: Mapping[str, torch.Tensor], held: Sequence[str], shared: Mapping[str, Leaf]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Live tensors, or parts of them, by their names in this rank's slot."""
    yield from ((name, tensor) for name, tensor in tensors.items() if name not in shared)
    for name in held:
        part = parse_part(name)
        yield (name, tensors[name] if part is None else part_of(tensors[part[0]], Part(*part)))


def repair_parity(client: SmpClient, plan: RestorePlan, coords: dict[str, str], coord: str) -> RepairState:
    """Have lost parity recomputed on the node that took the lost node's place; returns how far this rank's part is."""
    states = [
        client.repair_parity(plan.sources, group, position)
        for group, position in plan.repair
        if parity_repairer(plan.sources.layout, group, position) == coord and coords[coord] == client.node
    ]
    return min(states, default=RepairState.WHOLE)
