"""Who moves bytes between live tensors and slots: `CpuEngine` here, `snapshot.copy.cuda` for state on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.runs import Runs
from holdfast.snapshot.copy.tensors import octets, slot_tensor

TABLES = 8
"""How many sequences of pieces `CpuEngine` remembers: a few are in use, the rest are of layouts that are over."""

SAMPLE_BYTES = 32
"""How much of a tensor is looked at to see whether it has changed: half a cache line."""

LOAD_THREADS = 4
"""Most threads that fill live tensors: nothing else runs then."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotTensor:
    """A dense tensor and its place in a slot, in bytes; and what it is called."""

    tensor: torch.Tensor
    offset: int
    bytes: int
    name: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are its memory, in order."""
        return self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()


@dataclass(frozen=True, slots=True)
class Sample:
    """Some bytes of some pieces.

    Attributes:
        index, start, length: of which piece, from which byte of its memory on, and how many: int64 arrays of one shape.
        place: where the slot has them, from the beginning of the piece's place on; -1: it has them in another form.
        read: blocks until the bytes are here; shape [n, `SAMPLE_BYTES`], zeros behind shorter ones. Any thread's.
    """

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    place: NDArray[np.int64]
    read: Callable[[], NDArray[np.uint8]]


class Transfer(Protocol):
    """The state of one moment on its way into slots. The copy thread's, but for ``fence``."""

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        """Bring pieces into the slot. On a GPU they may still be under way when it returns. May be called again.

        Args:
            pause: called before each batch with its length in bytes; may block, to pace the copy, or raise, to end it.
                With 0, where nothing need be paced: only to raise.
        """
        ...

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """A few bytes of pieces, as in `CopyEngine.sample`, as they are when what was copied so far has been read."""
        ...

    def guard(self) -> None:
        """``fence`` is to wait for what was asked for until now, and for nothing that follows."""
        ...

    def fence(self) -> None:
        """Training thread, once ``guard`` has returned: after this live tensors may be changed. Never blocks it."""
        ...

    def finish(self) -> None:
        """Blocks until all bytes are in the slot, as they were at that moment; raises if they are not."""
        ...

    def settle(self) -> None:
        """Blocks until nothing is under way any more, complete or not: the slot may be given back.

        Raises:
            DeadlineExceeded: it may still be written to.
        """
        ...


class Filling(Protocol):
    """Live tensors that are being filled."""

    def take(self, table: Runs) -> None:
        """Bring runs of host memory into live tensors. Any thread's, several at a time; their sources may then go."""
        ...

    def finish(self) -> None:
        """Blocks until all of it is there."""
        ...


class CopyEngine(Protocol):
    """One rank's way between live tensors and slots.

    Attributes:
        queues: whether bytes may still be under way when ``Transfer.copy`` returns.
    """

    @property
    def queues(self) -> bool: ...

    def cover(self, devices: Collection[torch.device]) -> None:
        """There is state on these devices. Raises `ConfigError` if there cannot be."""
        ...

    def enter_thread(self) -> None:
        """Called first in each thread of ours that copies."""
        ...

    def capturing(self) -> bool:
        """Whether what the training thread does is being recorded, as a CUDA graph is, and not done. Its own thread's
        question."""
        ...

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        """Training thread, between steps: these slots will be copied into; others, that nobody holds, will not be any
        more. Blocks, for seconds with large ones.

        Args:
            turn: entered for each part of the work that processes of one node must do one after the other.
        """
        ...

    def mark(self) -> Transfer:
        """Training thread, as a step begins: the state to copy is the state as of now."""
        ...

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """A few bytes of the pieces' memory as they are now, other ones each `turn`; the same ones for equal turns and
        lengths. Any thread's; returns at once."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Training thread: the bytes of a few small contiguous tensors, which nobody changes any more. Returns at once;
        what it returns blocks until they are here, and may be called by any thread."""
        ...

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        """Who fills which of them: `fill` of each takes the plain ones."""
        ...

    def fill(self) -> Filling:
        """Begin to fill live tensors, in place."""
        ...

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        """Filling live tensors from a slot, in place; blocks until done."""
        ...

    def forget(self) -> None:
        """Let go of pieces: what is remembered of them would keep their memory. Any thread's, at any time."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent. Raises `DeadlineExceeded` if a slot may still be written to."""
        ...


class CpuEngine:
    """State in host memory: streaming copies, run by run. It is its own `Transfer` and `Filling`, as nothing is ever
    under way once a call has returned."""

    queues = False

    def __init__(self) -> None:
        self._tables: dict[int, Table] = {}
        self._places: dict[int, Places] = {}

    def cover(self, devices: Collection[torch.device]) -> None:
        if strangers := [str(device) for device in devices if device.type != "cpu"]:
            raise ConfigError(f"there is state on {', '.join(strangers)}, and only state on CPUs is copied here")

    def enter_thread(self) -> None:
        """Threads are alike."""

    def capturing(self) -> bool:
        return False

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        """A mapped slot is ready."""

    def mark(self) -> Transfer:
        return self

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        places = remembered(self._places, pieces, Places)
        start, length, place = places.at(turn)
        found = np.empty((len(start), SAMPLE_BYTES), np.uint8)
        if length.min(initial=SAMPLE_BYTES) < SAMPLE_BYTES:
            found[length < SAMPLE_BYTES] = 0
        table = np.empty((len(start), 3), np.uint64)
        table[:, 0] = places.address + start
        table[:, 1] = places.target
        table[:, 1] += np.uint64(found.ctypes.data)
        table[:, 2] = length
        runs.copy(table)
        return Sample(places.index, start, length, place, lambda: found)

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[np.uint8]]]:
        found = [octets(tensor).numpy() for tensor in tensors]
        return lambda: found

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        table = remembered(self._tables, pieces, Table)
        base = np.array([0, address_of(slot), 0], dtype=np.uint64)
        for batch in table.batches:
            pause(int(batch[:, 2].sum()))
            runs.copy(batch + base)
        for piece in table.odd:
            pause(piece.bytes)
            _in_slot(piece, slot).copy_(piece.tensor.detach())

    def guard(self) -> None:
        """Nothing is under way."""

    def fence(self) -> None:
        """Nothing is under way."""

    def finish(self) -> None:
        """Nothing is under way."""

    def settle(self) -> None:
        """Nothing is under way."""

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        return [(self, pieces)]

    def fill(self) -> Filling:
        return self

    def take(self, table: Runs) -> None:
        runs.copy(table)

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        rows = [(address_of(slot) + p.offset, p.tensor.data_ptr(), p.bytes) for p in pieces if p.is_plain]
        with ThreadPoolExecutor(load_threads(), "load") as pool:
            list(pool.map(runs.copy, runs.batches(runs.make_runs(rows))))
        for piece in pieces:
            if not piece.is_plain:
                piece.tensor.detach().copy_(_in_slot(piece, slot))

    def forget(self) -> None:
        self._tables.clear()
        self._places.clear()

    def close(self) -> None:
        self.forget()


def load_threads() -> int:
    """How many threads fill live tensors."""
    return max(1, min(LOAD_THREADS, len(os.sched_getaffinity(0))))


def golden(turn: int, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of so many parts a turn takes: turns go through them by the golden section. Whatever the distance from one
    turn to the next, nearby ones take parts that lie far from each other, and every part's turn comes."""
    fraction = (turn * 0x9E3779B97F4A7C15 % (1 << 64)) >> 33
    return (count >> 31) * fraction + ((count & 0x7FFFFFFF) * fraction >> 31)  # in 64 bits


class Places:
    """Where to look at pieces that have any bytes: at `SAMPLE_BYTES` of plain ones, at one element of others."""

    def __init__(self, pieces: Sequence[SlotTensor]) -> None:
        self.pieces = pieces  # the addresses are theirs as long as they are held
        held = [(i, piece) for i, piece in enumerate(pieces) if piece.bytes]
        self.index = np.array([i for i, _ in held], np.int64)
        self.address = np.array([piece.tensor.data_ptr() for _, piece in held], np.int64)
        self.target = SAMPLE_BYTES * np.arange(len(held), dtype=np.uint64)
        self._bytes = np.array([piece.bytes for _, piece in held], np.int64)
        odd = [(row, piece.tensor) for row, (_, piece) in enumerate(held) if not piece.is_plain]
        self._odd = np.array([row for row, _ in odd], np.int64)
        self._item = np.array([tensor.element_size() for _, tensor in odd], np.int64)
        self._lazy = np.array([tensor.is_conj() or tensor.is_neg() for _, tensor in odd], bool)
        depth = max((tensor.dim() for _, tensor in odd), default=0)
        self._sizes = _table_of([tensor.shape for _, tensor in odd], depth, 1)
        self._strides = _table_of([tensor.stride() for _, tensor in odd], depth, 0)

    def at(self, turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """`Sample.start`, `length` and `place` of that turn, whose parts are chosen by `golden`."""
        count = -(-self._bytes // SAMPLE_BYTES)
        count[self._odd] = self._bytes[self._odd] // self._item
        chosen = golden(turn, count)
        start = chosen * SAMPLE_BYTES
        length = np.minimum(SAMPLE_BYTES, self._bytes - start)
        place = start.copy()
        if len(self._odd):
            place[self._odd] = np.where(self._lazy, -1, chosen[self._odd] * self._item)
            start[self._odd], length[self._odd] = self._offsets(chosen[self._odd]) * self._item, self._item
        return start, length, place

    def _offsets(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many elements from the first in memory the element of that number is, in row-major order."""
        offset = np.zeros_like(number)
        for size, stride in zip(self._sizes.T[::-1], self._strides.T[::-1], strict=True):
            offset += number % size * stride
            number = number // size
        return offset


class Table:
    """Pieces as batches of runs from their memory to offsets in a slot; and the `odd` ones, that are not plain.

    Addresses are those of `pieces`, which it keeps alive.
    """

    def __init__(
        self, pieces: Sequence[SlotTensor], batch_bytes: int | None = None, border_bytes: int | None = None
    ) -> None:
        """`batch_bytes`: see `runs.batches`. `border_bytes`: no run goes across a multiple of it in the slot."""
        self.pieces = pieces
        self.odd = [piece for piece in pieces if not piece.is_plain]
        table = runs.merged(runs.make_runs([(p.tensor.data_ptr(), p.offset, p.bytes) for p in pieces if p.is_plain]))
        if border_bytes is not None:
            table = runs.cut(table, 1, border_bytes)
        self.batches = runs.batches(table, batch_bytes)


class _Remembers(Protocol):
    """Keeps the pieces that it was made of, so that their id is not given to others."""

    @property
    def pieces(self) -> Sequence[SlotTensor]: ...


R = TypeVar("R", bound=_Remembers)


def remembered(known: dict[int, R], pieces: Sequence[SlotTensor], make: Callable[[Sequence[SlotTensor]], R]) -> R:
    """What was made of these pieces, or is now; what was not asked for longest makes room. Any thread's."""
    found = known.pop(id(pieces), None)
    if found is None:
        found = make(pieces)
        while len(known) >= TABLES:
            known.pop(next(iter(known), 0), None)
    known[id(pieces)] = found
    return found


def _table_of(rows: Sequence[Sequence[int]], width: int, filler: int) -> NDArray[np.int64]:
    """Rows of one width."""
    return np.array([[*row, *[filler] * (width - len(row))] for row in rows], np.int64).reshape(len(rows), width)


def address_of(slot: memoryview) -> int:
    """Where it begins in memory."""
    return int(np.frombuffer(slot, np.uint8).ctypes.data)


def _in_slot(piece: SlotTensor, slot: memoryview) -> torch.Tensor:
    return slot_tensor(slot, piece.offset, piece.tensor.dtype, tuple(piece.tensor.shape))
