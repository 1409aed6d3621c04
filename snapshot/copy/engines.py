"""Copy engines move bytes between live tensors and slots: `CpuEngine` here, `snapshot.copy.cuda` for state on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.smp_daemon.shared.priority import let_waker_go_on
from holdfast.smp_daemon.shared.records import Unit
from holdfast.snapshot.copy import runs
from holdfast.snapshot.copy.runs import Runs
from holdfast.snapshot.copy.tensors import octets, slot_tensor
from holdfast.snapshot.copy.unit_digests import UnitDigests, WholeUnits

TABLES = 8
"""How many sequences of pieces an engine remembers: a few are in use, the rest are of earlier layouts."""

SAMPLE_BYTES = 32
"""How many bytes of a tensor are looked at to see whether it has changed: half a cache line."""

FEW_THREADS, LOAD_THREADS = 4, 16
"""How many threads fill live tensors, if there are as many cores: at least, and at most. Nothing else runs then."""

Pause = Callable[[int], bool]
"""Called before each batch of a copy with its length in bytes: blocks, to pace the copy, or raises, to end it. Returns
whether somebody waits for the copy. Called with 0 where nothing is paced: then it does not block."""


@dataclass(frozen=True, slots=True, eq=False)
class SlotTensor:
    """A dense tensor, its place in a slot in bytes, and its name."""

    tensor: torch.Tensor
    offset: int
    bytes: int
    name: str = ""

    @property
    def is_plain(self) -> bool:
        """Whether its bytes in the slot are its memory, in order."""
        return self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()


@dataclass(frozen=True, slots=True)
class Sample:
    """A few bytes of some pieces.

    Attributes:
        index, start, length: which piece, from which byte of its memory on, and how many bytes: int64 arrays of one
            shape.
        place: where the slot has them, from the beginning of the piece's place on; -1: it has them in another form.
        read: blocks until the bytes are here; shape [n, `SAMPLE_BYTES`], shorter ones padded with zeros. Any thread may
            call it.
    """

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    place: NDArray[np.int64]
    read: Callable[[], NDArray[np.uint8]]


class Transfer(Protocol):
    """The state of one moment on its way into slots. Used by the copy thread, except ``fence``."""

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Pause,
        digests: UnitDigests | None = None,
    ) -> None:
        """Copy pieces into the slot. On a GPU the copies may still be in progress when it returns. May be called again.

        Args:
            digests: notes the digests of units that are copied whole, where that saves reading them again. Nothing
                else may be copied into these units. Only for engines that have `digests`.
        """
        ...

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """A few bytes of pieces, as in `CopyEngine.sample`, taken once everything copied so far has been read."""
        ...

    def guard(self) -> None:
        """Have ``fence`` wait for everything that was requested until now, and for nothing that follows."""
        ...

    def fence(self) -> None:
        """Training thread, once ``guard`` has returned: from now on live tensors may change. Never blocks that
        thread."""
        ...

    def finish(self) -> None:
        """Block until all bytes are in the slot, as they were at that moment; raises if they are not."""
        ...

    def settle(self) -> None:
        """Block until no transfer is in progress any more, complete or not: the slot may be given back.

        Raises:
            DeadlineExceeded: the slot may still be written to.
        """
        ...


GROUP_BYTES = 16 << 20
"""How much of a slot, in contiguous units, a thread loads at a time. Not a fixed share: cores may differ in speed."""

Take = Callable[[Sequence[tuple[Unit, Runs]]], list[bool]]
"""Takes units, and the runs of each into live tensors. Copies the runs of those that have their digest; returns which
have. Together they are best `GROUP_BYTES` long."""


class Filling(Protocol):
    """Fills live tensors from units, each of which is checked before anything of it gets there."""

    def taking(self) -> AbstractContextManager[Take]:
        """In this block, the thread that entered it may call the function that this gives. The unit may go when that
        returns. Several threads may each enter one at once."""
        ...

    def finish(self) -> None:
        """Block until all of it is there."""
        ...


class CopyEngine(Protocol):
    """Copies between one rank's live tensors and slots.

    Attributes:
        queues: whether bytes may still be in progress when ``Transfer.copy`` returns.
        digests: whether ``Transfer.copy`` digests units on their way.
    """

    @property
    def queues(self) -> bool: ...

    @property
    def digests(self) -> bool: ...

    def cover(self, devices: Collection[torch.device]) -> None:
        """Prepare for state on these devices. Raises `ConfigError` if it cannot be copied."""
        ...

    def enter_thread(self) -> None:
        """Called first in each of holdfast's threads that copies."""
        ...

    def capturing(self) -> bool:
        """Training thread: whether its work is being recorded, as into a CUDA graph, instead of done."""
        ...

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        """Get these slots ready to be copied into; slots that nobody holds any more are no longer used. Called by the
        thread that reserves slots, or by the training thread between steps. Blocks, for seconds if slots are large.

        Args:
            turn: entered for each part of the work that processes of one node must do one after the other.
        """
        ...

    def mark(self) -> Transfer:
        """Training thread, as a step begins: the state to copy is the state as it is now."""
        ...

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        """A few bytes of the pieces' memory as they are now; different ones each `turn`, and the same for equal turns
        and lengths. Any thread may call it; returns at once."""
        ...

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[np.uint8]]]:
        """Training thread: the bytes of a few small contiguous tensors that nobody changes any more. Returns at once;
        the function it returns blocks until they are here, in any thread."""
        ...

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        """The pieces that each engine fills: its `fill` takes the plain ones."""
        ...

    def fill(self) -> Filling:
        """Begin to fill live tensors, in place."""
        ...

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        """Fill live tensors from a slot, in place; blocks until done."""
        ...

    def forget(self) -> None:
        """Forget all pieces, whose memory would otherwise be kept. Any thread may call it, at any time."""
        ...

    def settle(self) -> None:
        """Block until no transfer is in progress, complete or not. Raises `DeadlineExceeded` if a slot may still be
        written to. Called once no thread copies any more, before `close` of any engine that shares the slots."""
        ...

    def close(self) -> None:
        """Release everything; idempotent. Raises as `settle`."""
        ...


class CpuEngine:
    """State in host memory: streaming copies, run by run. It is its own `Transfer` and `Filling`, as every copy is
    complete when its call returns."""

    queues = False

    @property
    def digests(self) -> bool:
        return runs.digests()

    def __init__(self) -> None:
        self._tables: dict[tuple[int, int], Table] = {}
        self._places: dict[tuple[int, int], Places] = {}

    def cover(self, devices: Collection[torch.device]) -> None:
        if strangers := [str(device) for device in devices if device.type != "cpu"]:
            raise ConfigError(f"there is state on {', '.join(strangers)}, and only state on CPUs is copied here")

    def enter_thread(self) -> None:
        let_waker_go_on()

    def capturing(self) -> bool:
        return False

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        """Nothing to do: a mapped slot is ready."""

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
        # Copies: torch never again resizes memory that it has lent to NumPy, and the user may resize inputs.
        found = [octets(tensor).clone().numpy() for tensor in tensors]
        return lambda: found

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Pause,
        digests: UnitDigests | None = None,
    ) -> None:
        unit_bytes = None if digests is None else digests.unit_bytes
        table = remembered(self._tables, pieces, partial(Table, unit_bytes=unit_bytes), unit_bytes or 0)
        base = np.array([0, address_of(slot), 0], dtype=np.uint64)
        for batch, ends, units in table.whole_units:
            assert digests is not None
            pause(int(batch[:, 2].sum()))
            values = np.empty(len(units), np.uint64)
            runs.copy_digested(batch + base, ends, values)
            digests.note(units, values)
        for batch in table.batches:
            pause(int(batch[:, 2].sum()))
            runs.copy(batch + base)
        for piece in table.odd:
            pause(piece.bytes)
            _in_slot(piece, slot).copy_(piece.tensor.detach())

    def guard(self) -> None:
        """Nothing is in progress."""

    def fence(self) -> None:
        """Nothing is in progress."""

    def finish(self) -> None:
        """Nothing is in progress."""

    def settle(self) -> None:
        """Nothing is in progress."""

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        return [(self, pieces)]

    def fill(self) -> Filling:
        return self

    def taking(self) -> AbstractContextManager[Take]:
        return nullcontext(_take)

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
    """Number of threads that fill live tensors. Each digests and copies 3 to 6 GB/s, and a device takes 50: a rank
    takes its share of the cores, on which nothing else runs yet."""
    cores = len(os.sched_getaffinity(0))
    share = cores // max(1, int(os.environ.get("LOCAL_WORLD_SIZE", "1")))
    return max(1, min(FEW_THREADS, cores), min(LOAD_THREADS, share))


def golden(turn: int, count: NDArray[np.int64]) -> NDArray[np.int64]:
    """Which of `count` parts a turn takes: turns go through them by the golden section. Whatever the distance from one
    turn to the next, nearby turns take parts that lie far apart, and every part is taken in time."""
    fraction = (turn * 0x9E3779B97F4A7C15 % (1 << 64)) >> 33
    return (count >> 31) * fraction + ((count & 0x7FFFFFFF) * fraction >> 31)  # in two parts, each within 64 bits


class Places:
    """Where to look at pieces that are not empty: at `SAMPLE_BYTES` of plain ones, at one element of others."""

    def __init__(self, pieces: Sequence[SlotTensor]) -> None:
        self.pieces = pieces  # held so that their addresses stay valid
        held = [(i, piece) for i, piece in enumerate(pieces) if piece.bytes]
        self.index = np.array([i for i, _ in held], np.int64)
        self.address = np.array([piece.tensor.data_ptr() for _, piece in held], np.int64)
        self.target = SAMPLE_BYTES * np.arange(len(held), dtype=np.uint64)
        self._bytes = np.array([piece.bytes for _, piece in held], np.int64)
        odd = [(row, piece.tensor) for row, (_, piece) in enumerate(held) if not piece.is_plain]
        self._odd = np.array([row for row, _ in odd], np.int64)
        self._item = np.array([tensor.element_size() for _, tensor in odd], np.int64)
        self._count = -(-self._bytes // SAMPLE_BYTES)  # into how many parts each is divided
        self._count[self._odd] = self._bytes[self._odd] // self._item
        self._lazy = np.array([tensor.is_conj() or tensor.is_neg() for _, tensor in odd], bool)
        depth = max((tensor.dim() for _, tensor in odd), default=0)
        self._sizes = _table_of([tensor.shape for _, tensor in odd], depth, 1)
        self._strides = _table_of([tensor.stride() for _, tensor in odd], depth, 0)

    def at(self, turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
        """`Sample.start`, `length` and `place` of that turn; `golden` chooses the parts."""
        chosen = golden(turn, self._count)
        start = chosen * SAMPLE_BYTES
        length = np.minimum(SAMPLE_BYTES, self._bytes - start)
        place = start.copy()
        if len(self._odd):
            place[self._odd] = np.where(self._lazy, -1, chosen[self._odd] * self._item)
            start[self._odd], length[self._odd] = self._offsets(chosen[self._odd]) * self._item, self._item
        return start, length, place

    def _offsets(self, number: NDArray[np.int64]) -> NDArray[np.int64]:
        """How many elements after the first in memory the element of that row-major number is."""
        offset = np.zeros_like(number)
        for size, stride in zip(self._sizes.T[::-1], self._strides.T[::-1], strict=True):
            offset += number % size * stride
            number = number // size
        return offset


class Table:
    """Pieces as batches of runs from their memory to offsets in a slot; `odd`: the pieces that are not plain.

    The addresses are those of `pieces`, which it keeps alive.

    Attributes:
        whole_units: batches of runs that fill whole units, see `WholeUnits`; they are not among `batches`.
    """

    def __init__(
        self,
        pieces: Sequence[SlotTensor],
        batch_bytes: int | None = None,
        border_bytes: int | None = None,
        unit_bytes: int | None = None,
        owner: Callable[[torch.Tensor], int] | None = None,
    ) -> None:
        """`batch_bytes`: see `runs.batches`. `border_bytes`: no run crosses a multiple of it in the slot. `unit_bytes`:
        length of units to keep whole; None: none. `owner`: tells of what a tensor is a part, whose border no run
        crosses either."""
        self.pieces = pieces
        self._held = tuple(pieces)  # the caller may change a list
        self._addresses = self._where()
        self.odd = [piece for piece in pieces if not piece.is_plain]
        self.whole_units: list[tuple[Runs, NDArray[np.uint8], NDArray[np.int64]]] = []
        plain = [piece for piece in pieces if piece.bytes and piece.is_plain]
        owners = None if owner is None else [owner(piece.tensor) for piece in plain]
        table = runs.merged(runs.make_runs([(p.tensor.data_ptr(), p.offset, p.bytes) for p in plain]), owners)
        if border_bytes is not None:
            table = runs.cut(table, 1, border_bytes)
        if unit_bytes is not None:
            units = WholeUnits(table, unit_bytes, batch_bytes)
            self.whole_units, table = units.batches, units.rest
        self.batches = runs.batches(table, batch_bytes)

    def moved(self) -> list[str]:
        """The names of the pieces whose memory was released or replaced since this was made: holding a tensor does not
        hold its memory if somebody calls ``untyped_storage().resize_``."""
        pairs = zip(self._held, self._addresses, self._where(), strict=True)
        return [piece.name for piece, before, now in pairs if before != now]

    def _where(self) -> list[int]:
        return [piece.tensor.data_ptr() for piece in self._held]


class _Remembers(Protocol):
    """Keeps the pieces that it was made of, so that their id is not given to others."""

    @property
    def pieces(self) -> Sequence[SlotTensor]: ...


R = TypeVar("R", bound=_Remembers)


def remembered(
    known: dict[tuple[int, int], R],
    pieces: Sequence[SlotTensor],
    make: Callable[[Sequence[SlotTensor]], R],
    kind: int = 0,
) -> R:
    """The object of that `kind` that `make` made of these pieces, now or earlier; the one unused for longest makes room
    for a new one. Any thread may call it."""
    key = id(pieces), kind
    found = known.pop(key, None)
    if found is None:
        found = make(pieces)
        for oldest in list(known)[: max(0, len(known) - TABLES + 1)]:  # a list, as other threads change it meanwhile
            known.pop(oldest, None)
    known[key] = found
    return found


def _table_of(rows: Sequence[Sequence[int]], width: int, filler: int) -> NDArray[np.int64]:
    """Rows padded with `filler` to one width."""
    return np.array([[*row, *[filler] * (width - len(row))] for row in rows], np.int64).reshape(len(rows), width)


def _take(units: Sequence[tuple[Unit, Runs]]) -> list[bool]:
    """See `Take`. Each copy reads from this core's cache what was digested just before."""
    found = []
    for unit, table in units:
        found.append(unit.matches())
        if found[-1]:
            runs.copy(table)
    return found


def address_of(slot: memoryview) -> int:
    """The address of its first byte in memory."""
    return int(np.frombuffer(slot, np.uint8).ctypes.data)


def _in_slot(piece: SlotTensor, slot: memoryview) -> torch.Tensor:
    return slot_tensor(slot, piece.offset, piece.tensor.dtype, tuple(piece.tensor.shape))
