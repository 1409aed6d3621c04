"""Recomputes the parity of a restored snapshot in the background, and posts on the board how far that is."""

from __future__ import annotations

from functools import partial

from holdfast.smp_daemon.recovery.rebuild import repair_parity
from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, Unrecoverable
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.holdings import ParityKey
from holdfast.smp_daemon.storage.store import Store

ATTEMPTS = 3
"""Number of attempts that must fail for want of units, although all holders answered, before a repair is hopeless. One
is not enough: bytes may also be damaged on their way."""

AGAIN_S = 1.0
"""Pause after an attempt that failed, in seconds."""

log = get_log(__name__)


class ParityRepairs:
    """The parity repairs of one SMP. Thread-safe.

    Each has a thread, which tries again until the parity is here, hopeless, not wanted any more, or ordered in an epoch
    that is over: trainers order it again in theirs.
    """

    def __init__(self, store: Store, system: System = MACHINE) -> None:
        self._store = store
        self._system = system
        # Guarded by the store's lock: what was ordered in the store's epoch, and how far it is.
        self._states: dict[tuple[int, ParityKey], RepairState] = {}
        self._closed = False
        self._episodes = Episodes(log)

    def order(self, sources: Sources, group: int, position: int) -> None:
        """Repair the parity of that position. Returns at once; does nothing if it was ordered in this epoch before."""
        key = ParityKey(sources.snapshot, sources.layout.tag(group), position)
        with self._store.changed:
            order = self._store.epoch, key
            if order in self._states:
                return
            self._states = {each: state for each, state in self._states.items() if each[0] == self._store.epoch}
            self._note(order, RepairState.UNDER_WAY)
        work = partial(self._run, order, sources, group)
        self._system.Thread(target=work, name="repair-parity", daemon=True).start()

    def close(self) -> None:
        """Try nothing again. Returns at once."""
        with self._store.changed:
            self._closed = True
            self._store.changed.notify_all()

    def _note(self, order: tuple[int, ParityKey], state: RepairState) -> None:
        with self._store.changed:
            if order[0] == self._store.epoch:
                self._states[order] = state
                self._store.board.post_repair(min(self._states.values()))

    def _run(self, order: tuple[int, ParityKey], sources: Sources, group: int) -> None:
        in_vain = 0
        while not self._is_over(order):
            if self._store.holdings.holds(order[1]):
                self._note(order, RepairState.WHOLE)
                return
            try:
                self._attempt(order[1], sources, group)
            except (Unrecoverable, DamagedSnapshot):
                in_vain += 1
                if in_vain >= ATTEMPTS:
                    self._note(order, RepairState.HOPELESS)
                    return
            except HoldfastError:
                pass  # it is logged
            with self._store.changed:
                if not self._store.holdings.holds(order[1]):
                    self._store.changed.wait_for(lambda: self._is_over(order), AGAIN_S)

    def _is_over(self, order: tuple[int, ParityKey]) -> bool:
        epoch, key = order
        return self._closed or self._store.epoch != epoch or self._store.is_given_up(key.snapshot)

    def _attempt(self, key: ParityKey, sources: Sources, group: int) -> None:
        extra, position = about(key.snapshot), key.position
        try:
            count = repair_parity(self._store, sources, group, position)
        except HoldfastError as error:
            text = "parity of position %d not repaired for %s: %s"
            self._episodes.begin(key, text, position, key.snapshot, error, extra=extra)
            raise
        text, fields = "parity of position %d repaired for %s: %d bytes fetched", about(key.snapshot, bytes=count)
        log.info(text, position, key.snapshot, count, extra=fields)
        self._episodes.end(key, "the parity repair succeeded after earlier failures", extra=extra)
