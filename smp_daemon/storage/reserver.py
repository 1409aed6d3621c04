"""Reserves the memory of slots in the background: hundreds of gigabytes take minutes, and training does not wait. It
also overwrites slots that were given up with zeros, if that is asked for."""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.populate import slices
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Slot, SlotFilePool, SlotState, ran_out, room

TURN_S = 0.001
"""How long the thread that wipes leaves the store's lock to others after each part."""

log = get_log(__name__)


def make(pool: SlotFilePool, slot: Slot, lock: threading.Condition, is_over: Callable[[], bool] = bool) -> None:
    """Reserve all memory of a planned slot, and free the slot. Blocks for about as long as zeroing it takes; the caller
    must not hold `lock`, the store's, which is held for moments only. Does nothing more once the slot is given up, or
    `is_over` (called with the lock held); then the unfinished file is deleted. Raises `OSError`.
    """

    def given_up() -> bool:
        if slot.state is SlotState.MAKING and is_over():
            pool.part_path(slot).unlink(missing_ok=True)
        return slot.state is not SlotState.MAKING or is_over()

    with lock:
        if given_up():
            return
        memory = pool.open_part(slot)
    with memory:
        for start, count in slices(slot.bytes):
            with lock:
                if given_up():
                    return
                pool.reserve(slot, count)
            memory.reserve(start, count)
            failpoint("reserve.slice")
        with lock:
            if not given_up():
                pool.made(slot, memory)
                lock.notify_all()


class Reserver:
    """Makes the planned slots of an arena, one after another, and then wipes those that were given up. Its thread runs
    only while there are any.

    Attributes:
        error: why the last plan was given up; empty if it was not.
    """

    def __init__(self, arena: Arena, lock: threading.Condition, priority: str, system: System = MACHINE) -> None:
        """`lock`: the store's lock, which guards the arena and everything here. It is not held while memory is
        reserved."""
        self.error = ""
        self._arena = arena
        self._lock = lock
        self._priority = priority
        self._system = system
        self._thread: threading.Thread | None = None
        self._closed = False
        arena.on_given_up = self.go_on

    def start(self) -> None:
        """Forget the last error, and start the thread if slots are planned. The caller holds the lock."""
        self.error = ""
        self.go_on()

    def make_good(self) -> None:
        """Make the wanted slots that are missing, if there is memory for them now. The caller holds the lock."""
        if not self.error:  # the memory of a plan that was given up stays free until the next start
            self._arena.plan_missing()
            self.go_on()

    def go_on(self) -> None:
        """Start the thread if there is something to do. The caller holds the lock."""
        if self._thread is None and not self._closed and self._has_work():
            self._thread = self._system.Thread(target=self._run, name="reserve", daemon=True)
            self._thread.start()

    def give_up(self, why: str) -> None:
        """Record why the slots cannot be made. The caller holds the lock, unless no other thread has the store yet."""
        self.error = why
        log.error("no snapshots can be taken: %s", why)

    def close(self) -> None:
        """End the thread and wait for it. A successor makes the slots that are still missing."""
        with self._lock:
            self._closed = True
            thread = self._thread
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        make_background(self._priority)
        while (planned := self._next()) is not None or self._wipes():
            if planned is None:
                continue
            try:
                make(*planned, self._lock, lambda: self._closed)
            except OSError as error:
                self._give_up(*planned, error)

    def _next(self) -> tuple[SlotFilePool, Slot] | None:
        with self._lock:
            return None if self._closed else self._arena.next_planned()

    def _has_work(self) -> bool:
        return self._arena.next_planned() is not None or self._arena.next_unwiped() is not None

    def _wipes(self) -> bool:
        """Wipe a part of a slot that was given up. Returns whether there may be more to do; False: the thread ends."""
        with self._lock:
            if not self._closed and (unwiped := self._arena.next_unwiped()) is not None:
                pool, slot = unwiped
                pool.wipe_next(slot)
                self._lock.wait(TURN_S)  # others have their turn
                return True
            if self._closed or not self._has_work():
                self._thread = None
                return False
            return True

    def _give_up(self, pool: SlotFilePool, slot: Slot, error: OSError) -> None:
        """Delete the planned slots that hold no snapshot, and wake those who wait for them. Does nothing if `slot` was
        given up before."""
        with self._lock:
            if slot.state is not SlotState.MAKING:
                return
            if not self._arena.is_of_plan(slot):  # it was to replace one whose memory somebody still uses
                pool.remove(slot)
                log.warning(
                    "a slot of %s that was taken away is not made again before the next start: %s", pool.name, error
                )
                return
            need, got = self._arena.give_up_planned()
            path = self._arena.path
            if error.errno == errno.ENOSPC:
                self.give_up(ran_out(path, need, got, room(path, self._system)))
            else:
                self.give_up(f"{need:,} bytes of memory for {path} cannot be reserved: {error}")
            self._lock.notify_all()
