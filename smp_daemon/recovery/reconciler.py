"""Makes what an SMP holds what the layout wants it to hold (`smp_daemon.recovery.reconcile`).

Nobody waits for a *wish*: that the node hold again what a dead predecessor held, or parity that a lost node had. A
thread tries it until it has come true, or nobody wants it any more. Of an *order*, a node's part in a regrouping, the
node in charge hears how it ended; it then plans again, since others may hold something else by now.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.recovery.rebuild import recover, repair_parity, repair_units
from holdfast.smp_daemon.recovery.reconcile import Stage, Task, lacking
from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.errors import (
    DamagedSnapshot,
    HoldfastError,
    ProtocolError,
    SmpUnavailable,
    StaleEpoch,
    Unrecoverable,
)
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.identity import epoch_text
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import Adopt, Encode, Obeyed, Phase, Release
from holdfast.smp_daemon.shared.plan import choose_sources
from holdfast.smp_daemon.shared.settings import REJOIN
from holdfast.smp_daemon.shared.sources import Sources, as_laid_out
from holdfast.smp_daemon.storage.holdings import Key, ParityKey, ShardKey
from holdfast.smp_daemon.storage.store import Store

FIRST_S, MOST_S = 0.5, 5.0
"""First and longest pause between two attempts. The pause doubles after each attempt."""

ATTEMPTS = 3
"""Number of attempts that must fail for want of units, although all holders answered, before parity is hopeless. One
is not enough: bytes may also be damaged on their way."""

ANSWER_S = 10.0
"""How long an order is waited for before the node in charge is told how far it is."""

MOST_ORDERS = 8
"""Most orders whose end was not told that are kept."""

STAGES = {Adopt: Stage.SHARDS, Encode: Stage.PARITY, Release: Stage.RELEASE}

GoOn = Callable[[], None]
"""Called before each unit; raises `StaleEpoch` if the work is not wanted any more."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Wish:
    """What this node is to hold.

    Attributes:
        name: for messages.
        epoch: in which it was wished. A newer one has wishes of its own.
        work: makes one attempt. Returns False if others that hold the rest may come back.
        parity: this parity is wished, from sources that do not change; None: anything else.
    """

    name: str
    epoch: int
    work: Callable[[GoOn], bool]
    parity: ParityKey | None = None


@dataclass(eq=False, slots=True)
class Order:
    """A node's part in one phase of a regrouping. The thread that carries it out writes `error`, and then sets
    `ended`."""

    phase: Phase
    ended: threading.Event
    error: Exception | None = None


class Reconciler:
    """The reconciler of one SMP. Thread-safe."""

    def __init__(self, store: Store, method: str) -> None:
        """`method`: how lost shards are computed, see `rebuild.recover`."""
        self._store = store
        self._method = method
        self._network = store.network
        # Guarded by the store's lock: how far the parity is that was ordered in the store's epoch; the orders whose
        # end was not told yet; and the newest order, the only one that is carried out.
        self._parities: dict[tuple[int, ParityKey], RepairState] = {}
        self._orders: list[Order] = []
        self._current: Order | None = None
        self._closed = False
        self._episodes = Episodes(log)

    def rejoin(self) -> None:
        """Bring this node back to everything its group counts on, unless it holds nothing or ``HOLDFAST_REJOIN`` is 0.

        The predecessor may have died while it repaired a unit, received a shard or computed parity again. What is
        missing is recovered, and what the predecessor left is verified and mended, for the newest snapshot held here
        and the newest that the job knows to be protected. Returns at once.
        """
        if self._store.holdings.held() and REJOIN.value():
            self._begin(Wish("what the last SMP held", self._store.state.epoch, self._rejoin))

    def order_parity(self, sources: Sources, group: int, position: int) -> None:
        """Get the parity of that position, and post on the board how far that is. Returns at once; does nothing if it
        was ordered in this epoch before."""
        key = ParityKey(sources.snapshot, sources.layout.tag(group), position)
        with self._store.changed:
            epoch = self._store.state.epoch
            if (epoch, key) in self._parities:
                return
            self._parities = {each: state for each, state in self._parities.items() if each[0] == epoch}
            wish = Wish(str(key), epoch, partial(self._bring_parity, key, sources), key)
            self._post(wish, RepairState.UNDER_WAY)
        try:
            self._begin(wish)
        except RuntimeError:  # no thread can be started; who ordered it may order it again
            with self._store.changed:
                self._parities.pop((epoch, key), None)
            raise

    def close(self) -> None:
        """Begin nothing more, and end what is under way before its next unit. Returns at once."""
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()

    # ------------------------------------------------------------------ wishes

    def _begin(self, wish: Wish) -> None:
        self._network.Thread(target=self._run, args=(wish,), name="reconcile", daemon=True).start()

    def _run(self, wish: Wish) -> None:
        in_vain, pause_s = 0, FIRST_S
        snapshot = wish.parity.snapshot if wish.parity is not None else None
        extra = about(snapshot)
        while not self._is_over(wish):
            try:
                if wish.work(partial(self._go_on, wish)):
                    self._episodes.end(wish.name, "this node holds %s again", wish.name, extra=extra)
                    self._post(wish, RepairState.WHOLE)
                    return
            except HoldfastError as error:
                if self._is_over(wish):
                    break
                level = logging.WARNING if snapshot is None or self._is_relied_on(snapshot) else logging.INFO
                text = "this node does not hold %s yet: %s"
                self._episodes.begin(wish.name, text, wish.name, error, level=level, extra=extra)
                in_vain += isinstance(error, Unrecoverable | DamagedSnapshot)
                if wish.parity is not None and in_vain >= ATTEMPTS:  # its sources stay what they are
                    self._post(wish, RepairState.HOPELESS)
                    return
            with self._store.changed:
                # The group may send the units of this parity meanwhile.
                self._store.changed.wait_for(
                    lambda: self._is_over(wish) or bool(wish.parity and self._store.holdings.holds(wish.parity)),
                    pause_s,
                )
            pause_s = min(2 * pause_s, MOST_S)
        log.info("nobody waits for %s any more", wish.name, extra=extra)

    def _is_relied_on(self, snapshot: SnapshotId) -> bool:
        """Whether every node still keeps a snapshot, so that bytes of it that are missing are worth a warning.

        One that nobody was promised gives its slots to the next one, on some nodes before others. So does one that was,
        once the whole job knows a newer one to be protected. Others may act on that minutes before this node hears it;
        but first this node posted its own part of the newer one as protected.
        """
        store = self._store
        is_promised = store.state.protected is None or snapshot <= store.state.protected
        return is_promised and not store.outcomes.board.supersedes(*snapshot)

    def _is_over(self, wish: Wish) -> bool:
        given_up = wish.parity is not None and self._store.outcomes.is_given_up(wish.parity.snapshot)
        return self._closed or given_up or wish.epoch != self._store.state.epoch

    def _go_on(self, wish: Wish) -> None:
        if self._is_over(wish):
            raise StaleEpoch(f"nobody waits for {wish.name} any more")

    def _post(self, wish: Wish, state: RepairState) -> None:
        with self._store.changed:
            if wish.parity is not None and wish.epoch == self._store.state.epoch:
                self._parities[wish.epoch, wish.parity] = state
                self._store.outcomes.board.post_repair(min(self._parities.values()))

    def _bring_parity(self, key: ParityKey, sources: Sources, go_on: GoOn) -> bool:
        if not self._store.holdings.holds(key):  # the group may have sent its units meanwhile
            self._carry_out(Task(Stage.PARITY, key), sources, go_on)
        return True

    def _rejoin(self, go_on: GoOn) -> bool:
        failpoint("rejoin.before")
        store = self._store
        newest = max((key.snapshot for key in store.own_keys()), default=None)
        snapshots = sorted({snapshot for snapshot in (newest, store.state.protected) if snapshot is not None})
        whole = self._bring_back(snapshots, go_on)  # first what is missing, which is known without reading
        store.holdings.verify(lambda count: go_on(), snapshots)
        if not (whole and self._bring_back(snapshots, go_on)):
            return False
        failpoint("rejoin.done")
        return True

    def _bring_back(self, snapshots: Sequence[SnapshotId], go_on: GoOn) -> bool:
        """Recover what is missing of these snapshots. Returns whether all that can be recovered is here. False: SMPs
        that hold the rest may come back."""
        store, whole = self._store, True
        for snapshot in snapshots:
            go_on()
            with store.changed:
                layouts = [layout for layout in store.arena.layouts.values() if layout.epoch == snapshot.epoch]
            if not layouts:
                continue
            newest = max(layouts, key=lambda each: each.revision)
            if not self._lacks(Sources(snapshot, newest, {}, {})):
                continue
            sources = choose_sources(
                gather_inventories(store.job, addresses_of(layouts), layouts, store.network), snapshot
            )
            if sources is None:
                whole = False
                continue
            # Else it was to be sealed only.
            encoded = snapshot == store.state.protected or any(sources.parities.values())
            try:
                for task in self._lacks(sources):
                    if encoded or task.stage is not Stage.PARITY:
                        go_on()
                        self._carry_out(task, sources, go_on)
            except Unrecoverable as error:
                if snapshot == store.state.protected and self._is_relied_on(snapshot):
                    raise
                log.info("%s cannot be recovered: %s", snapshot, error, extra=about(snapshot))
        return whole

    def _lacks(self, sources: Sources) -> list[Task]:
        """What no node holds, and this one should. It frees nothing: only the node in charge of a regrouping knows when
        all nodes have parity in their new groups."""
        found = lacking(sources.layout, self._store.node, sources.snapshot, self._held(sources.snapshot), sources)
        return [task for task in found if task.stage < Stage.RELEASE]

    # ------------------------------------------------------------------ orders

    def obey(self, phase: Phase) -> Obeyed:
        """Carry out this node's part of a phase of a regrouping. Blocks until it is done, or for `ANSWER_S`: whoever
        gave the order says the same again to wait on. Another order ends it.

        Raises:
            StaleEpoch: trainers have begun a new epoch, in which they arrange their nodes themselves; or another order
                has come.
            ProtocolError: the layout is not of this job and the snapshot's epoch, or does not name this node; or an
                earlier phase is not done here.
            HoldfastError: the phase failed.
        """
        changed = self._store.changed
        with changed:
            known = next((each for each in self._orders if each.phase == phase), None)
            order = Order(phase, self._network.Event()) if known is None else known
            if known is None:
                self._orders = [*self._orders[1 - MOST_ORDERS :], order]
                self._current = order
        if known is None:
            try:
                self._network.Thread(target=self._carry_out_order, args=(order,), name="phase", daemon=True).start()
            except RuntimeError as error:
                order.error = SmpUnavailable(f"node {self._store.node!r} cannot start a thread: {error}")
                order.ended.set()
        if not order.ended.wait(ANSWER_S):
            return Obeyed(done=False, moved=self._store.outcomes.board.moves)
        with changed:  # whoever says the same again wants it done again
            self._orders = [each for each in self._orders if each is not order]
        if order.error is not None:
            raise order.error
        return Obeyed(done=True, moved=self._store.outcomes.board.moves)

    def _carry_out_order(self, order: Order) -> None:
        phase = order.phase
        try:
            failpoint(f"regroup.{type(phase).__name__.lower()}", phase.sources.snapshot.step)
            self._carry_out_phase(phase, partial(self._next_unit, order))
            if isinstance(phase, Release):
                self._store.counters.add(regroups=1)
                failpoint("regroup.done", phase.sources.snapshot.step)
        except Exception as error:
            order.error = error
            if not isinstance(error, HoldfastError):
                raise
        finally:
            order.ended.set()

    def _next_unit(self, order: Order) -> None:
        self._store.state.check_epoch(order.phase.epoch)
        if self._closed or self._current is not order:
            raise StaleEpoch("the SMP ends, or another order has come")

    def _carry_out_phase(self, phase: Phase, go_on: GoOn) -> None:
        store, layout, snapshot, stage = self._store, phase.layout, phase.sources.snapshot, STAGES[type(phase)]
        store.state.check_epoch(phase.epoch)
        if layout.job != store.job or not layout.epoch == phase.sources.layout.epoch == snapshot.epoch <= phase.epoch:
            raise ProtocolError(
                f"a layout of job {layout.job!r} in epoch {epoch_text(layout.epoch)} is not for {snapshot}"
            )
        layout.node(store.node)
        with store.changed:
            store.state.check_epoch(phase.epoch)
            if stage is Stage.SHARDS:
                store.state.keep_layout(layout)
            elif store.arena.layouts.get((layout.epoch, layout.revision)) != layout:
                raise ProtocolError(f"node {store.node!r} has adopted no such layout: it does nothing for it")
        # Before anything is encoded from them, all shards are read; so none counts as held.
        held = self._held(snapshot) if stage is not Stage.SHARDS else {}
        todo = lacking(layout, store.node, snapshot, held)
        for task in todo:
            if Stage.SHARDS <= task.stage < stage:
                raise ProtocolError(f"{task.key} is yet to be brought here: nothing that depends on it is done")
        sources = phase.sources if stage is Stage.SHARDS else as_laid_out(snapshot, layout)
        for task in todo:
            if task.stage is stage:
                go_on()
                self._carry_out(task, sources, go_on)

    # ------------------------------------------------------------------ tasks

    def _held(self, snapshot: SnapshotId) -> dict[Key, list[int]]:
        holdings = self._store.holdings
        return {key: holdings.known_damage(key) for key in holdings.held() if key.snapshot == snapshot}

    def _carry_out(self, task: Task, sources: Sources, go_on: GoOn) -> None:
        """Blocks while bytes travel, and holds no lock meanwhile. Raises as `go_on`, or as the task fails."""
        store, snapshot = self._store, sources.snapshot
        match task.stage, task.key:
            case Stage.MEND, key:
                repaired = repair_units(store, key, task.units)
                text, extra = "%s: %d of %d damaged units are repaired", about(snapshot, repaired=repaired)
                log.warning(text, key, repaired, len(task.units), extra=extra)
            case Stage.SHARDS, ShardKey(coord=coord):
                how = recover(store, sources, coord, self._method, go_on=go_on).how
                if how != "held":
                    text, extra = "%s of %s was missing or damaged and was %s", about(snapshot, coord=coord)
                    log.warning(text, coord, snapshot, how, extra=extra)
            case Stage.PARITY, ParityKey() as key:
                count = repair_parity(store, sources, key, go_on)
                log.info("%s is computed: %d bytes fetched", key, count, extra=about(snapshot, bytes=count))
            case Stage.RELEASE, key:
                with store.changed:
                    go_on()  # with the lock: once a newer epoch has begun, nothing of it is dropped
                    store.holdings.drop(key)
