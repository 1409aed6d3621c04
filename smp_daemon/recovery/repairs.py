"""Parity of what was restored, computed again in the background: whoever asks for it asks again until it is there."""

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
"""So often all who hold something of a snapshot must have answered, and had too little: bytes may be damaged on their
way, too."""

log = get_log(__name__)


class ParityRepairs:
    """Those of one SMP. Thread-safe."""

    def __init__(self, store: Store, system: System = MACHINE) -> None:
        self._store = store
        self._system = system
        # Guards what follows, for moments; no other lock is taken under it.
        self._lock = system.Lock()
        self._running: set[tuple[int, ParityKey]] = set()
        self._in_vain: Counter[ParityKey] = Counter()
        self._episodes = Episodes(log)

    def ask(self, sources: Sources, group: int, position: int) -> RepairState:
        """How far the parity of that position is. If it is not here, and it is not hopeless, and nobody is at work for
        it, that begins. Returns at once."""
        key = ParityKey(sources.snapshot, sources.layout.tag(group), position)
        epoch = self._store.epoch  # who is at work for an earlier one has lost its slot
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
            self._episodes.end(key, "it was tried again and again before", extra=extra)
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
