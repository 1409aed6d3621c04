"""The work on the memory of slots that takes minutes on a large node, done in the background: training does not wait.

Memory of deleted slots is given back first, then planned slots are made, then slots that were given up are overwritten
with zeros, if that is asked for, and at last the rest of the arena's budget is reserved.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable

from holdfast.smp_daemon.shared.errors import ArenaTooSmall
from holdfast.smp_daemon.shared.failpoints import failpoint
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.smp_daemon.shared.populate import slices
from holdfast.smp_daemon.shared.priority import make_background
from holdfast.smp_daemon.shared.system import MACHINE, Threads
from holdfast.smp_daemon.storage.arena import Arena
from holdfast.smp_daemon.storage.pool import Slot, SlotPool, SlotState, ran_out

TURN_S = 0.001
"""How long the thread that wipes leaves the store's lock to others after each part."""

READER_S = 0.05
"""Pause before a deleted file is looked at again that a thread still reads."""

STALL_S = 30.0
"""How long memory that the kernel takes back may not grow before nobody waits for more."""

log = get_log(__name__)


class Reserver:
    """Does the work on an arena's memory, see the module. Its thread runs only while there is some.

    Attributes:
        error: why the last plan was given up; empty if it was not.
        on_ready: called, with the lock held, once a slot is made or a plan was given up.
        short: why the rest of the arena's budget could not be reserved; empty if it could, or is yet to be. Set by the
            thread alone.
    """

    def __init__(
        self,
        arena: Arena,
        lock: threading.Condition,
        priority: str,
        threads: Threads = MACHINE,
        moved: Callable[[], None] = lambda: None,
    ) -> None:
        """
        Args:
            lock: the store's lock, which guards the arena and everything here. It is not held while memory is reserved.
            moved: called whenever a slice of a slot is reserved.
        """
        self._moved = moved
        self.error = ""
        self.short = ""
        self.on_ready: Callable[[], None] = lambda: None
        self._arena = arena
        self._lock = lock
        self._priority = priority
        self._threads = threads
        self._thread: threading.Thread | None = None
        self._closed = False
        arena.deleted.on_work = self.go_on

    def start(self) -> None:
        """Forget the last error, and start the thread if slots are planned. The caller holds the lock."""
        self.error = ""
        self.go_on()

    def make_good(self) -> None:
        """Make the wanted slots that are missing, if there is memory for them now. The caller holds the lock."""
        if not self.error:  # the memory of a plan that was given up stays free until the next start
            self._arena.plan_missing()
            self._arena.retry()
            self.go_on()

    def go_on(self) -> None:
        """Start the thread if there is something to do. The caller holds the lock."""
        if self._thread is None and not self._closed and self._has_work():
            thread = self._threads.Thread(target=self._run, name="reserve", daemon=True)
            thread.start()  # may fail, and is tried again when more is to be done
            self._thread = thread

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

    def await_freed(self, length: int) -> None:
        """Give the memory of deleted files back, and wait while other threads do, until `length` bytes are free. Gives
        up when nothing moves for `STALL_S`. The caller does not hold the lock."""
        deleted = self._arena.deleted
        deleted.free(self._lock)
        before, until_s = -1, 0.0
        with self._lock:
            while deleted.bytes and (free := self._arena.free_bytes()) < length:
                if free != before:
                    before, until_s = free, self._threads.monotonic() + STALL_S
                if self._threads.monotonic() > until_s:
                    return
                self._lock.wait(READER_S)

    def make(self, pool: SlotPool, slot: Slot, is_over: Callable[[], bool] = bool) -> None:
        """Reserve all memory of a planned slot, and free the slot. Blocks for about as long as zeroing it takes; the
        caller must not hold the lock, which is held for moments only. Does nothing more once the slot is given up, or
        `is_over` (called with the lock held); then the unfinished file is deleted. Raises `OSError`.
        """

        def given_up() -> bool:
            if slot.state is SlotState.MAKING and is_over():
                pool.part_path(slot).unlink(missing_ok=True)
            return slot.state is not SlotState.MAKING or is_over()

        with self._lock:
            if given_up():
                return
            memory = pool.open_part(slot)
        with memory:
            for start, count in slices(slot.bytes):
                with self._lock:
                    if given_up():
                        return
                    pool.reserve(slot, count)
                memory.reserve(start, count)
                self._moved()
                failpoint("reserve.slice")
            with self._lock:
                if not given_up():
                    pool.made(slot, memory)
                    self.on_ready()
                    self._lock.notify_all()

    def _run(self) -> None:
        make_background(self._priority)
        try:
            self._work()
        except BaseException:  # a bug, or a slot that cannot be mapped: whoever has work next starts another thread
            with self._lock:
                self._thread = None
            raise

    def _work(self) -> None:
        while True:
            self._arena.deleted.free(self._lock, lambda: self._closed)
            if (planned := self._next()) is not None:
                try:
                    self.make(*planned, lambda: self._closed)
                except OSError as error:
                    self._give_up(*planned, error)
            elif not self._wipes() and not self._tops_up() and self._is_done():
                return

    def _next(self) -> tuple[SlotPool, Slot] | None:
        with self._lock:
            return None if self._closed else self._arena.next_planned()

    def _has_work(self) -> bool:
        arena = self._arena
        planned = arena.next_planned() is not None or arena.next_unwiped() is not None
        return planned or bool(arena.deleted.waiting or arena.budget.missing)

    def _wipes(self) -> bool:
        """Wipe a part of a slot that was given up. Returns whether there was one."""
        with self._lock:
            if self._closed or (unwiped := self._arena.next_unwiped()) is None:
                return False
            pool, slot = unwiped
            pool.wipe_next(slot)
            self._lock.wait(TURN_S)  # others have their turn
            return True

    def _tops_up(self) -> bool:
        """Reserve a part of the memory that slots may still take. Returns whether there was any to reserve."""
        try:
            done = not self._closed and self._arena.budget.reserve_next(self._arena.free_bytes, self._lock)
            self.short = "" if done else self.short
            return done
        except (ArenaTooSmall, OSError) as error:
            self.short = f"the memory that slots may take is not all reserved: {error}"
            log.error(self.short)
            return True

    def _is_done(self) -> bool:
        """Whether the thread ends. Waits for a moment if it has only files left that others read."""
        with self._lock:
            if self._closed or not self._has_work():
                self._thread = None
                return True
            if self._arena.deleted.waiting:
                self._lock.wait(READER_S)
            return False

    def _give_up(self, pool: SlotPool, slot: Slot, error: OSError) -> None:
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
                self.give_up(ran_out(path, need, got, self._arena.free_bytes()))
            else:
                self.give_up(f"{need:,} bytes of memory for {path} cannot be reserved: {error}")
            self.on_ready()
            self._lock.notify_all()
