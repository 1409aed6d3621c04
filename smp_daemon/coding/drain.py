"""Draining: before a node is taken away, its data is moved to the nodes that stay, which then protect it.

Moving is a regrouping (`coding.regroup`) in which this node reports that it is leaving. A failure on the way therefore
loses nothing: if another node is lost meanwhile, the plan is made again without it, and the loss of this node is a loss
like any other. Nothing is moved while trainers are connected anywhere, since they arrange their nodes themselves.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.smp_daemon.coding.regroup import moved
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.runs import given_up, own_inventories, runs_in_reach
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import Network

FIRST_S, MOST_S = 0.02, 1.0
"""First and longest pause between two attempts. The pause doubles after each attempt."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """The result of draining `node`, which may now be taken away.

    Attributes:
        snapshot: the snapshot that the other nodes hold whole; None: there was nothing to move.
        holders: names of the nodes that hold its shards.
        tolerates: how many more nodes may be lost, whichever they are.
    """

    node: str
    snapshot: SnapshotId | None
    holders: tuple[str, ...]
    tolerates: int


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


class Draining:
    """The drain of one SMP. Thread-safe: several threads may call `run`, and each waits until the node is drained."""

    def __init__(
        self,
        job: str,
        network: Network,
        inventory: Callable[[], Inventory],
        move: Callable[[Collection[Address], float], None],
    ) -> None:
        """
        Args:
            inventory: returns what this node holds now.
            move: called with spares and a timeout in seconds; makes the job's nodes regroup without this one. Blocks.
        """
        self._job = job
        self._network = network
        self._inventory = inventory
        self._move = move
        self._ended = network.Event()
        self._running = 0
        self._lock = network.Lock()  # guards `_running`, which gRPC threads and the SIGTERM thread change

    @property
    def leaving(self) -> bool:
        """Whether this node is being drained, or has been."""
        return self._running > 0

    def end(self) -> None:
        """The SMP is stopping: make `run` return soon, with an error unless the node is drained."""
        self._ended.set()

    def run(self, deadline_s: float, spares: Collection[Address], *, wait: bool) -> Drained:
        """Move what this node holds to other nodes. Blocks until it is whole and protected there.

        Meanwhile this node reports that it is leaving. It goes on doing so after success, but not after a failure.

        Args:
            spares: SMPs of this job that no layout names yet. They are filled first.
            wait: wait for connected trainers to leave, instead of refusing.

        Raises:
            ConfigError: trainers are connected and `wait` is false, or no other SMP answers.
            DeadlineExceeded: the node was not drained in time, or the SMP stops. The message gives the last reason,
                such as that the newest protected snapshot is not whole and this node is needed for it.
        """
        limit = self._network.monotonic() + deadline_s
        with self._lock:
            self._running += 1
        try:
            return self._until(limit, spares, wait)
        except BaseException:
            with self._lock:
                self._running -= 1
            raise

    def _until(self, limit: float, spares: Collection[Address], wait: bool) -> Drained:
        last, pause_s = "it has only just begun", FIRST_S
        while True:
            try:
                done = self._try(limit, spares, wait)
                if done is not None:
                    return done
            except ConfigError:
                raise
            except HoldfastError as error:
                last = str(error)
                log.warning("the drain failed and is retried: %s", error)
            if self._network.monotonic() > limit or self._ended.wait(pause_s):
                raise DeadlineExceeded(f"{self._inventory().node} could not be drained in time. {last}")
            pause_s = min(2 * pause_s, MOST_S)

    def _try(self, limit: float, spares: Collection[Address], wait: bool) -> Drained | None:
        """One attempt. None if the node is not drained yet. Raises `HoldfastError` with the reason that prevents it."""
        mine = self._inventory()
        name = mine.node
        addresses = {*addresses_of(list(mine.layouts.values())), *spares} - {mine.control}
        answers = [mine, *gather_inventories(self._job, sorted(addresses), network=self._network)]
        over = mine.run is not None and mine.run.id in given_up(answers, runs_in_reach(answers))
        inventories = own_inventories(answers, None if over else mine.run)  # of a run that is over, nothing is needed
        result = moved(inventories)
        if result is not None and not mine.trainers:
            return Drained(name, result.snapshot, result.holders, result.tolerates)
        trained = sorted(inventory.node for inventory in inventories if inventory.trainers)
        if trained:
            reason = (
                f"trainers are connected to {', '.join(trained)}: the job runs, and protects each new snapshot with "
                f"{name} in its group. Stop the job, then drain; it is restarted without {name}"
            )
            raise HoldfastError(reason) if wait else ConfigError(reason)
        if all(inventory.leaving for inventory in inventories):
            raise ConfigError(
                f"no other SMP of job {self._job!r} answers that could take over what {name} holds: start one on "
                "another node and name it as a spare (--to HOST:PORT)"
            )
        self._move(spares, max(1.0, limit - self._network.monotonic()))
        return None
