"""Recomputes the parity of a restored snapshot in the background. Trainers repeat their request until it is there."""

from __future__ import annotations

from collections import Counter
from functools import partial

from holdfast.smp_daemon.recovery.rebuild import repair_parity
from holdfast.smp_daemon.shared.board import RepairState
from holdfast.smp_daemon.shared.errors import DamagedSnapshot, HoldfastError, StaleEpoch, Unrecoverable
from holdfast.smp_daemon.shared.logs import Episodes, about, get_log
from holdfast.smp_daemon.shared.sources import Sources
from holdfast.smp_daemon.shared.system import MACHINE, System
from holdfast.smp_daemon.storage.holdings import ParityKey
from holdfast.smp_daemon.storage.store import Store

ATTEMPTS = 3
"""Number of attempts that must fail for want of units, although all holders answered, before a repair is hopeless. One
is not enough: bytes may also be damaged on their way."""

log = get_log(__name__)


class ParityRepairs:
    """The parity repairs of one SMP. Thread-safe."""

    def __init__(self, store: Store, system: System = MACHINE) -> None:
        self._store = store
        self._system = system
        # Guards the two fields below. Connection threads and repair threads hold it for moments, and take no other lock
        # while they hold it.
        self._lock = system.Lock()
        self._running: set[tuple[int, ParityKey]] = set()
        self._in_vain: Counter[ParityKey] = Counter()
        self._episodes = Episodes(log)

    def ask(self, sources: Sources, group: int, position: int) -> RepairState:
        """The state of the parity of that position. Starts a repair thread if the parity is not here, not hopeless and
        not being repaired yet. Returns at once."""
        key = ParityKey(sources.snapshot, sources.layout.tag(group), position)
        epoch = self._store.epoch  # a repair that began in an earlier epoch has lost its slot
        if self._store.holdings.holds(key):
            return RepairState.WHOLE
        with self._lock:
            if self._in_vain[key] >= ATTEMPTS:
                return RepairState.HOPELESS
            begins = (epoch, key) not in self._running
            self._running.add((epoch, key))
        if begins:
            work = partial(self._run, epoch, key, sources, group)
            self._system.Thread(target=work, name="repair-parity", daemon=True).start()
        return RepairState.UNDER_WAY

    def _run(self, epoch: int, key: ParityKey, sources: Sources, group: int) -> None:
        extra, position = about(key.snapshot), key.position
        try:
            count = repair_parity(self._store, sources, group, position)
            text, fields = "parity of position %d repaired for %s: %d bytes fetched", about(key.snapshot, bytes=count)
            log.info(text, position, key.snapshot, count, extra=fields)
            self._episodes.end(key, "the parity repair succeeded after earlier failures", extra=extra)
        except StaleEpoch as error:
            log.info("parity of position %d of %s is not repaired: %s", position, key.snapshot, error, extra=extra)
        except HoldfastError as error:
            if isinstance(error, Unrecoverable | DamagedSnapshot):
                with self._lock:
                    self._in_vain[key] += 1
            text = "parity of position %d not repaired for %s: %s"
            self._episodes.begin(key, text, position, key.snapshot, error, extra=extra)
        finally:
            with self._lock:
                self._running.discard((epoch, key))
