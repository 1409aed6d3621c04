"""Slots whose pages a device accesses directly: they are registered with CUDA, which locks them in memory.

Registering takes 0.1 to 1 s per gigabyte, and meanwhile the driver lets no other process of the node launch anything.
So slots are registered in small pieces, by one process of a node at a time, with pauses in between for training. Slots
that are not registered yet, or that CUDA refuses to register, are copied through pinned buffers.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.cuda_driver import REGISTER_BYTES
from holdfast.snapshot.copy.cuda_runtime import Runtime
from holdfast.snapshot.copy.engines import address_of

ALREADY = 712
"""CUDA's error code for pages that this process has registered already."""

log = get_log(__name__)


@dataclass(frozen=True, slots=True)
class _Registered:
    """`view` keeps the mapping; `user` tells whether anybody else does; `addresses`: what we have to unregister."""

    view: memoryview
    user: weakref.ref[memoryview]
    addresses: list[int]


class Pages:
    """The slots that are registered with every device of this process.

    `prepare` is called by the thread that reserves slots, or by the training thread. The other methods are called by
    the copy thread, or by any thread while no copy runs.
    """

    def __init__(self) -> None:
        # Guards `_slots`: the copy thread looks while another thread adds. Held briefly, and never while calling CUDA.
        self._lock = threading.Lock()
        self._slots: dict[tuple[int, int], _Registered] = {}
        self._refused = False

    def prepare(
        self, runtime: Runtime, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]
    ) -> None:
        """Register slots, unless they are registered already or CUDA has refused one. Blocks.

        Args:
            turn: entered before each piece and left after it, so that processes of one node take turns. Its errors end
                this call.
        """
        for slot in slots:
            place = (address_of(slot), slot.nbytes)
            if place in self._slots or self._refused:
                continue
            addresses = self._register(runtime, *place, turn)
            if addresses is None:
                continue
            with self._lock:
                self._slots[place] = _Registered(memoryview(slot), weakref.ref(slot), addresses)

    def has(self, slot: memoryview) -> bool:
        """Whether the device may write to the slot directly."""
        with self._lock:
            return (address_of(slot), slot.nbytes) in self._slots

    def sweep(self, runtime: Runtime) -> None:
        """Unregister slots that nobody else holds. No transfer to any of them may be in progress."""
        with self._lock:
            over = [place for place, known in self._slots.items() if known.user() is None]
        self.release(runtime, over)

    def release(self, runtime: Runtime, places: Iterable[tuple[int, int]] | None = None) -> None:
        """Unregister slots, all of them by default, and only then drop their mappings."""
        for place in list(self._slots) if places is None else places:
            self._unregister(runtime, self._slots[place].addresses)
            with self._lock:
                del self._slots[place]

    def _register(
        self, runtime: Runtime, address: int, count: int, turn: Callable[[], AbstractContextManager[object]]
    ) -> list[int] | None:
        """Register one slot; returns the addresses of its pieces, or None if CUDA refuses one."""
        done: list[int] = []
        try:
            for start in range(0, count, REGISTER_BYTES):
                pages = -(-min(REGISTER_BYTES, count - start) // mmap.PAGESIZE)
                with turn():
                    code = runtime.register(address + start, pages * mmap.PAGESIZE)
                    if not code:
                        done.append(address + start)
                if code and code != ALREADY:
                    self._refused = True
                    self._unregister(runtime, done)
                    hint = (
                        "copies take the slower way through pinned buffers; is locked memory limited here (ulimit -l)?"
                    )
                    log.warning("cudaHostRegister of a slot on %s: error %d; %s", runtime.device, code, hint)
                    return None
        except BaseException:  # the turn was not waited for, for example
            self._unregister(runtime, done)
            raise
        return done

    def _unregister(self, runtime: Runtime, addresses: Sequence[int]) -> None:
        codes = [code for address in reversed(addresses) if (code := runtime.unregister(address))]
        if codes:  # a device that has failed refuses thousands
            log.warning(
                "cudaHostUnregister of %d parts of a slot on %s: error %d", len(codes), runtime.device, codes[0]
            )
