"""Draining: before a node is taken away, its data is moved to the nodes that stay, which then protect it.

Moving is a regrouping (`coding.regroup`) in which this node reports that it is leaving. A failure on the way therefore
loses nothing: if another node is lost meanwhile, the plan is made again without it, and the loss of this node is a loss
like any other.

Nothing is moved while the job trains: it would be out of date a step later. The trainers of this node are told instead,
through the board. All ranks then take a last snapshot at one boundary, hold still there until it is moved, and end, so
that the job goes on elsewhere and repeats nothing (`snapshot.protecting.Protecting.end_if_agreed`).
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from holdfast.smp_daemon.coding.regroup import Drained, moved
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.runs import given_up, own_inventories, runs_in_reach
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.starts import Start
from holdfast.smp_daemon.shared.system import Network
from holdfast.smp_daemon.storage.store import Store

FIRST_S, MOST_S = 0.02, 1.0
"""First and longest pause between two attempts. The pause doubles after each attempt."""

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


class Mover(Protocol):
    """`Monitor.move`."""

    def __call__(self, spares: Collection[Address], deadline_s: float, *, still: bool) -> None: ...


class Draining:
    """The drain of one SMP. Thread-safe: several threads may call `run` and `hand_over`, and each waits until the node
    is drained."""

    def __init__(
        self,
        store: Store,
        network: Network,
        inventory: Callable[[], Inventory],
        move: Mover,
    ) -> None:
        """
        Args:
            inventory: returns what this node holds now.
            move: makes the job's nodes regroup without this one. Blocks.
        """
        self._store = store
        self._network = network
        self._inventory = inventory
        self._move = move
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
                self._store.say_leaving(start)
            return f"trainers are connected to {self._store.node}, and have not ended yet"

        try:
            return self._until(deadline_s, attempt)
        except BaseException:
            self._store.say_staying()
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
        """Move what is still to be moved, if nothing prevents it.

        Args:
            still: the trainers that are connected hold still.

        Returns:
            What others hold if this node is not needed any more, else why it is.

        Raises:
            HoldfastError: moving failed.
        """
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
        self._move(self._spares, max(1.0, limit - self._network.monotonic()), still=still)
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
