"""What a node holds is moved: when it is lost and nobody replaces it, and before it is taken away.

Either is a regrouping, which `coding.regroup` plans. Each SMP pings the members of its group. An SMP that misses a
member for too long, or whose group has regrouped without it, asks for a regrouping. The first node of the layout that
answers is in charge. It does nothing while any trainer is connected anywhere: the job then runs, or is about to, and
arranges its nodes itself. An exception are trainers that hold still at the end of the job because a node leaves.

A node that is being drained reports that it is leaving, and asks for a regrouping, too. A failure on the way therefore
loses nothing: if another node is lost meanwhile, the plan is made again without it, and the loss of this node is a loss
like any other. Nothing is moved while the job trains: it would be out of date a step later. The trainers of this node
are told instead, through the board. All ranks then take a last snapshot at one boundary, hold still there until it is
moved, and end, so that the job goes on elsewhere and repeats nothing
(`snapshot.protecting.Protecting.end_if_agreed`).
"""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable, Collection

from holdfast.smp_daemon.coding.regroup import Drained, Regrouping, moved, plan_regroup
from holdfast.smp_daemon.net.peers import PeerClient
from holdfast.smp_daemon.recovery.inventories import AT_ONCE, addresses_of, gather_inventories
from holdfast.smp_daemon.recovery.reconcile import clutter
from holdfast.smp_daemon.shared.deadlines import Progress
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError, SmpUnavailable
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import Layout, Node
from holdfast.smp_daemon.shared.limits import move_deadline
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.messages import Enlist, Obeyed, Phase, Regroup
from holdfast.smp_daemon.shared.plain import from_plain
from holdfast.smp_daemon.shared.runs import given_up, own_inventories, runs_in_reach
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.starts import Start
from holdfast.smp_daemon.storage.holdings import ParityKey
from holdfast.smp_daemon.storage.store import Store

FIRST_S, MOST_S = 0.02, 1.0
"""First and longest pause between two attempts. The pause doubles after each attempt."""

PING_DEADLINE_S = 2.0
"""Timeout for a short answer of another SMP, in seconds: whoever asks has others to ask."""

LOOK_EVERY_S = 5.0
"""Pause between two looks at the group, in seconds, unless `regroup_after` asks for shorter ones."""

log = get_log(__name__)


def leave_on_signals(
    drain: Callable[[], Drained], stop: Callable[[], None], grace_s: float, told: Callable[[int], None]
) -> None:
    """Make SIGTERM call `drain`, then `stop`. `stop` is called after `grace_s` at the latest, or on a second SIGTERM.

    SIGINT calls `stop` at once. `told` is called with the number of each signal. The arena stays for a successor. Call
    this in the main thread. With a `grace_s` of 0, SIGTERM keeps its default action and kills the process.
    """

    def leave() -> None:
        try:
            drained = drain()
            log.warning("drained: %s is held whole by %s", drained.snapshot, ", ".join(drained.holders) or "nobody")
        except HoldfastError as error:
            log.warning("SIGTERM: not drained, the snapshots on this node stay in its arena: %s", error)
        finally:
            stop()

    def end(number: int, frame: object) -> None:
        told(number)
        stop()

    def begin(number: int, frame: object) -> None:
        told(number)
        signal.signal(signal.SIGTERM, end)
        limit = threading.Timer(grace_s, stop)
        limit.daemon = True
        limit.start()
        threading.Thread(target=leave, name="drain", daemon=True).start()

    signal.signal(signal.SIGINT, end)
    if grace_s:
        signal.signal(signal.SIGTERM, begin)


class Monitor:
    """The thread that watches the group, and the thread that leads regroupings.

    Args:
        after_s: how long a member may be missing before the survivors regroup without it; 0: they never do.
        trainers: returns the number of connections that trainers have to this SMP.
    """

    def __init__(self, store: Store, peers: PeerClient, after_s: float, trainers: Callable[[], int]) -> None:
        self._store = store
        self._network = network = store.network
        self._peers = peers
        self._after_s = after_s
        self.trainers = trainers
        self._closed = network.Event()
        self._wanted = network.Event()
        self._seen: dict[str, float] = {}
        self._declined = 0
        # Held for a whole regrouping, which talks to other nodes and may take minutes. The leading thread takes it, and
        # so does a thread that drains this node or another. It is the outermost lock: the store's lock is taken under
        # it, never the reverse. `_declined` is guarded by it. `_seen` belongs to the watching thread; other threads
        # only add or read single items. Any thread adds to `_spares`; only the lock's holder removes.
        self._regrouping_lock = network.Lock()
        self._spares: set[Address] = set()
        self._episodes = Episodes(log)
        if after_s:
            network.Thread(target=self._watch, name="monitor", daemon=True).start()
        network.Thread(target=self._lead, name="regroup", daemon=True).start()

    def close(self) -> None:
        """Stop both threads."""
        self._closed.set()
        self._wanted.set()

    # ------------------------------------------------------------------ watching

    def _watch(self) -> None:
        while not self._closed.wait(min(LOOK_EVERY_S, self._after_s / 5)):
            layout = self._store.state.newest_layout()
            if layout is None or layout.epoch != self._store.state.epoch or not layout.parity:
                continue
            try:
                if self._is_incomplete(layout) or self._is_cluttered(layout):
                    self._have_regrouped(layout, Regroup(job=layout.job), PING_DEADLINE_S)
                self._episodes.end("watch", "the group is watched again")
            except HoldfastError as error:
                self._episodes.begin("watch", "the group could not be watched: %s", error)

    def _is_incomplete(self, layout: Layout) -> bool:
        """Ping the members. Returns whether one is missing for too long, or has a newer revision of the layout."""
        group, _ = layout.place(self._store.node)
        members = layout.members(group)
        now = self._network.monotonic()
        behind = False
        for member in members:
            try:
                reply = self._peers.ping(member.control, PING_DEADLINE_S)
                self._seen[member.name] = self._network.monotonic()
                behind |= reply.epoch == layout.epoch and reply.revision > layout.revision
            except HoldfastError:
                self._seen.setdefault(member.name, now)
        return behind or any(now - self._seen[member.name] > self._after_s for member in members)

    def _is_cluttered(self, layout: Layout) -> bool:
        """Whether this node still holds old parity, because a regrouping was interrupted before its last phase."""
        held = self._store.own_keys()
        newest = max((key.snapshot for key in held), default=None)
        parities = (key for key in held if isinstance(key, ParityKey))
        return newest is not None and newest.epoch == layout.epoch and bool(clutter(parities, newest, layout))

    def leases(self) -> dict[str, float]:
        """How long ago each other member of the group was last heard of, in seconds."""
        layout, now = self._store.state.newest_layout(), self._network.monotonic()
        if layout is None or self._store.node not in {node.name for node in layout.nodes}:
            return {}
        group, _ = layout.place(self._store.node)
        others = [member.name for member in layout.members(group) if member.name != self._store.node]
        return {name: now - self._seen[name] for name in others if name in self._seen}

    # ------------------------------------------------------------------ a node leaves

    def move(self, spares: Collection[Address], deadline_s: float, *, still: bool) -> None:
        """Make the node in charge regroup now. Blocks until it has; another node has `deadline_s` for it.

        Args:
            spares: SMPs that no layout names yet, and that may take over shards.
            still: see `regroup`.

        Raises:
            SmpUnavailable: no node of the layout answers.
            HoldfastError: the regrouping failed, as the node in charge reports. Nothing that was held is lost.
        """
        layout = self._store.state.newest_layout()
        if layout is None:
            return
        request = Regroup(job=layout.job, leaving=True, spares=tuple(spares), still=still)
        self._have_regrouped(layout, request, deadline_s)

    def enlist(self, epoch: int, start: Start | None) -> None:
        """Join `epoch`, which `start` began, as a spare, so that this SMP can take part in a regrouping of its run.

        Raises:
            ConfigError: this SMP has trainers, which arrange their nodes themselves.
            StaleEpoch: this SMP has seen a newer epoch.
        """
        if self.trainers():
            raise ConfigError(f"{self._store.node} has trainers and is not a spare: name another, or stop them first")
        self._store.join(epoch, start)

    # ------------------------------------------------------------------ in charge

    def _have_regrouped(self, layout: Layout, request: Regroup, deadline_s: float) -> None:
        """Ask the first node of the layout that answers, which is in charge. Raises what it replies with."""
        for node in layout.nodes:
            if node.name == self._store.node:
                self.lead(request)
                return
            if self._answers(node):
                self._peers.ask(node.control, request, deadline_s)
                return
        raise SmpUnavailable(f"no node of the job's layout answers: {', '.join(node.name for node in layout.nodes)}")

    def _answers(self, node: Node) -> bool:
        """Whether an SMP answers soon: a silent one would be waited for as long as a regrouping may take."""
        extra = about(peer=node.name)
        try:
            self._peers.ping(node.control, PING_DEADLINE_S)
        except HoldfastError as error:
            text = "%s cannot lead a regrouping: %s"
            self._episodes.begin(node.name, text, node.name, error, level=logging.INFO, extra=extra)
            return False
        self._episodes.end(node.name, "%s can lead a regrouping again", node.name, extra=extra)
        return True

    def lead(self, request: Regroup) -> None:
        """This node is in charge: regroup now if a node is leaving, else soon, once for all requests until then."""
        self._spares.update(request.spares)
        if request.leaving:
            self.regroup(still=request.still)
        else:
            self._wanted.set()

    def _lead(self) -> None:
        while self._wanted.wait() and not self._closed.is_set():
            self._wanted.clear()
            try:
                self.regroup()
                self._episodes.end("regroup", "groups are complete again")
            except HoldfastError as error:
                text = "groups could not be regrouped; this is retried while it is needed: %s"
                self._episodes.begin("regroup", text, error)

    def regroup(self, *, still: bool = False) -> None:
        """Regroup if nodes are missing or leaving. Blocks until that is complete; one regrouping runs at a time.

        Args:
            still: the trainers that are connected hold still until this is done, and end then. Without that nothing is
                done while any trainer is connected: it would seal newer snapshots, and free what is being moved.

        Raises:
            HoldfastError: the regrouping failed. Nothing that was held is lost.
        """
        with self._regrouping_lock:
            self._regroup(still)

    def _regroup(self, still: bool) -> None:
        store = self._store
        with store.changed:
            layouts = [layout for layout in store.arena.layouts.values() if layout.epoch == store.state.epoch]
        if not layouts:
            return
        self._enlist_spares()
        addresses = {*addresses_of(layouts), *self._spares}
        inventories = gather_inventories(store.job, sorted(addresses), layouts, self._network)
        if not still and any(inventory.trainers for inventory in inventories):
            text = "nodes are missing, but trainers are connected: no regrouping"
            self._episodes.begin("declined", text, level=logging.INFO)
            self._declined += 1
            failpoint("regroup.declined", self._declined)
            return
        self._episodes.end("declined", "no trainer is connected any more")
        present = [inventory for inventory in inventories if inventory.epoch == store.state.epoch]
        regrouping = plan_regroup(own_inventories(present, store.state.run))
        if regrouping is None:
            return
        extra = about(regrouping.snapshot, revision=regrouping.layout.revision)
        log.warning("regrouping for %s on %s", regrouping.snapshot, ", ".join(regrouping.nodes), extra=extra)
        failpoint("regroup.planned", regrouping.snapshot.step)
        sources, layout = regrouping.sources, regrouping.layout
        for phase in regrouping.phases:
            # A barrier: parity is computed from shards that other nodes have just taken over, and the old parity is all
            # that protects the snapshot until the new one is whole on every node. So whichever node fails, and when,
            # either the old groups can still lose what they could, or the new ones can.
            self._everywhere(regrouping, phase(job=store.job, epoch=store.state.epoch, sources=sources, layout=layout))

    def _enlist_spares(self) -> None:
        for address in sorted(self._spares):
            try:
                store = self._store
                message = Enlist(job=store.job, epoch=store.state.epoch, start=store.state.record.start)
                self._peers.ask(address, message, PING_DEADLINE_S)
            except HoldfastError as error:
                log.warning("%s:%d is not a spare: %s", *address, error)
                self._spares.discard(address)

    def _everywhere(self, regrouping: Regrouping, message: Phase) -> None:
        """Give all nodes of a regrouping an order in parallel, and wait. Raises the first error of any node, or
        `DeadlineExceeded` if one does not answer or moves nothing any more."""

        def ask(name: str) -> None:
            node, moved = regrouping.layout.node(name), 0
            progress = Progress(self._network.monotonic, move_deadline(node.state_bytes))
            while not (reply := from_plain(Obeyed, self._peers.ask(node.control, message), "how far a node is")).done:
                if reply.moved != moved:
                    moved = reply.moved
                    progress.moved()
                elif progress.is_stuck:
                    raise DeadlineExceeded(f"{name} gets no further with its part of the regrouping")

        with self._network.Pool(max(AT_ONCE, len(regrouping.nodes)), "regroup") as pool:
            try:
                given = [pool.submit(ask, name) for name in regrouping.nodes]
            except RuntimeError as error:
                raise SmpUnavailable(f"{self._store.node} cannot give its orders: {error}") from error
            for done in given:
                done.result()


class Draining:
    """The drain of one SMP. Thread-safe: several threads may call `run` and `hand_over`, and each waits until the node
    is drained."""

    def __init__(self, store: Store, inventory: Callable[[], Inventory], monitor: Monitor) -> None:
        """
        Args:
            inventory: returns what this node holds now.
            monitor: makes the job's nodes regroup without this one.
        """
        self._store = store
        self._network = network = store.network
        self._inventory = inventory
        self._monitor = monitor
        self._ended = network.Event()
        # Changed under `_lock`, since gRPC threads, trainers' connections and the SIGTERM thread do; replaced whole, so
        # reading needs no lock: how many of these are at work, the spares that any of them has named, and, in a tuple,
        # the start since which nothing here is needed, which may be None; an empty tuple: the node is needed.
        self._running = 0
        self._spares: frozenset[Address] = frozenset()
        self._drained_in: tuple[Start | None, ...] = ()
        self._lock = network.Lock()

    @property
    def leaving(self) -> bool:
        """Whether this node is being drained, or has been and no later start has trainers here."""
        return self._running > 0 or self._drained_in == (self._store.state.record.start,)

    def end(self) -> None:
        """The SMP is stopping: make `run` return soon, with an error unless the node is drained."""
        self._ended.set()

    def run(self, deadline_s: float, spares: Collection[Address], *, wait: bool) -> Drained:
        """Move what this node holds to other nodes. Blocks until it is whole and protected there, and no trainer is
        connected here.

        Meanwhile this node reports that it is leaving. It goes on doing so after success, but not after a failure.

        Args:
            spares: SMPs of this job that no layout names yet. They are filled first.
            wait: wait for connected trainers to end, instead of asking them to.

        Raises:
            ConfigError: no other SMP answers, or the job was started again with this node.
            DeadlineExceeded: the node was not drained in time, or the SMP stops. The message gives the last reason,
                such as that the newest protected snapshot is not whole and this node is needed for it.
        """
        with self._lock:
            self._spares |= frozenset(spares)
        start = self._store.state.record.start

        def attempt(limit: float) -> Drained | str:
            mine = self._inventory()
            if mine.trainers and not wait and mine.record.start != start:
                raise ConfigError(f"the job was started again with {mine.node}: start it without that node, then drain")
            if mine.trainers and not any(epoch == mine.epoch for epoch, _ in mine.layouts):
                return "the job has only just begun, and its nodes do not know each other yet"
            found = self._attempt(limit, still=False)
            if not self._inventory().trainers:
                return found
            if not wait:
                self._store.outcomes.say_leaving(start, True)
            return f"trainers are connected to {self._store.node}, and have not ended yet"

        try:
            return self._until(deadline_s, attempt)
        except BaseException:
            self._store.outcomes.say_leaving(start, False)
            raise

    def hand_over(self, deadline_s: float) -> None:
        """Like `run`, for trainers of this node: those of the whole job hold still until this returns, and end then.

        Raises:
            ConfigError, DeadlineExceeded: see `run`.
        """
        self._until(deadline_s, lambda limit: self._attempt(limit, still=True))

    def _until(self, deadline_s: float, attempt: Callable[[float], Drained | str]) -> Drained:
        """Repeat an attempt until it succeeds. It is called with the time at which that must be, and returns or raises
        why it has not succeeded yet."""
        limit, last, pause_s = self._network.monotonic() + deadline_s, "", FIRST_S
        start = self._store.state.record.start
        with self._lock:
            self._running += 1
        try:
            while True:
                try:
                    found = attempt(limit)
                    if isinstance(found, Drained):
                        with self._lock:
                            self._drained_in = (start,)
                        return found
                    last = found
                except ConfigError:
                    raise
                except HoldfastError as error:
                    last = str(error)
                    log.warning("the drain failed and is retried: %s", error)
                if self._network.monotonic() > limit or self._ended.wait(pause_s):
                    raise DeadlineExceeded(f"{self._store.node} could not be drained in time: {last}")
                pause_s = min(2 * pause_s, MOST_S)
        finally:
            with self._lock:
                self._running -= 1

    def _attempt(self, limit: float, *, still: bool) -> Drained | str:
        """Move what is still to be moved, if nothing prevents it. Returns what others hold if this node is not needed
        any more, else why it is. `still`: the trainers that are connected hold still."""
        mine = self._inventory()
        answers = self._everywhere(mine)
        over = mine.run is not None and mine.run.id in given_up(answers, runs_in_reach(answers))
        inventories = own_inventories(answers, None if over else mine.run)  # of a run that is over, nothing is needed
        result = moved(inventories)
        if result is not None:
            return result
        if all(inventory.leaving for inventory in inventories):
            raise ConfigError(
                f"no other SMP of job {self._store.job!r} answers that could take over what {mine.node} holds: start "
                "one on another node and name it as a spare (--to HOST:PORT)"
            )
        trained = sorted(inventory.node for inventory in inventories if inventory.trainers)
        if trained and not still:
            return f"trainers are connected to {', '.join(trained)}, and no snapshot is whole without {mine.node} yet"
        self._monitor.move(self._spares, max(1.0, limit - self._network.monotonic()), still=still)
        return f"what {mine.node} holds was moved just now, and it is yet to be seen whether that is all"

    def _everywhere(self, mine: Inventory) -> list[Inventory]:
        """The inventories of all SMPs that answer. Those of nodes that came later are known only to others."""
        found, asked = [mine], {mine.control}
        layouts = dict(mine.layouts)
        while new := {*addresses_of(layouts.values()), *self._spares} - asked:
            asked |= new
            found += gather_inventories(self._store.job, sorted(new), layouts.values(), self._network)
            for each in found:
                layouts |= each.layouts
        return found
