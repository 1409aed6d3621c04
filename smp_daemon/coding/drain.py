"""Before a node is taken away: what it holds is moved to those that stay, who then protect it among themselves.

Moving is a regrouping (`coding.regroup`) in which this node says that it is leaving, so whatever goes wrong on the way
leaves what there was: another node that is lost meanwhile is planned around, and if this one is lost it is a loss like
any other. Nothing is moved while trainers are connected anywhere: they arrange their nodes by themselves.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass

from holdfast.smp_daemon.coding.regroup import moved
from holdfast.smp_daemon.recovery.inventories import addresses_of, gather_inventories
from holdfast.smp_daemon.shared.errors import ConfigError, DeadlineExceeded, HoldfastError
from holdfast.smp_daemon.shared.inventory import Inventory
from holdfast.smp_daemon.shared.layout import SnapshotId
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.sources import Address
from holdfast.smp_daemon.shared.system import System

FIRST_S, MOST_S = 0.02, 1.0
"""How long it waits before it looks, or tries, again: twice as long each time, up to a limit."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class Drained:
    """A node that may be taken away.

    Attributes:
        snapshot: what the others hold whole; None: there was nothing to be moved.
        holders: names of the nodes that hold its shards.
        tolerates: how many of them may be lost, whichever they are.
    """

    node: str
    snapshot: SnapshotId | None
    holders: tuple[str, ...]
    tolerates: int


def parse_spares(text: str) -> list[Address]:
    """Addresses of SMPs from ``"10.0.0.7:4711,10.0.0.8:4711"``; none from an empty text. Raises `ConfigError`."""
    found = []
    for part in filter(None, text.split(",")):
        host, _, port = part.strip().rpartition(":")
        if not host or not port.isdigit() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"{part!r} is no address of an SMP: say HOST:PORT, as `holdfast status` shows it")
        found.append((host, int(port)))
    return found


def leave_on_signals(
    drain: Callable[[], Drained], stop: Callable[[], None], grace_s: float, told: Callable[[int], None]
) -> None:
    """From now on SIGTERM calls `drain`, then `stop`; after `grace_s` in any case, and on a second one at once.

    SIGINT ends it at once. `told` is called with the number of each signal. The arena stays for a successor. Call it in
    the main thread; with a `grace_s` of 0 SIGTERM ends the process as it does any other.
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
    """How one SMP leaves. Thread-safe: `run` may be called by several threads, and each waits for the same end."""

    def __init__(
        self,
        job: str,
        system: System,
        inventory: Callable[[], Inventory],
        move: Callable[[Collection[Address], float], None],
    ) -> None:
        """
        Args:
            inventory: what this node holds now.
            move: has the job's nodes regroup without this one, spares first; blocks for so many seconds at most.
        """
        self._job = job
        self._system = system
        self._inventory = inventory
        self._move = move
        self._ended = threading.Event()
        self._running = 0
        self._lock = threading.Lock()  # guards the count alone, which threads of connections and of SIGTERM change

    @property
    def leaving(self) -> bool:
        """Whether this node is on its way out."""
        return self._running > 0

    def end(self) -> None:
        """The SMP ends: `run` returns soon, with an error unless it is done."""
        self._ended.set()

    def run(self, deadline_s: float, spares: Collection[Address], *, wait: bool) -> Drained:
        """Move what this node holds to others. Blocks until it is whole and protected there.

        This node says that it is leaving until then, and from then on; if it comes to nothing, it stays.

        Args:
            spares: SMPs of this job that no layout names yet. They are filled first.
            wait: wait for trainers that are connected to go, instead of refusing.

        Raises:
            ConfigError: trainers are connected, or nobody else answers.
            Unrecoverable: the newest protected snapshot is not whole, and this node is needed for it.
            DeadlineExceeded: it was not done in time; the message says what stood in the way.
        """
        limit = time.monotonic() + deadline_s
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
            if time.monotonic() > limit or self._ended.wait(pause_s):
                raise DeadlineExceeded(f"{self._inventory().node} could not be drained in time. {last}")
            pause_s = min(2 * pause_s, MOST_S)

    def _try(self, limit: float, spares: Collection[Address], wait: bool) -> Drained | None:
        """One attempt; None if it is not done yet. Raises `HoldfastError`: what stands in the way."""
        mine = self._inventory()
        name = mine.node
        addresses = {*addresses_of(list(mine.layouts.values())), *spares} - {mine.control}
        inventories = [mine, *gather_inventories(self._job, sorted(addresses), system=self._system)]
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
        self._move(spares, max(1.0, limit - time.monotonic()))
        return None
