"""Restores a snapshot: the ranks agree on one, fetch its bytes, check that they fit, and load them in place."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial

from holdfast.smp_daemon.shared.client import SmpClient
from holdfast.smp_daemon.shared.crash_loop import steps_finished
from holdfast.smp_daemon.shared.errors import HoldfastError, StateMismatch, Unrecoverable, failure_of
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import next_epoch
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
from holdfast.smp_daemon.shared.runs import own_inventories
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.starts import ScriptBlock, Start
from holdfast.snapshot.collective.agreement import Agreement
from holdfast.snapshot.copy.engines import CopyEngine
from holdfast.snapshot.resume.attempt import Attempt, SameWorld, Verdict, agree_on, load, refuse_misfit
from holdfast.snapshot.resume.attempt import Restored as Restored
from holdfast.snapshot.resume.blocks import check_order, describe
from holdfast.snapshot.resume.choice import (
    RestoreAttempts,
    StartOptions,
    check_repeats,
    check_required,
    choose,
    tier_of,
)
from holdfast.snapshot.resume.elastic import OtherWorld, ask_idle, check_change
from holdfast.snapshot.resume.entering import (
    ask_persisted_runs,
    check_not_at_work,
    check_nothing_is_left,
    exchange,
    reach_of,
    ways_out,
    what_is_persisted,
)
from holdfast.snapshot.state.adapter import Adapter

log = get_log(__name__)


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
        StateMismatch: the snapshot does not fit the job. Nothing was written on any rank.
        Unrecoverable: see `plan_restore` and `check_required`; or every copy turned out to be damaged, and tensors may
            be filled in part.
        ConfigError: another block of the script is held, see `check_order` and `check_block`.
        ConfigError, PlaceError: see `RestoreAttempts.choose_persisted`, `snapshot.resume.choice.agree`.
        Repeated: see `check_repeats`. Nothing was changed anywhere.
    """
    clock = {"enter": client.system.monotonic()}
    block = describe(options.block if options is not None else 1, adapter)
    start = _Starting(client, agreement, adapter.coordinate(), options, block, elastic)
    failure: HoldfastError | None = None
    while True:
        restored, plan = start.decide(failure)
        restored.clock = clock
        clock["plan"] = client.system.monotonic()
        if plan is None:
            clock["fetch"] = clock["load"] = clock["plan"]
            return restored
        failpoint("restore.before", plan.snapshot.step)
        attempt = start.attempt(plan, restored)
        failure = agreement.patiently(partial(failure_of, attempt.recover, HoldfastError))
        verdict = agree_on(agreement, failure, (StateMismatch,))  # a `ConfigError` is the SMP's: another try may help
        refuse_misfit(verdict, failure)
        if verdict.whole:
            clock["fetch"] = client.system.monotonic()
            failure, verdict = load(attempt, agreement, adapter, engine)
        if verdict.whole:
            clock["load"] = client.system.monotonic()
            start.succeeded(plan, restored, protect)
            return restored
        start.failed(plan, failure, verdict)


@dataclass(eq=False)
class _Starting:
    """How all ranks decide, alike, what to restore; they decide again after every attempt that failed."""

    _client: SmpClient
    _agreement: Agreement
    _coord: str
    _options: StartOptions | None
    _block: ScriptBlock
    _elastic: bool
    _course: RestoreAttempts = field(default_factory=RestoreAttempts)
    _unacknowledged: set[SnapshotId] = field(default_factory=set)
    _joined: bool = False
    _looked_again: bool = False
    _stored: int = 0

    def decide(self, failure: HoldfastError | None) -> tuple[Restored, RestorePlan | None]:
        """Ask all SMPs, choose, and fence every older writer on every node. A collective call. Raises as `restore`.

        Args:
            failure: why the last attempt failed on this rank.

        Returns:
            How this rank starts, as far as that is known; and the plan, or None to restore nothing.
        """
        client, agreement = self._client, self._agreement
        entered = exchange(client, agreement, self._coord, self._options)
        everyone, self._coords, self._agreed = entered.inventories, entered.coords, entered.options
        if self._elastic:
            everyone += ask_idle(client, agreement, everyone)
        if not self._joined:
            persisted = ask_persisted_runs(client, agreement)
            self._stored = persisted.epoch
            self._reach = reach_of(everyone, persisted.runs, self._agreed)
            check_not_at_work(client, agreement, persisted, self._reach)
        self._inventories = inventories = own_inventories(everyone, self._reach.run)
        if not self._joined:
            self._streak = check_repeats(inventories, self._agreed)
            check_order(inventories, self._block)
            self._choice = choose(inventories, self._agreed)
            self._finished = steps_finished(inventories)
        self._unacknowledged.update(*(inventory.never_acknowledged for inventory in inventories))
        plan, lost = self._in_memory()
        if lost is not None and not self._joined and not self._looked_again:
            # The SMPs may have regrouped between their answers, so that these do not fit together. No regrouping begins
            # once a trainer is connected, so the answers to a second look do fit.
            self._looked_again = True
            log.info("SMPs are asked once more what they hold: %s", lost)
            return self.decide(failure)
        if plan is None:
            plan = self._in_storage(lost, failure)
        check_required(plan, self._agreed, {each.node for each in everyone}, self._course.passed_over)
        if plan is not None and self._is_resharded(plan):
            check_change(plan.sources.layout.coords, self._coords)
        drawn, now_s = entered.drawn, entered.now_s
        run = self._reach.begun(drawn, now_s) if plan is None else self._reach.continued(now_s)
        # Above what is only on storage, too: it may be of other nodes, which went on with this run and come back later.
        epoch = next_epoch(max(self._stored, *(inv.epoch for inv in everyone)), drawn)
        newcomers: set[Address] = set()
        if plan is not None and not plan.sources.persisted:
            known = {node.control for node in plan.sources.layout.nodes}
            newcomers = {inventory.control for inventory in everyone} - known
        base = plan.snapshot.step if plan is not None else 0
        client.join(epoch, Start(epoch, base, self._streak, self._choice, tuple(sorted(newcomers)), run, self._block))
        self._joined = True
        agreement.everywhere()  # every older writer is fenced on every node before anyone goes on
        return Restored(epoch, run, plan.snapshot if plan is not None else None), plan

    def _in_memory(self) -> tuple[RestorePlan | None, Unrecoverable | None]:
        """What to restore from memory; else, if memory held anything, why it cannot be restored."""
        course, coords = self._course, None if self._elastic else self._coords
        if course.given_up:
            return None, Unrecoverable(course.given_up)
        try:
            hopeless = course.hopeless(self._unacknowledged)
            return plan_restore(self._inventories, coords, hopeless, self._choice, course.incomplete), None
        except Unrecoverable as error:
            return None, error

    def _in_storage(self, lost: Unrecoverable | None, failure: HoldfastError | None) -> RestorePlan | None:
        """What to restore from storage; None: start from nothing. A collective call."""
        course, reach = self._course, self._reach
        if self._choice is not None:
            raise lost or Unrecoverable(f"{self._choice.snapshot} was chosen, and nothing of it is held") from failure
        run = reach.run.id if reach.run is not None else ""
        course.note(f"memory: {lost or 'no SMP that answers holds a snapshot'}")
        texts = self._agreement.gather(encode_json(what_is_persisted(self._client)))  # as every rank's SMP sees it
        answers = [decode_json(Persisted, text, "what is persisted") for text in texts]
        while (snapshot := course.choose_persisted(answers, run)) is not None:
            layout: Layout | None = None
            problem = "another rank cannot see it"
            try:
                layout = self._client.persisted_layout(run, snapshot)
            except HoldfastError as error:
                problem = str(error)
            if self._agreement.everywhere(layout is not None) and layout is not None:
                return plan_persisted(snapshot, layout, self._coords)
            course.passed(snapshot, problem)
        if lost is not None:
            tried = "; ".join(course.passed_over) if course.persisted_failures else str(lost)
            raise Unrecoverable(f"{tried}. {ways_out(reach)}") from failure
        check_nothing_is_left(reach, course.passed_over)
        return None

    def _is_resharded(self, plan: RestorePlan) -> bool:
        return set(plan.sources.layout.coords) != set(self._coords)

    def attempt(self, plan: RestorePlan, restored: Restored) -> Attempt:
        world = OtherWorld if self._is_resharded(plan) else SameWorld
        return world(self._client, plan.sources, self._coords, self._coord, self._block, restored)

    def failed(self, plan: RestorePlan, failure: HoldfastError | None, verdict: Verdict) -> None:
        why = str(failure or "another rank failed; see its log")
        self._course.failed(plan, why, damaged=not verdict.unspoilt, complete=verdict.complete)
        text = "recovery of %s is tried again: %s" if verdict.complete else "%s is passed over: %s"
        log.warning(text, plan.snapshot, why, extra=about(plan.snapshot))

    def succeeded(self, plan: RestorePlan, restored: Restored, protect: bool) -> None:
        """Complete `restored`, once the attempt has succeeded on all ranks, and have lost parity repaired."""
        inventories, coords = self._inventories, self._coords
        restored.protected = _known_to_be_protected(plan, inventories)
        restored.only_sealed = plan.sources.persisted or plan.snapshot in self._unacknowledged
        # Otherwise parity stays as it is: the restored snapshot is kept until a younger one is protected.
        if not self._is_resharded(plan) and (protect or not restored.only_sealed):
            restored.order_repairs = partial(repair_parity, self._client, plan, coords, self._coord)
            restored.order_repairs()
        _say_what_is_lost(plan, inventories, self._course)
        if self._agreement.rank == 0:
            self._reach.say_others()
        older = self._choice is not None or bool(self._course.incomplete)  # than the newest that is held
        held = sorted(whole_snapshots(inventories)) if older or self._agreed.generations > 1 else []
        restored.tier = tier_of(plan, inventories, coords)
        restored.passed_over = tuple(self._course.passed_over)
        restored.earlier = tuple(snapshot for snapshot in held if snapshot < plan.snapshot)
        restored.abandoned = tuple(snapshot for snapshot in held if older and snapshot > plan.snapshot)
        if self._finished is not None:
            restored.steps_again = max(0, self._finished - plan.snapshot.step)


def _known_to_be_protected(plan: RestorePlan, inventories: Sequence[Inventory]) -> SnapshotId | None:
    """The newest snapshot known to be protected: the restored one, if its parity is whole or an SMP was told so; or an
    older one."""
    if plan.sources.persisted:
        return None  # memory holds nothing that can be restored
    known = {inventory.protected for inventory in inventories if inventory.protected is not None}
    if not plan.repair:
        known.add(plan.snapshot)
    return max((snapshot for snapshot in known if snapshot <= plan.snapshot), default=None)


def _say_what_is_lost(plan: RestorePlan, inventories: Sequence[Inventory], course: RestoreAttempts) -> None:
    for reason in course.passed_over:
        log.warning("passed over: %s", reason, extra=about(plan.snapshot))
    protected = newest_protected(inventories)
    if not plan.sources.persisted and (protected not in course.incomplete or protected <= plan.snapshot):
        return
    after = f"steps after it, up to {protected}, which was protected, are lost" if protected else "later steps are lost"
    which = "was persisted" if plan.sources.persisted else "is older"
    log.error("going back to %s, which %s: %s", plan.snapshot, which, after, extra=about(plan.snapshot))


def repair_parity(client: SmpClient, plan: RestorePlan, coords: dict[str, str], coord: str) -> bool:
    """Have lost parity recomputed on the node that took the lost node's place. Returns whether this rank has ordered
    any of it."""
    layout = plan.sources.layout
    mine = [part for part in plan.repair if parity_repairer(layout, *part) == coord and coords[coord] == client.node]
    for group, position in mine:
        client.repair_parity(plan.sources, group, position)
    return bool(mine)
