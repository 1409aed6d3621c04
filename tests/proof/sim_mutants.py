"""Builds of holdfast that are broken on purpose, for the simulation. Each names the check that must notice it.

``python -m tests.proof.sim_mutants`` prints for each the first seed that its check notices, and what others
found.
"""

from __future__ import annotations

import random
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import msgspec
import torch

from holdfast.integrations.adapters.torch_native import TorchAdapter
from holdfast.smp_daemon.coding.scrub import Scrubber
from holdfast.smp_daemon.persist import persister
from holdfast.smp_daemon.persist.manifest import run_folder
from holdfast.smp_daemon.persist.reading import runs_at
from holdfast.smp_daemon.shared import owners, spawn
from holdfast.smp_daemon.shared.board import SnapshotOutcome
from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.errors import ConfigError, SmpUnavailable
from holdfast.smp_daemon.shared.identity import Run, first_after, run_id
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.messages import Obeyed, Seal
from holdfast.smp_daemon.shared.pacer import Pacer
from holdfast.smp_daemon.shared.plan import candidates, newest_protected, plan_restore
from holdfast.smp_daemon.shared.runs import new_run, own_run
from holdfast.smp_daemon.shared.transport import SocketStream
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.codings import Codings
from holdfast.smp_daemon.storage.holdings import Holdings
from holdfast.smp_daemon.storage.job_state import JobState
from holdfast.smp_daemon.storage.parity import ParityGathering
from holdfast.smp_daemon.storage.pool import SlotPool, SlotState
from holdfast.smp_daemon.storage.receiving import Receiving
from holdfast.smp_daemon.storage.reserver import Reserver
from holdfast.smp_daemon.storage.store import Store
from holdfast.snapshot.connect import start_here
from holdfast.snapshot.copy.unit_digests import UnitDigests
from holdfast.snapshot.copy.witness import Witness
from holdfast.snapshot.loop import Loop
from holdfast.snapshot.protecting import Protecting
from holdfast.snapshot.resume import restore
from holdfast.snapshot.resume.attempt import SameWorld
from holdfast.snapshot.resume.choice import RestoreAttempts
from holdfast.snapshot.resume.entering import Reach
from holdfast.snapshot.state import live, rng, streams, tracked
from holdfast.snapshot.state.adapter import Adapter, Flags
from holdfast.snapshot.state.manifest import Manifest
from holdfast.snapshot.state.optimizers import OptimizerState
from holdfast.snapshot.state.record import EARLY, Values, capture_tree
from holdfast.snapshot.state.values import encode
from holdfast.snapshot.step.boundary import Boundary
from holdfast.snapshot.step.capture import Capture
from holdfast.snapshot.step.copier import Copier
from holdfast.snapshot.step.ledger import Ledger
from holdfast.snapshot.step.orders import SnapshotCopy
from holdfast.snapshot.step.position import Position
from holdfast.snapshot.step.turns import TurnState
from tests.proof.mutants import forgetting_what_was_promised, one_node_behind
from tests.proof.sim import modules
from tests.proof.sim.plan import DrawnFault, DrawnState, Gap, SeedPlan, draw
from tests.proof.sim.run import play
from tests.proof.sim.seams import installed
from tests.proof.sim.sized import REFUSAL, draw_sized, reserve_s
from tests.proof.sim.system import SYSTEM

SEEDS = 150
"""Number of seeds within which a mutant must be noticed."""

Change = tuple[Any, str, Any]
"""The owner of the replaced attribute (a class, or the name of a module), the attribute's name, and the new value."""


def as_drawn(plan: SeedPlan) -> SeedPlan:
    """Return the plan unchanged."""
    return plan


@dataclass(frozen=True, slots=True)
class SimMutant:
    """One broken build.

    Attributes:
        what: what the build does wrong.
        sign: the check of `tests.proof.sim.checks` that must notice it.
        focus: turns a drawn plan into one in which the fault can show, if it rarely does.
    """

    what: str
    sign: str
    changes: tuple[Change, ...]
    focus: Callable[[SeedPlan], SeedPlan] = as_drawn

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Apply the changes for a ``with`` block. The replaced attributes must exist."""
        with ExitStack() as stack:
            for owner, attribute, new in self.changes:
                whole = isinstance(owner, str)
                stack.enter_context(
                    patch(f"{owner}.{attribute}", new) if whole else patch.object(owner, attribute, new)
                )
            yield


# ---------------------------------------------------------------------- plans in which a fault can show


def _bits_flip(plan: SeedPlan) -> SeedPlan:
    """A stored bit flips, and then all trainers are killed."""
    faults = (DrawnFault("flip-stored", awaits=1500), DrawnFault("kill-trainers", awaits=1600))
    return replace(plan, lives=(faults,), gaps=(Gap(0.0, True),), steps=3, flip_chance=0.0)


def _adopted_flipped(plan: SeedPlan) -> SeedPlan:
    """Bits flip, SMPs are killed, so that their successors adopt what is damaged, and then all trainers are killed."""
    flips = tuple(DrawnFault("flip-stored", awaits=1400 + 20 * i) for i in range(3))
    ends = tuple(DrawnFault("kill-smp", awaits=1500 + 20 * i) for i in range(4))
    faults = (*flips, *ends, DrawnFault("kill-trainers", awaits=1600))
    return replace(plan, lives=(faults,), gaps=(Gap(0.0, True),), steps=3, flip_chance=0.0)


def _beside(plan: SeedPlan) -> SeedPlan:
    return replace(plan, beside=True, state=None, quiet=2)


def _lost_twice(plan: SeedPlan) -> SeedPlan:
    return replace(plan, final="lose twice", flip_chance=0.0)


def _lost(plan: SeedPlan) -> SeedPlan:
    return replace(plan, final="lose", flip_chance=0.0)


def _too_much_lost(plan: SeedPlan) -> SeedPlan:
    """More nodes are lost than parity tolerates, but some SMPs that know the protected snapshot survive."""
    return replace(plan, nodes=3, ranks=(0, 1, 2), lengths=(100, 120, 140), protect="2+1", final="lose too many")


def _zombies(plan: SeedPlan) -> SeedPlan:
    """Trainers hang, are taken for dead, and continue during the next life."""
    lives = tuple((DrawnFault("zombie-trainer", awaits=awaits),) for awaits in (700, 900))
    return replace(plan, lives=lives, gaps=(Gap(0.0, True),) * 2, steps=3)


def _restless(plan: SeedPlan) -> SeedPlan:
    """Tasks yield at about every fifth await."""
    return replace(plan, order="uniform", chance=0.2, steps=4, every=1)


def _killed(plan: SeedPlan) -> SeedPlan:
    """All trainers are killed when a second snapshot is sealed on some nodes but not yet protected."""
    faults = (DrawnFault("kill-trainers", point="seal.done", nth=3 + plan.seed % 3),)
    return replace(plan, every=1, steps=3, lives=(faults,), gaps=(Gap(0.0, True),))


def _ends_well(plan: SeedPlan) -> SeedPlan:
    return replace(plan, final="finish")


def _with_state(
    *kinds: str,
    declared: bool = False,
    replicated: bool = False,
    sizes: tuple[int, ...] = (),
    loop: str = "counted",
) -> Callable[[SeedPlan], SeedPlan]:
    """A plan with state of real modules on two nodes without faults: the job ends and is resumed."""
    state = DrawnState(kinds, "adamw", replicated, declared, 1, sizes, "steady", loop)

    def plan(drawn: SeedPlan) -> SeedPlan:
        lives = 2 if sizes else 1
        quiet = replace(drawn, flip_chance=0.0, break_chance=0.0, lives=((),) * lives, final="stop")
        two = replace(quiet, nodes=2, ranks=(0, 1), lengths=(40, 40), protect="1+1", every=1, quiet=1)
        two = replace(two, gaps=(Gap(0.0, True),) * lives)
        return replace(two, state=state, steps=3, unit_bytes=4096, slots=3, generations=1)

    return plan


_KILLED: dict[str, Any] = {
    "lives": ((DrawnFault("kill-process", point="copy.middle", nth=5),),),
    "gaps": (Gap(0.0, True),),
}


def _stored(plan: SeedPlan) -> SeedPlan:
    """A snapshot is persisted, and then all snapshots in memory are lost."""
    return replace(
        plan,
        persist_s=0.1,
        steps=4,
        every=1,
        flip_chance=0.0,
        final="lose too many",
        gaps=(Gap(1.0, True),) * len(plan.lives),
    )


def _with_moves(*moves: tuple[str, ...], stored: bool = False) -> Callable[[SeedPlan], SeedPlan]:
    """A plan of two nodes without faults, with these moves after each life."""

    def plan(drawn: SeedPlan) -> SeedPlan:
        two = replace(drawn, nodes=2, ranks=(0, 1), lengths=(100, 120), protect="1+1", every=1, quiet=1, state=None)
        two = replace(two, slots=3, generations=1, protect_every=1, final="stop", beside=False)
        two = replace(two, steps=6 if stored else 2)
        return replace(
            two,
            flip_chance=0.0,
            break_chance=0.0,
            persist_s=0.1 if stored else 0.0,
            step_s=0.05,
            lives=((),) * len(moves),
            gaps=tuple(Gap(8.0, True, each) for each in moves),
        )

    return plan


def _two_slots(plan: SeedPlan) -> SeedPlan:
    return replace(_killed(plan), slots=2, generations=1, steps=4, protect_every=1, flip_chance=0.0)


def _one_of_many(plan: SeedPlan) -> SeedPlan:
    """One snapshot is protected, and all trainers are killed when newer ones are sealed."""
    faults = (DrawnFault("kill-trainers", point="seal.done", nth=len(plan.ranks) * 3),)
    plan = replace(plan, every=1, steps=4, slots=4, generations=1, protect_every=9, break_chance=0.0, flip_chance=0.0)
    return replace(plan, state=None, lives=(faults,), gaps=(Gap(0.0, True),))


# ---------------------------------------------------------------------- broken functions

_end = Protecting.end_if_agreed


def _end_late(protecting: Protecting) -> None:
    due, protecting._last = protecting._last, vars(protecting).get("_late")
    vars(protecting)["_late"] = due
    _end(protecting)


_accumulate = ParityGathering.accumulate
_after = Ledger.after
_commit = SlotPool.commit
_settle = Store.post_if_protected
_seal = Store.seal
_complete = UnitDigests.complete
_fill = Copier._fill
_one_node_behind = one_node_behind(vars(restore)["exchange"])
_forget_what_was_protected = forgetting_what_was_promised(plan_restore)
_join = Store.join
_make = Receiving.make


def _make_under_the_lock(self: Receiving, pool: SlotPool, length: int) -> Any:
    with self.lock:
        return _make(self, pool, length)


_checked_unit = Holdings.checked_unit


def _believe_what_was_adopted(self: Holdings, key: Any, index: int) -> Any:
    if index not in self._unverified.get(key, ()):
        return _checked_unit(self, key, index)
    view, record = self.open(key)
    offset, length = record.unit(index)
    return view[offset : offset + length], record


_adopt = Arena.adopt
_reserve = Arena.reserve


def _ignore_keep(self: SlotPool, keep: Any, before: Any) -> list[Any]:
    return [s for s in self.slots if s.state is SlotState.SEALED and s.snapshot is not None and s.snapshot < before]


def _settle_at_once(self: Store, snapshot: Any) -> None:
    with self.changed:
        progress = self.outcomes._progress.get(snapshot)
        if progress is not None and progress.outcome is SnapshotOutcome.PENDING:
            progress.outcome = SnapshotOutcome.PROTECTED
            self.outcomes.board.post(snapshot.step, SnapshotOutcome.PROTECTED)
            self.changed.notify_all()


def _forget_the_older(slots: int, snapshot: Any, protected: Any, **more: Any) -> Ledger:
    return _after(slots, snapshot, protected if protected == snapshot else None, **more)


def _forget_the_restored(slots: int, snapshot: Any, protected: Any, **more: Any) -> Ledger:
    return _after(slots, snapshot, protected, **more | {"only_sealed": True})


def _keep_what_is_protected(self: Ledger) -> tuple[SnapshotId, ...]:
    named = (*self.earlier, *self.abandoned, self.protected, self.restored, *self.pending)
    return tuple(sorted({snapshot for snapshot in named if snapshot is not None}))


def _promised_only(inventories: Any, coords: Any, without: Any, choice: Any, *more: Any) -> Any:
    """Ignore all snapshots that are newer than the one known to be protected."""
    protected = newest_protected(inventories)
    younger = {each for each in candidates(inventories, protected) if protected is not None and each > protected}
    return plan_restore(inventories, coords, {*without, *younger}, choice, *more)


def _seal_and_encode(self: Store, request: Seal) -> None:
    _seal(self, msgspec.structs.replace(request, encode=True))


def _oldest_first(inventories: Any, protected: Any) -> list[Any]:
    return sorted(candidates(inventories, None))


def _accumulate_badly(self: ParityGathering, stripe: int, position: int, unit: memoryview, unit_digest: int) -> None:
    _accumulate(self, stripe, position, unit, unit_digest)
    if self.complete and unit.nbytes:
        unit = self._unit(stripe, 1)
        unit[:] = bytes([unit[0] ^ 1])


def _settle_and_spoil(self: Store, snapshot: SnapshotId) -> None:
    _settle(self, snapshot)
    with self.changed:
        progress = self.outcomes._progress.get(snapshot)
        if progress is not None and progress.outcome is SnapshotOutcome.PROTECTED:
            for pool in self.arena.shards.values():
                if slot := pool.find(snapshot, SlotState.SEALED):
                    view = pool.view(slot)
                    at = 8 + int.from_bytes(view[:8], "little")
                    view[at : at + 1] = bytes([view[at] ^ 1])


def _fill_badly(self: Copier, copy: SnapshotCopy, slot: memoryview) -> None:
    offsets = [piece.offset for piece in copy.live.pieces] if copy.live is not None else []
    _fill(self, copy, slot)
    for offset in offsets:
        slot[offset : offset + 1] = bytes([slot[offset] ^ 1])


def _complete_with_others(self: UnitDigests, slot: memoryview) -> tuple[int, ...]:
    return tuple(each ^ 1 for each in _complete(self, slot))


def _fill_and_note(self: Copier, copy: SnapshotCopy, slot: memoryview) -> Any:
    offsets = [piece.offset for piece in copy.live.pieces] if copy.live is not None else []
    digests: Any = _fill(self, copy, slot)
    if digests is not None:
        digests.offsets = offsets
    return digests


def _complete_and_change(self: Any, slot: memoryview) -> tuple[int, ...]:
    found = _complete(self, slot)
    for offset in self.offsets:
        slot[offset] ^= 1
    return found


def _commit_twice(self: SlotPool, slot: Any, record: Any) -> None:
    _commit(self, slot, record)
    another = self.create(slot.bytes)
    self.view(another)[:] = self.view(slot)
    another.state, another.snapshot = SlotState.WRITING, slot.snapshot
    self._change(another, owners.FREE, owners.BUSY)
    _commit(self, another, record)


def _fence_nobody(self: Arena, epoch: int) -> None:
    """Carry all marks of slots into the new epoch, those of its old writers, too."""
    for file, marks in self.owners.found().items():
        for owner, _ in marks:
            self.owners.renew(file, owner, epoch)
    self.owners.epoch = epoch


def _reserve_more(self: Arena, wanted: dict[Any, tuple[int, int]]) -> None:
    _reserve(self, {pool: (length, count + 2) for pool, (length, count) in wanted.items()})


def _raise_on_first_join(self: Store, epoch: int, start: Any = None) -> None:
    _join(self, epoch, start)
    if epoch > 1:
        raise ZeroDivisionError("a bug")


def _refuse_what_is_there(self: Arena) -> Iterator[Any]:
    found = list(_adopt(self))
    if any(pool.suffix == "parity" for pool, _, _ in found):
        raise ConfigError("this arena is not liked")
    return iter(found)


def _never(*arguments: Any, **options: Any) -> None:
    """Do nothing."""


def _wait_for_ever(*arguments: Any) -> None:
    SYSTEM.Event().wait()


_after_step = Loop.after_step
_tensors = TorchAdapter.tensors
_begin = Capture.begin
_load_extra = Adapter.load
_own_run = own_run
_tidy = vars(persister)["tidy"]


def _tensors_of_one_change(self: TorchAdapter) -> Iterator[live.LiveTensor]:
    """Describe all tensors as changed by steps only, as if forward changed no buffer."""
    return (replace(item, change=live.Change.STEP) for item in _tensors(self))


def _after_step_and_take(self: Loop) -> None:
    """Take the snapshot that is due as the step ends, before what the loop does between two steps."""
    _after_step(self)
    if self.is_due and self._where is TurnState.BETWEEN:
        self._take(is_last=False)
        self._where = TurnState.CERTAIN
        if self._copy is not None:
            self._copy.confirm()


def _early_as_it_lives(tree: live.Tree, path: str) -> Values:
    tensors: dict[str, torch.Tensor] = {}
    return Values(encode(tree, path, tensors), tensors) if path == EARLY else capture_tree(tree, path)


def _without_scalers(self: Adapter, early: Any, late: Any, fixed: Any) -> None:
    held, self._extra = self._extra, {}
    _load_extra(self, early, late, fixed)
    self._extra = held


def _forward_of_any_mode(self: Boundary, module: Any, *given: Any) -> None:
    """Treat every forward as the begin of a step, even in an evaluation."""
    self._forwards += 1
    self._running.append(self._forwards)
    with torch.enable_grad():  # all tasks share one thread and its grad mode
        self._listener.on_forward(self._forwards, given)


def _believe(self: Loop, *arguments: Any) -> None:
    """Instead of `Loop._refuse`: seal what was taken."""
    if self._copy is not None:
        self._copy.confirm()


def _begin_and_draw(self: Capture, *arguments: Any, **options: Any) -> SnapshotCopy:
    copy = _begin(self, *arguments, **options)
    random.uniform(0, 1)
    return copy


def _all_alike(ranks: Any) -> set[str]:
    return set(ranks[0])


def _nobody_is_carried(old: Any, new: Any, carried: Any) -> dict[str, dict[str, str]]:
    return {coord: {} for coord in new}


def _of_the_newest_snapshot(seen: Any, wanted: str = "", gone: Any = ()) -> Any:
    """Take the run that has the newest snapshot."""
    return max((each for each in seen if each.run.id not in gone), key=lambda each: each.snapshots[:1], default=None)


def _whatever_was_given_up(seen: Any, wanted: str = "", gone: Any = ()) -> Any:
    return _own_run(seen, wanted)


def _under_the_old_name(self: Reach, drawn: int, now_s: float) -> Run:
    return new_run(self.seen[0].run.id if self.seen else run_id(drawn), self.seen, self.gone, now_s)


def _tidy_all_runs(place: Any, job: str, run: str, keep: int) -> Any:
    for of, other in runs_at(place):
        if other != run:
            place.remove(run_folder(of, other))
    return _tidy(place, job, run, keep)


def _load_and_forget(self: Adapter, *what: Any) -> None:
    _load_extra(self, *what)
    for optimizer in self.optimizers():
        optimizer.state.clear()


BLIND: tuple[Change, ...] = ((Witness, "check", _never),)
"""Disables the check for state that changed while it was copied."""

PLAN = "holdfast.smp_daemon.shared.plan"
RESTORE = "holdfast.snapshot.resume.restore"
OWN_RUN = "holdfast.snapshot.resume.entering"

# ---------------------------------------------------------------------- on nodes of real size


def _drained(seed: int) -> Callable[[SeedPlan], SeedPlan]:
    """The plan of `seed` on nodes of real size, which are slow, and of which one is drained at the end."""
    return lambda plan: replace(draw_sized(seed), final="drain")


def _in_a_minute(self: Protecting) -> float:
    return self._rank.system.monotonic() + self._options.deadline_s


def _nothing_moves(*, done: bool, moved: int) -> Obeyed:
    return Obeyed(done=done, moved=0)


def _sized(*kinds: str, **costs: float) -> Callable[[SeedPlan], SeedPlan]:
    """Nodes of real size on which these faults strike once snapshots are taken. `costs`: those that are not drawn."""

    def focus(plan: SeedPlan) -> SeedPlan:
        large = replace(draw_sized(plan.seed), nodes=2, ranks=(0, 0, 1, 1), lengths=(1500,) * 4, final="stop")
        assert large.costs is not None
        large = replace(large, costs=replace(large.costs, scale=25_000_000, **costs), refused="", protect_every=1)
        at_s = reserve_s(large)
        return replace(large, lives=(tuple(DrawnFault(kind, at_s=at_s) for kind in kinds),), slots=3, generations=1)

    return focus


def _begin_again(self: SocketStream, head: bytearray) -> int:
    """Wait until a message comes, or the connection ends."""
    while True:
        with suppress(TimeoutError):
            return self._sock.recv_into(head)


def _digests_first(self: Store) -> None:
    """What a predecessor left is read before anybody is answered."""
    _store_adopt(self)
    for key in self.holdings.held():
        self.holdings.damaged_units(key)


_store_adopt = Store._adopt


def _each_launches(job: str, node: str, arena: Any, **options: Any) -> Any:
    """Ranks queue behind one another, and none looks whether the one before has started an SMP."""
    with spawn._turn_to_start(arena, SYSTEM) as is_my_turn:
        while not is_my_turn():
            SYSTEM.sleep(spawn.LOOK_EVERY_S)
        with suppress(ConfigError):
            spawn.launch(spawn.smp_command(job, node, arena, ""), 1000.0, SYSTEM)


def _swallows(arena: Any, job: str, *, start: bool, coord: str | None = None, system: Any = SYSTEM) -> SmpClient:
    """Why an SMP could not be started is not told."""
    with suppress(SmpUnavailable):
        return SmpClient(arena, job, coord, system)
    with suppress(ConfigError):
        start_here(arena, job, system=system)
    return SmpClient(arena, job, coord, system)


MUTANTS: dict[str, SimMutant] = {
    "digests-first": SimMutant(
        "a successor digests all that its arena holds before it serves",
        "serves",
        ((Store, "_adopt", _digests_first),),
        _sized("kill-smp", digest=15e9, start_s=0.5),
    ),
    "each-launches": SimMutant(
        "ranks of a node that start an SMP queue behind one another, each launching one",
        "connected",
        (("tests.proof.sim.seams", "start_smp", _each_launches),),
        _sized(start_s=5.0),
    ),
    "attach-blocks": SimMutant(
        "the training thread waits for an SMP that is being started, however long that takes",
        "waits",
        (("holdfast.snapshot.rank", "ATTACH_DEADLINE_S", 120.0),),
        _sized("kill-smp", start_s=40.0, copy=20e9),
    ),
    "swallowed": SimMutant(
        "why no SMP can be started is swallowed, and the connection said to be refused",
        "said",
        (("holdfast.snapshot.rank", "connect", _swallows),),
        lambda plan: replace(_sized()(plan), refused=REFUSAL),
    ),
    "fixed-deadline": SimMutant(
        "whoever waits for digests waits half a minute, however many bytes there are",
        "calm",
        ((SmpClient, "_read_deadline", lambda self, names: 30.0),),
        _sized(digest=1e9),
    ),
    "leaves-in-a-minute": SimMutant(
        "the last snapshot before an announced loss has `deadline_s` to be protected, however many bytes there are",
        "announced",
        ((Protecting, "_protected_by_s", _in_a_minute),),
        _drained(5004),
    ),
    "unheard-progress": SimMutant(
        "whoever has nodes regroup does not hear that bytes move on them",
        "announced",
        (("holdfast.smp_daemon.recovery.reconciler", "Obeyed", _nothing_moves),),
        _drained(5172),
    ),
    "deadline-ignored": SimMutant(
        "a call to an SMP that has not answered by its deadline waits as long once more, again and again",
        "answered",
        ((SocketStream, "_begin", _begin_again),),
        lambda plan: replace(_sized()(plan), lives=((DrawnFault("pause-smp", at_s=2.0),),)),  # as the job begins
    ),
    "capped": SimMutant(
        "encoding waits minutes before each unit",
        "back",
        ((Pacer, "wait_s", lambda self, count, now: 400.0),),
        _sized(copy=20e9, digest=20e9, populate=5e9, map=9e9, network=14e9),
    ),
    "oldest-first": SimMutant(
        "the plan takes the oldest snapshot, whatever is protected", "promise", ((PLAN, "candidates", _oldest_first),)
    ),
    "keep-ignored": SimMutant(
        "the slot of the protected snapshot is freed", "kept", ((SlotPool, "outdated", _ignore_keep),)
    ),
    "older-forgotten": SimMutant(
        "what was protected is given up for what was restored", "kept", ((Ledger, "after", _forget_the_older),)
    ),
    "sealed-given-up": SimMutant(
        "what is only sealed is given up for the next, however many slots there are",
        "held",
        ((Ledger, "keep", property(_keep_what_is_protected)),),
        _one_of_many,
    ),
    "sealed-passed-over": SimMutant(
        "a restart goes back to what is protected, whatever is sealed",
        "crash",
        ((RESTORE, "plan_restore", _promised_only),),
        _one_of_many,
    ),
    "all-encoded": SimMutant(
        "what is only to be sealed is encoded, too",
        "unasked",
        ((Store, "seal", _seal_and_encode), (Store, "_leave_unprotected", _never)),
        _one_of_many,
    ),
    "sealed-is-protected": SimMutant(
        "what is sealed counts as protected", "recoverable", ((Store, "post_if_protected", _settle_at_once),), _lost
    ),
    "old-writers": SimMutant(
        "who writes for an earlier epoch is let in, and believed",
        "epoch",
        (
            (JobState, "check_epoch", _never),
            (Arena, "fence", _fence_nobody),
            (Receiving, "check_slot", _never),
            (Holdings, "_believe", _never),
        ),
        _zombies,
    ),
    "bad-parity": SimMutant(
        "a bit of parity is wrong", "recoverable", ((ParityGathering, "accumulate", _accumulate_badly),), _lost
    ),
    "no-parity": SimMutant("parity is never committed", "progress", ((Codings, "_commit_parity", _never),)),
    "no-fence": SimMutant(
        "the next step does not wait for the copy",
        "sealed",
        ((SnapshotCopy, "fence", lambda copy, patience_s, deadline_s: True),),
        _restless,
    ),
    "a-step-too-many": SimMutant(
        "a job from which a node is taken ends one step late",
        "announced",
        ((Protecting, "end_if_agreed", _end_late),),
        lambda plan: replace(plan, final="drain"),
    ),
    "no-reserver": SimMutant(
        "memory that is planned is never reserved",
        "progress",
        ((Reserver, "start", _never),),
        _beside,
    ),
    "made-under-the-lock": SimMutant(
        "a slot to receive into is made while everybody waits for the store",
        "lock",
        ((Receiving, "make", _make_under_the_lock),),
        lambda plan: _lost(_beside(plan)),
    ),
    "no-repair": SimMutant(
        "lost parity is not repaired",
        "recoverable",
        (("holdfast.smp_daemon.recovery.reconciler", "repair_parity", lambda *arguments: 0),),
        _lost_twice,
    ),
    "no-digests": SimMutant(
        "digests are not compared",
        "restored",
        (
            (Holdings, "damaged_units", lambda self, key, *pace, **which: []),
            ("holdfast.smp_daemon.shared.records.Unit", "matches", lambda self: True),
        ),
        _bits_flip,
    ),
    "adopted-believed": SimMutant(
        "what a predecessor left is believed unverified",
        "restored",
        (
            (Holdings, "checked_unit", _believe_what_was_adopted),
            ("holdfast.smp_daemon.shared.records.Unit", "matches", lambda self: True),
        ),
        _adopted_flipped,
    ),
    "one-is-behind": SimMutant(
        "one node does not hear of the newest snapshot",
        "together",
        ((RESTORE, "exchange", _one_node_behind),),
        _killed,
    ),
    "spoilt-in-its-slot": SimMutant(
        "what is protected is written to once more", "whole", ((Store, "post_if_protected", _settle_and_spoil),)
    ),
    "spoilt-copy": SimMutant("a copy is off by a bit", "sealed", ((Copier, "_fill", _fill_badly),)),
    "digests-of-other-bytes": SimMutant(
        "a trainer digests other bytes than it copied", "progress", ((UnitDigests, "complete", _complete_with_others),)
    ),
    "changed-before-commit": SimMutant(
        "a slot changes between the copy and its commit",
        "sealed",
        ((Copier, "_fill", _fill_and_note), (UnitDigests, "complete", _complete_and_change)),
    ),
    "held-twice": SimMutant("what is sealed is sealed in two slots", "once", ((SlotPool, "commit", _commit_twice),)),
    "more-slots": SimMutant("two slots more are made than asked for", "memory", ((Arena, "reserve", _reserve_more),)),
    "not-retired": SimMutant("the arena stays when the job is over", "free", ((Store, "retire", _never),), _ends_well),
    "promise-forgotten": SimMutant(
        "what is known to be protected is forgotten at a restart",
        "floor",
        ((RESTORE, "plan_restore", _forget_what_was_protected),),
        _too_much_lost,
    ),
    "restore-hangs": SimMutant(
        "trainers wait for ever while they restore", "ends", ((RESTORE, "_say_what_is_lost", _wait_for_ever),), _lost
    ),
    "smp-hangs": SimMutant("an SMP that is to end waits for ever", "rest", ((Scrubber, "close", _wait_for_ever),)),
    "a-bug": SimMutant("a thread meets an error that nobody expects", "bug", ((Store, "join", _raise_on_first_join),)),
    "arena-refused": SimMutant(
        "a new SMP does not take an arena with parity", "returns", ((Arena, "adopt", _refuse_what_is_there),)
    ),
    "storage-forgotten": SimMutant(
        "nobody looks at what is persisted",
        "persisted",
        ((RestoreAttempts, "choose_persisted", lambda self, answers, run: None),),
        _stored,
    ),
    "two-slots": SimMutant(
        "with two slots what was restored gives its slot to the next before it has its parity again",
        "kept",
        ((Ledger, "after", _forget_the_restored),),
        _two_slots,
    ),
    # ------------------------------------------------------------------ several runs
    "names-collide": SimMutant(
        "two starts that know nothing of each other take the same epoch",
        "named",
        ((RESTORE, "next_epoch", lambda newest, drawn: first_after(newest)),),
        _with_moves(("all go",), ("mix",)),
    ),
    "newest-of-any-run": SimMutant(
        "a start goes on with the newest snapshot, whichever run it is of",
        "own run",
        ((OWN_RUN, "own_run", _of_the_newest_snapshot),),
        _with_moves(("all go",), ("mix",)),
    ),
    "given-up-goes-on": SimMutant(
        "a run that was given up goes on",
        "own run",
        ((OWN_RUN, "own_run", _whatever_was_given_up),),
        _with_moves(("give up",)),
    ),
    "old-name-of-a-run": SimMutant(
        "a run that begins has the id of one that was given up",
        "own run",
        ((Reach, "begun", _under_the_old_name),),
        _with_moves(("give up",)),
    ),
    "from-nothing": SimMutant(
        "a job begins from nothing though nobody has given up what was persisted",
        "nothing",
        ((RESTORE, "check_nothing_is_left", _never),),
        _with_moves(("damage storage", "lose memory"), stored=True),
    ),
    "no-way-out": SimMutant(
        "an error does not say how a run is given up",
        "told",
        ((OWN_RUN, "ways_out", lambda reach: "nothing can be done"),),
        _with_moves(("damage storage", "lose memory"), stored=True),
    ),
    "all-are-tidied": SimMutant(
        "a run removes what another one has persisted",
        "persisted",
        ((persister, "tidy", _tidy_all_runs),),
        _with_moves(("give up",), ("lose memory", "choose"), stored=True),
    ),
    "one-folder": SimMutant(
        "all runs of a job share a folder at a place",
        "persisted",
        (("holdfast.smp_daemon.persist.manifest", "run_folder", lambda job, run: f"{job}.00000000"),),
        _with_moves(("lose memory",), stored=True),
    ),
    # ------------------------------------------------------------------ capture of real modules
    "left-out": SimMutant(
        "the state of optimizers is not restored",
        "complete",
        ((Adapter, "load", _load_and_forget),),
        _with_state("thaws"),
    ),
    "torn-unseen": SimMutant(
        "what a step writes to before optim.step() is not noticed",
        "sealed",
        BLIND,
        _with_state("written in a step"),
    ),
    "other-memory-unseen": SimMutant(
        "a parameter that was given other memory is copied from where it was",
        "sealed",
        ((Manifest, "has_moved", lambda self: False), *BLIND),
        _with_state("other memory"),
    ),
    "buffers-with-the-rest": SimMutant(
        "buffers are copied while forward changes them",
        "sealed",
        ((TorchAdapter, "tensors", _tensors_of_one_change), *BLIND),
        _with_state("buffers"),
    ),
    "early-tensors-not-copied": SimMutant(
        "tensors that reading a batch changes are not copied before it is read",
        "restored",
        (("holdfast.snapshot.step.capture", "capture_tree", _early_as_it_lives),),
        lambda plan: replace(_with_state("loader", declared=True)(plan), **_KILLED),
    ),
    "taken-as-the-step-ends": SimMutant(
        "the state is taken when the step ends, before the code between two steps",
        "sealed",
        ((Loop, "after_step", _after_step_and_take),),
        _with_state("clamped"),
    ),
    "evaluation-begins-a-step": SimMutant(
        "an evaluation with borrowed weights is taken for the next step",
        "sealed",
        ((Boundary, "_forward", _forward_of_any_mode), (Loop, "_refuse", _believe)),
        _with_state("evaluation", "average"),
    ),
    "generators-left-alone": SimMutant(
        "random generators are not restored",
        "restored",
        ((rng, "restore", _never),),
        _with_state("dropout", declared=True),
    ),
    "batch-read-before-the-mark": SimMutant(
        "what reading a batch changes is captured once it was read",
        "returns",
        (("holdfast.snapshot.state.adapter", "settles_late", lambda part: True),),
        _with_state("loader"),
    ),
    "schedules-left-alone": SimMutant(
        "schedules are not restored",
        "restored",
        (("torch.optim.lr_scheduler.LRScheduler", "load_state_dict", _never),),
        _with_state("schedule"),
    ),
    "options-left-alone": SimMutant(
        "an optimizer's options are not restored",
        "restored",
        ((OptimizerState, "load", _never),),
        _with_state("schedule"),
    ),
    "scalers-left-alone": SimMutant(
        "gradient scalers are not restored",
        "restored",
        ((Adapter, "load", _without_scalers),),
        _with_state("scaler"),
    ),
    "flags-left-alone": SimMutant(
        "a layer that was thawed is frozen again",
        "restored",
        ((Flags, "load", _never),),
        _with_state("thaws"),
    ),
    "extra-state-left-alone": SimMutant(
        "what modules keep beside tensors is not restored",
        "restored",
        ((modules.CallCounter, "set_extra_state", _never),),
        _with_state("extra state"),
    ),
    "tracked-left-alone": SimMutant(
        "tracked values are not restored", "restored", ((tracked, "load", _never),), _with_state("plain values")
    ),
    "average-forgotten": SimMutant(
        "tracked tensors are not captured",
        "restored",
        ((Adapter, "_tracked_tensors", lambda self: iter(())),),
        _with_state("average"),
    ),
    "parts-not-gathered": SimMutant(
        "replicas do not give each other what each kept",
        "restored",
        ((SameWorld, "_parts", lambda self: iter(())),),
        _with_state("clamped", replicated=True),
    ),
    "all-draw-alike": SimMutant(
        "who comes back to a single rank takes over its generators",
        "restored",
        ((streams, "alike", _all_alike),),
        _with_state("dropout", replicated=True, sizes=(2, 2, 1)),
    ),
    "streams-dropped": SimMutant(
        "where the generators of a rank that is gone stopped is forgotten",
        "restored",
        (("holdfast.snapshot.resume.elastic", "stream_owners", _nobody_is_carried),),
        _with_state("dropout", replicated=True, sizes=(3, 3, 2)),
    ),
    "place-forgotten": SimMutant(
        "how far the data was read is not restored",
        "returns",
        ((Position, "tree", lambda self: {"turn": None, "data": {}}),),
        lambda plan: replace(_with_state(loop="data")(plan), **_KILLED),
    ),
    "a-draw-of-ours": SimMutant(
        "to take a snapshot draws from a generator of the loop",
        "exact",
        ((Capture, "begin", _begin_and_draw),),
        lambda plan: replace(_with_state("numpy", declared=True)(plan), **_KILLED),
    ),
}
"""All mutants, by name."""


def noticed(mutant: SimMutant, seeds: range) -> tuple[int | None, Counter[str]]:
    """The first seed at which the mutant's own check reports a violation, and counts of other checks before that."""
    others: Counter[str] = Counter()
    with mutant.applied():
        for seed in seeds:
            found = [violation.check for violation in play(mutant.focus(draw(seed))).violations]
            if mutant.sign in found:
                return seed, others
            others.update(found[:1])
    return None, others


def main() -> None:
    """Search and print the results."""
    with installed():
        for name in sys.argv[1:] or MUTANTS:
            mutant, began = MUTANTS[name], time.perf_counter()
            seed, others = noticed(mutant, range(4 * SEEDS))
            seconds = time.perf_counter() - began
            print(f"{name:20} {mutant.sign:12} {seed} {seconds:.1f} s {dict(others)}", flush=True)


if __name__ == "__main__":
    main()
