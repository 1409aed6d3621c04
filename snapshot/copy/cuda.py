"""State on a CUDA device: copies it into slot memory and back, beside the computation.

Every call into CUDA is in `snapshot.copy.cuda_runtime`::

    compute stream   ... optim.step() |ready  forward, backward ........ |wait  optim.step() ...
                                  mark()                             fence()
    our stream                        |wait  chunk chunk chunk sample |guarded
    copy thread                              copy()            sample(), guard()     finish(): waits for the last

The device writes into the slot's pages directly; where CUDA does not register them, through pinned buffers. Sources are
referenced until they are copied, or the caching allocator could hand their memory out.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.logs import some
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.cuda_driver import REGISTER_BYTES
from holdfast.snapshot.copy.cuda_runtime import DEADLINE_S, DeviceEvent, Runtime
from holdfast.snapshot.copy.engines import (
    GROUP_BYTES,
    SAMPLE_BYTES,
    CopyEngine,
    Filling,
    Pause,
    Places,
    Sample,
    SlotTensor,
    Table,
    Take,
    Transfer,
    address_of,
    golden,
    load_threads,
    remembered,
)
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.ring import Ring
from holdfast.snapshot.copy.runs import Runs
from holdfast.snapshot.copy.tensors import flat
from holdfast.snapshot.copy.unit_digests import UnitDigests

CHUNK_BYTES = 32 << 20
"""Length of our longest copy, which copies of others may have to wait for."""

BEING_TRANSFERRED = 2
"""How many buffers the ring has besides one for each thread that fills the device."""

SAMPLED = 256
"""Number of tensors that are sampled when a step begins."""

MOST_CHUNKS = 256
"""In how many parts copies of plain tensors are queued at most: a driver takes about a thousand pieces of work before
the next call blocks, of any thread."""

AHEAD, AHEAD_POLL_S = 2, 2.5e-4
"""How many chunks, of 0.6 ms, are in a device's one queue while nobody waits for the copy, and how long to sleep before
a look whether one is done. What training asks the device for meanwhile, such as a loss, comes behind them."""

MARKS = 8
"""At how many points of a copy its progress is noticed."""


class CudaEngine:
    """Moves state between one device and slots; see `snapshot.copy.engines.CopyEngine` for who calls what, and when.

    `mark` and a transfer's `fence` never block and never raise: `copy` or `finish` raises their errors.

    Raises:
        HoldfastError: the device reported an error, of this or of earlier work.
        DeadlineExceeded: the device has got to our work, and has made no progress with it for 60 s; it may still go on.
        ConfigError: a piece is on another device.
    """

    queues = True
    digests = False

    def __init__(self, runtime: Runtime, pages: Pages) -> None:
        """`pages`: shared by all devices of this process."""
        self.runtime = runtime
        self._pages = pages
        self.stream = runtime.own_stream("copies")
        self.ring = Ring(runtime, self.stream, load_threads() + BEING_TRANSFERRED, GROUP_BYTES)
        self._looks = runtime.own_stream("looks")
        self._samples = runtime.own_stream("samples")
        self._sampling = threading.Lock()  # guards `_samples` while one sample is queued
        # Guards `_look` and `_looks`, the one buffer and stream to fetch samples with; held while one is fetched. A
        # thread that holds it takes no other lock.
        self._looking = threading.Lock()
        self._look: torch.Tensor | None = None
        self._tables: dict[tuple[int, int], Table] = {}
        self._places: dict[tuple[int, int], Places] = {}
        self._under_way: list[CudaTransfer] = []  # used by the copy thread, and by `close` once it has ended

    def cover(self, devices: Collection[torch.device]) -> None:
        if strangers := [str(device) for device in devices if str(device) != str(self.runtime.device)]:
            raise ConfigError(f"there is state on {', '.join(strangers)}, and here is {self.runtime.device}")

    def enter_thread(self) -> None:
        with self.reported("a thread"):
            self.runtime.enter_thread()

    def capturing(self) -> bool:
        return self.runtime.capturing()

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        with self.on_stream("the registration of slots"):
            self._pages.prepare(self.runtime, slots, turn)

    def mark(self) -> Transfer:
        return CudaTransfer(self)

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """Sample the pieces as the work queued on the current stream leaves them; `SAMPLED` of them, others each
        turn.

        The copies are queued on a stream of ours that the current one waits for: CUDA batches none on its default
        stream.
        """
        with self._sampling, self.reported("a look at the state"):
            here = self.runtime.current_stream()
            if any(piece.bytes for piece in pieces):
                self._samples.wait_event(here.record_event())
            with self.runtime.on(self._samples):
                taken = self.sample_here(pieces, turn)
            if len(taken.index):
                here.wait_event(self._samples.record_event())
        return taken

    def sample_here(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """As `sample`, with copies on the current stream."""
        places = remembered(self._places, pieces, Places)
        start, length, place = places.at(turn)
        count = len(start)
        first = int(golden(turn, np.array(count))) if count > SAMPLED else 0
        rows = np.arange(first, first + min(SAMPLED, count)) % max(1, count)
        index, start, length, place = places.index[rows], start[rows], length[rows], place[rows]
        if not len(rows):
            return Sample(index, start, length, place, lambda: np.zeros((0, SAMPLE_BYTES), np.uint8))
        with self.reported("a look at the state"):
            taken = self.runtime.scratch((len(rows), SAMPLE_BYTES), torch.uint8)
            table = np.stack(
                [places.address[rows] + start, taken.data_ptr() + SAMPLE_BYTES * np.arange(len(rows)), length]
            )
            self.runtime.copy_runs(table.T.astype(np.uint64))
            ready = self.runtime.current_stream().record_event()

        def read() -> NDArray[np.uint8]:
            found = self._fetch(taken, ready).reshape(-1, SAMPLE_BYTES)
            found[np.arange(SAMPLE_BYTES) >= length[:, None]] = 0
            return found

        return Sample(index, start, length, place, read)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[np.uint8]]]:
        with self.reported("a look at the state"):
            ready = self.runtime.current_stream().record_event()
        return lambda: [self._fetch(tensor, ready) for tensor in tensors]

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        return [(self, pieces)]

    def fill(self) -> Filling:
        """After all that was queued on the current stream. The engine is its own `Filling`."""
        with self.reported("the load from the slot"):
            self.stream.wait_event(self.runtime.current_stream().record_event())
        return self

    @contextmanager
    def taking(self) -> Iterator[Take]:
        with self.on_stream("the load from the slot"), self.ring.uploading() as upload:
            yield upload.take

    def finish(self) -> None:
        with self.on_stream("the load from the slot"):
            self.runtime.wait(self.stream.record_event())

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        self.fill()
        base = np.array([address_of(slot), 0, 0], np.uint64)
        plain = [(piece.offset, piece.tensor.data_ptr(), piece.bytes) for piece in pieces if piece.is_plain]
        with self.on_stream("the load from the slot"):
            with self.ring.uploading() as upload:
                upload.copy(runs.make_runs(plain) + base)
            for chunk in (chunk for p in pieces if not p.is_plain for chunk in chunks(p, CHUNK_BYTES)):
                scratch = self.runtime.scratch(chunk.tensor.shape, chunk.tensor.dtype)
                with self.ring.uploading() as upload:
                    upload.copy(runs.make_runs([(chunk.offset, scratch.data_ptr(), chunk.bytes)]) + base)
                self.runtime.copy(chunk.tensor, scratch)
        self.finish()

    def forget(self) -> None:
        self._tables.clear()
        self._places.clear()

    def settle(self) -> None:
        for transfer in list(self._under_way):
            transfer.settle()
        with self.on_stream("the last transfer"):
            self.ring.settle()

    def close(self) -> None:
        self.forget()
        self.settle()
        with self.on_stream("the last transfer"):
            self._pages.release(self.runtime)

    def table(self, pieces: Sequence[SlotTensor]) -> Table:
        def made(pieces: Sequence[SlotTensor]) -> Table:
            return Table(pieces, CHUNK_BYTES, REGISTER_BYTES, owner=self.runtime.allocation_of)

        return remembered(self._tables, pieces, made)

    def queue(self, table: Table, slot: memoryview, pause: Pause, begun: DeviceEvent) -> Iterator[DeviceEvent]:
        """Queue the copies of all pieces on our stream, which must be the current one, after `begun`. Yields points of
        the way.

        Nothing is paced: the copies take hardly any of the device's memory bandwidth, and are done long after this
        ends. If the device has one queue for all streams, no kernel is queued that would wait for a copy: all kernels
        that training launches after it would wait, too. So none separates the copies, and one that packs a tensor is
        queued only when there is no copy before it. Those come first, while that takes least time. Nor is the whole
        copy queued before it has to be: transfers of training would come after it.
        """
        runtime, direct = self.runtime, self._pages.has(slot)
        base = np.array([0, address_of(slot), 0], np.uint64)

        def store(parts: Sequence[Runs]) -> None:
            pause(0)
            if direct:
                runtime.copy_parts([part + base for part in parts])
            else:
                for part in parts:
                    self.ring.store(part + base, begun)

        for chunk in (chunk for piece in table.odd for chunk in chunks(piece, CHUNK_BYTES)):
            scratch = runtime.scratch(chunk.tensor.shape, chunk.tensor.dtype)
            runtime.copy(scratch, chunk.tensor)
            rows = runs.make_runs([(scratch.data_ptr(), chunk.offset, chunk.bytes)])
            store([runs.cut(rows, 1, REGISTER_BYTES)])
            if runtime.one_queue:
                runtime.wait(self.stream.record_event(), begun)
        batches = table.batches
        if runtime.one_queue:
            batches = yield from self._queue_slowly(batches, store, pause)
        together = max(1, -(-len(batches) // MOST_CHUNKS)) if direct else 1
        parts = [np.concatenate(batches[first : first + together]) for first in range(0, len(batches), together)]
        at_once = max(1, -(-len(parts) // MARKS))
        for first in range(0, len(parts), at_once):
            store(parts[first : first + at_once])
            yield self.stream.record_event()

    def _queue_slowly(
        self, batches: list[Runs], store: Callable[[Sequence[Runs]], None], pause: Pause
    ) -> Generator[DeviceEvent, None, list[Runs]]:
        """Queue batches, with at most `AHEAD` of them before the device, until somebody waits for the copy. Returns
        those that are left."""
        queued: deque[DeviceEvent] = deque(maxlen=AHEAD)
        limit = time.monotonic() + DEADLINE_S  # a device that gets nowhere is `finish`'s to report
        for number, batch in enumerate(batches):
            while len(queued) == AHEAD and not queued[0].query():
                if pause(0) or time.monotonic() > limit:
                    return batches[number:]
                time.sleep(AHEAD_POLL_S)
            store([batch])
            queued.append(self.stream.record_event())
            yield queued[-1]
        return []

    def began(self, transfer: CudaTransfer) -> None:
        """`transfer` may have work in progress from now on."""
        if transfer not in self._under_way:
            self._under_way.append(transfer)

    def ended(self, transfer: CudaTransfer) -> None:
        """`transfer` has no work in progress any more."""
        if transfer in self._under_way:
            self._under_way.remove(transfer)

    def sweep(self) -> None:
        """Unregister slots that nobody holds, unless a transfer is in progress."""
        if not self._under_way:
            self._pages.sweep(self.runtime)

    @contextmanager
    def on_stream(self, what: str) -> Iterator[None]:
        """Make our stream, and our device, this thread's current ones."""
        with self.reported(what), self.runtime.on(self.stream):
            yield

    @contextmanager
    def reported(self, what: str) -> Iterator[None]:
        """Turn an error of the device into a `HoldfastError` that says what failed, and where."""
        try:
            yield
        except RuntimeError as error:
            raise HoldfastError(f"{what} failed on {self.runtime.device}: {error}") from error

    def _fetch(self, tensor: torch.Tensor, ready: DeviceEvent) -> NDArray[np.uint8]:
        """The bytes of a small contiguous tensor of the device, as of `ready`. Blocks."""
        count = tensor.nbytes
        with self._looking, self.reported("a look at the state"), self.runtime.on(self._looks):
            if self._look is None or self._look.numel() < count:
                self._look = self.runtime.pinned(max(count, SAMPLED * SAMPLE_BYTES))
            if count:
                self._looks.wait_event(ready)
                self.runtime.copy_runs(runs.make_runs([(tensor.data_ptr(), self._look.data_ptr(), count)]))
                self.runtime.wait(self._looks.record_event())
            return self._look.numpy()[:count].copy()


class CudaTransfer:
    """The state of one boundary on its way into slots.

    The training thread writes `_ready`, and `_error`, which the copy thread reads. The copy thread writes `_guarded`
    and `_border`; the training thread reads them once the job has told it that `guard` has returned. All else is used
    by the copy thread only.
    """

    def __init__(self, engine: CudaEngine) -> None:
        self._engine = engine
        self._ready: DeviceEvent | None = None
        self._border: DeviceEvent | None = None
        self._last: DeviceEvent | None = None
        self._passed: list[DeviceEvent] = []
        self._kept: list[Table] = []
        self._guarded = False
        self._error = ""
        try:
            self._ready = engine.runtime.current_stream().record_event()
        except RuntimeError as error:
            self._error = str(error)

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Pause,
        digests: UnitDigests | None = None,
    ) -> None:
        engine = self._engine
        engine.cover({piece.tensor.device for piece in pieces})
        with engine.on_stream("the copy to the slot"):
            if self._ready is None or self._error:
                raise HoldfastError(f"the state of the last boundary cannot be copied: {self._error}")
            engine.sweep()
            engine.began(self)
            if not self._kept:
                engine.stream.wait_event(self._ready)
            table = engine.table(pieces)
            self._kept.append(table)
            try:
                self._passed.extend(engine.queue(table, slot, pause, self._ready))
            finally:
                self._last = engine.stream.record_event()

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        engine = self._engine
        with engine.on_stream("a look at the state"):
            try:
                return engine.sample_here(pieces, turn)
            finally:
                self._last = engine.stream.record_event()

    def guard(self) -> None:
        self._border, self._guarded = self._last, True

    def fence(self) -> None:
        if not self._guarded:
            self._error = self._error or "the next step began before the whole copy was queued"
        if self._border is None:
            return  # nothing that changes with the step is copied from this device
        try:
            self._engine.runtime.current_stream().wait_event(self._border)
        except RuntimeError as error:
            self._error = str(error)

    def finish(self) -> None:
        engine = self._engine
        with engine.on_stream("the copy to the slot"):
            begun = self._ready
            for event in [*self._passed, *([self._last] if self._last is not None else [])]:
                engine.runtime.wait(event, begun)
                begun = event
            engine.ring.land(begun)
        asked, moved = bool(self._kept), [name for table in self._kept for name in table.moved()]
        self._over()
        if asked and self._error:
            raise HoldfastError(f"the state may have changed while it was copied: {self._error}")
        if moved:
            raise HoldfastError(f"memory was released while it was copied, as by an offload of state: {some(moved)}")

    def settle(self) -> None:
        engine = self._engine
        with engine.on_stream("the copy to the slot"):
            if self._last is not None:
                engine.runtime.wait(self._last)
            engine.ring.settle()
        self._over()

    def _over(self) -> None:
        self._kept.clear()
        self._passed.clear()
        self._engine.ended(self)


def chunks(piece: SlotTensor, limit: int) -> Iterator[SlotTensor]:
    """A piece in parts of at most `limit` bytes, in row-major order. They are views: nothing is copied."""
    tensor = piece.tensor.detach()
    if piece.bytes <= limit or tensor.dim() == 0:
        if piece.bytes:
            yield SlotTensor(tensor, piece.offset, piece.bytes)
        return
    if tensor.is_contiguous():
        tensor = flat(tensor)
    row = piece.bytes // tensor.shape[0]
    count = max(1, limit // row)
    for first in range(0, tensor.shape[0], count):
        part = tensor[first : first + count] if row <= limit else tensor[first]
        yield from chunks(SlotTensor(part, piece.offset + first * row, part.nbytes), limit)
