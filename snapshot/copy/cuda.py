"""State on a CUDA device: its way into slot memory and back, beside the computation.

Every call into ``torch.cuda`` stands in `snapshot.copy.cuda_runtime`::

    compute stream   ... optim.step() |ready  forward, backward ........ |wait  optim.step() ...
                                  mark()                             fence()
    side stream                       |wait  chunk chunk chunk |started
    copy thread                              copy()                  finish(): waits for `started`

The device writes into the slot's pages by itself; where CUDA will not register them, through pinned buffers. Sources
are referenced until they are copied, or the caching allocator could hand their memory out.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError, HoldfastError
from holdfast.smp_daemon.shared.logs import get_log
from holdfast.snapshot.copy.cuda_runtime import DeviceEvent, DeviceStream, Runtime
from holdfast.snapshot.copy.engines import SAMPLE_BYTES, Places, Sample, SlotTensor, golden
from holdfast.snapshot.copy.tensors import flat

CHUNK_BYTES = 32 << 20
"""Most that is queued at once, and the size of a staging or ring buffer."""

REGISTER_BYTES = 1 << 30
"""Most for one ``cudaHostRegister``: 1 to 2 GB/s, and meanwhile it holds a lock of the driver that launches need."""

RING_BUFFERS = 2

SAMPLED = 256
"""Of so many tensors a few bytes are looked at when a step begins."""

log = get_log(__name__)


@dataclass(slots=True)
class _PendingMark:
    """One `mark`: `started` is written by the copy thread, the rest by the training thread."""

    ready: DeviceEvent | None = None
    started: DeviceEvent | None = None
    error: str = "mark() was not called"


class CudaEngine:
    """Moves state between one device and slots; see `snapshot.copy.engines.CopyEngine` for who calls what, and when.

    `mark` and `fence` never block and never raise. When another method raises, nothing is under way any more, unless
    it is `DeadlineExceeded`: 60 s without progress.

    Raises:
        HoldfastError: the device reported an error, of this or of earlier work.
        ConfigError: a piece is on another device.
    """

    queues = True

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._side = runtime.lowest_stream()
        self._pages = _Pages(runtime)
        self._ring = _Ring(runtime, self._side)
        self._boundary = self._copied = _PendingMark()
        self._kept: list[torch.Tensor] = []
        self._last: DeviceEvent | None = None

    def mark(self) -> None:
        """The state to copy is the state behind all that is queued on the current stream."""
        self._boundary = _PendingMark(error="")
        try:
            self._boundary.ready = self._runtime.current_stream().record_event()
        except RuntimeError as error:
            self._boundary.error = str(error)

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """As what is queued on the current stream leaves them; of `SAMPLED` pieces at a time, others each turn."""
        count = len(pieces)
        first = int(golden(turn, np.array(count))) if count > SAMPLED else 0
        chosen = np.arange(first, first + min(SAMPLED, count)) % max(1, count)
        places = Places([pieces[i] for i in chosen.tolist()])
        start, length, place = places.at(turn)
        index = chosen[places.index]
        found = np.zeros((len(index), SAMPLE_BYTES), np.uint8)
        if not len(index):
            return Sample(index, start, length, place, lambda: found)
        with self._reported("a look at the state"):
            taken = torch.cat(
                [
                    _memory(pieces[i].tensor, s, n)
                    for i, s, n in zip(index.tolist(), start.tolist(), length.tolist(), strict=True)
                ]
            )
            ready = self._runtime.current_stream().record_event()

        def read() -> NDArray[np.uint8]:
            with self._on_side("a look at the state"):
                self._runtime.wait(ready)
            with self._reported("a look at the state"):  # not on the side stream: nothing waits for a copy there
                content, at = taken.cpu().numpy(), 0
            for row, n in enumerate(length.tolist()):
                found[row, :n] = content[at : at + n]
                at += n
            return found

        return Sample(index, start, length, place, read)

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        """Queue the copies of all pieces, in chunks of at most 32 MiB, calling `pause` before each.

        Registers the slot's pages unless they are. They stay registered, and mapped, until `close`, or until a later
        call finds that nobody else holds the object `slot` any more.
        """
        self._copied = boundary = self._boundary
        with self._on_side("the copy to the slot"):
            if boundary.ready is None or boundary.error:
                raise HoldfastError(f"the state of the last boundary cannot be copied: {boundary.error}")
            self._queue(pieces, slot, boundary.ready, False, pause)
        boundary.started = self._last

    def fence(self) -> None:
        """What is queued on the current stream from now on waits for the copy. Call it once `copy` has returned.

        It does not wait for what `copy` has still to queue: `finish` then fails.
        """
        boundary = self._boundary
        if boundary.started is None:
            boundary.error = boundary.error or "the next step began before the whole copy was queued"
            return
        try:
            self._runtime.current_stream().wait_event(boundary.started)
        except RuntimeError as error:
            boundary.error = str(error)

    def finish(self) -> None:
        """Block until every byte of the last `copy` is in its slot. Raises also if `fence` came too early."""
        with self._on_side("the copy to the slot"):
            self._land()
        if self._copied.error:
            raise HoldfastError(f"the state may have changed while it was copied: {self._copied.error}")

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        """Fill live tensors, in place, after all that is queued on the current stream. Blocks until done."""
        compute = self._runtime.current_stream()
        with self._on_side("the load from the slot"):
            self._queue(pieces, slot, compute.record_event(), True, lambda count: None)
            self._land()

    def forget(self) -> None:
        """Nothing is remembered of pieces once they are copied."""

    def close(self) -> None:
        """Wait for what is under way, then let go of all slots. May be called again."""
        with self._on_side("the last transfer"):
            self._land()
            self._pages.release()

    def _queue(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        after: DeviceEvent,
        inward: bool,
        pause: Callable[[int], None],
    ) -> None:
        if strangers := {str(piece.tensor.device) for piece in pieces} - {str(self._runtime.device)}:
            raise ConfigError(f"tensors on {strangers} are not moved by the copy engine of {self._runtime.device}")
        self._land()
        known = self._pages.of(slot)
        self._side.wait_event(after)
        try:
            for chunk in (chunk for piece in pieces for chunk in chunks(piece, CHUNK_BYTES)):
                pause(chunk.bytes)
                self._move(known, chunk, inward)
        except BaseException:  # nothing may write to a slot that the caller gives back
            self._last = self._side.record_event()
            self._land()
            raise
        self._last = self._side.record_event()

    def _move(self, known: _MappedSlot, chunk: SlotTensor, inward: bool) -> None:
        """Queue one chunk, from the slot if `inward`, else to it. What is not plain is brought in order on the way."""
        tensor = chunk.tensor
        self._kept.append(tensor)
        flat = tensor if chunk.is_plain else self._runtime.scratch(tensor)
        if flat is not tensor and not inward:
            self._runtime.copy(flat, tensor)
        for host, device in _runs(known, chunk, flat):
            if not known.registered:
                self._ring.copy(host, device, inward)
            elif inward:
                self._runtime.copy(device, host)
            else:
                self._runtime.copy(host, device)
        if flat is not tensor and inward:
            self._runtime.copy(tensor, flat)

    def _land(self) -> None:
        """Block until what was queued is done, and let go of it."""
        if self._last is not None:
            self._runtime.wait(self._last)
            self._ring.land()
        self._last = None
        self._kept.clear()

    @contextmanager
    def _on_side(self, what: str) -> Iterator[None]:
        with self._reported(what), self._runtime.on(self._side):
            yield

    @contextmanager
    def _reported(self, what: str) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            raise HoldfastError(f"{what} failed on {self._runtime.device}: {error}") from error


def _memory(tensor: torch.Tensor, start: int, count: int) -> torch.Tensor:
    """So many bytes of a tensor's memory, from its first element's on: whole elements, but of tensors with no gaps."""
    tensor = tensor.detach()
    item = tensor.element_size()
    first = start // item
    elements = tensor.as_strided((-(-count // item),), (1,), tensor.storage_offset() + first)
    return elements.resolve_conj().resolve_neg().view(torch.uint8)[:count]


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


def _runs(known: _MappedSlot, chunk: SlotTensor, device: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The bytes of a chunk, in the slot and on the device, such that none crosses from one registration to the next."""
    octets = flat(device).view(torch.uint8)
    start, stop = chunk.offset, chunk.offset + chunk.bytes
    while start < stop:
        end = min(stop, start - start % REGISTER_BYTES + REGISTER_BYTES)
        yield known.host[start:end], octets[start - chunk.offset : end - chunk.offset]
        start = end


@dataclass(frozen=True, slots=True)
class _MappedSlot:
    """A mapped slot. `view` keeps the mapping; `user` tells whether anybody else does."""

    view: memoryview
    user: weakref.ref[memoryview]
    host: torch.Tensor
    registered: Sequence[int]


class _Pages:
    """The slots that the device knows. Nothing may be under way when a method is called."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime
        self._slots: dict[tuple[int, int], _MappedSlot] = {}
        self._refused = False

    def of(self, slot: memoryview) -> _MappedSlot:
        """The slot, registered unless that was refused. Lets go of slots that nobody else holds."""
        view = memoryview(slot)
        host = torch.frombuffer(view, dtype=torch.uint8)
        place = (host.data_ptr(), view.nbytes)
        known = self._slots.pop(place, None)
        self.release([other for other, entry in self._slots.items() if entry.user() is None])
        registered = self._register(*place) if known is None else known.registered
        self._slots[place] = _MappedSlot(view, weakref.ref(slot), host, registered)
        return self._slots[place]

    def release(self, places: Iterable[tuple[int, int]] | None = None) -> None:
        """Unregister slots, all of them by default, and only then let their mappings go."""
        for place in list(self._slots if places is None else places):
            self._unregister(self._slots[place].registered)
            del self._slots[place]

    def _register(self, address: int, count: int) -> list[int]:
        """The ranges: all, or none if one is refused, now or earlier."""
        done: list[int] = []
        for start in range(0, 0 if self._refused else count, REGISTER_BYTES):
            pages = -(-min(REGISTER_BYTES, count - start) // mmap.PAGESIZE)
            if code := self._runtime.register(address + start, pages * mmap.PAGESIZE):
                self._refused = True
                self._unregister(done)
                hint = "copies take the slower way through pinned buffers; is locked memory limited here?"
                log.warning("cudaHostRegister of a slot on %s: error %d; %s", self._runtime.device, code, hint)
                return []
            done.append(address + start)
        return done

    def _unregister(self, addresses: Sequence[int]) -> None:
        for address in reversed(addresses):
            if code := self._runtime.unregister(address):
                log.warning("cudaHostUnregister of a slot on %s: error %d", self._runtime.device, code)


class _Ring:
    """Pinned buffers between the device and memory that it does not know."""

    def __init__(self, runtime: Runtime, side: DeviceStream) -> None:
        self._runtime = runtime
        self._side = side
        self._buffers: deque[torch.Tensor] = deque()
        self._busy: deque[tuple[DeviceEvent, torch.Tensor, torch.Tensor | None]] = deque()

    def copy(self, host: torch.Tensor, device: torch.Tensor, inward: bool) -> None:
        """Queue a copy to the device if `inward`, else to the host, where it is once the ring has landed."""
        self.land(leave=RING_BUFFERS - 1)
        if len(self._buffers) < RING_BUFFERS:
            self._buffers.append(self._runtime.pinned(CHUNK_BYTES))
        self._buffers.rotate(1)
        buffer = self._buffers[0][: host.numel()]
        if inward:
            np.copyto(buffer.numpy(), host.numpy())  # by this thread alone: torch would start others
            self._runtime.copy(device, buffer)
        else:
            self._runtime.copy(buffer, device)
        self._busy.append((self._side.record_event(), buffer, None if inward else host))

    def land(self, leave: int = 0) -> None:
        """Block until all but the newest `leave` transfers are complete."""
        while len(self._busy) > leave:
            event, buffer, host = self._busy[0]
            self._runtime.wait(event)
            if host is not None:
                np.copyto(host.numpy(), buffer.numpy())
            self._busy.popleft()
