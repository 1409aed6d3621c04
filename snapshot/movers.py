"""Who moves bytes between live tensors and slots: `CpuMover` here, `snapshot.cuda` for state on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from smp_daemon.errors import ConfigError
from snapshot import runs
from snapshot.tensors import slot_tensor

TABLES = 8
"""How many sequences of pieces `CpuMover` remembers: a few are in use, the rest are of layouts that are over."""

SAMPLE_BYTES = 32
"""How much of a tensor is looked at to see whether it has changed: half a cache line."""

LOAD_THREADS = 4
"""Most threads that fill live tensors: nothing else runs then."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
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
        read: blocks until the bytes are here; shape [n, `SAMPLE_BYTES`], zeros behind shorter ones. Any thread's.
    """

    index: NDArray[np.int64]
    start: NDArray[np.int64]
    length: NDArray[np.int64]
    read: Callable[[], NDArray[np.uint8]]


class Mover(Protocol):
    """One rank's way between device memory and slots.

    When a step begins ``mark``, then (in the copy thread) ``copy`` and ``finish``; ``fence`` before what was marked
    changes.

    Attributes:
        queues: whether bytes may still be under way when ``copy`` returns.
    """

    queues: bool

    def mark(self) -> None:
        """Training thread, as a step begins: the state to copy is the state as of now."""
        ...

    def sample(self, pieces: Sequence[Piece], turn: int) -> Sample:
        """A few bytes of the pieces' memory as they are now, other ones each `turn`; the same ones for equal turns and
        lengths. Any thread's; returns at once."""
        ...

    def copy(self, pieces: Sequence[Piece], slot: memoryview, pause: Callable[[int], None]) -> None:
        """Copy thread: bring all pieces into the slot. On a GPU they may still be under way when it returns.

        Args:
            pause: called before each batch with its length in bytes; may block, to pace the copy, or raise, to end it.
        """
        ...

    def fence(self) -> None:
        """Training thread, once ``copy`` has returned: after this the live tensors may be changed."""
        ...

    def finish(self) -> None:
        """Copy thread: blocks until all bytes are in the slot."""
        ...

    def load(self, pieces: Sequence[Piece], slot: memoryview) -> None:
        """Fill live tensors from a slot, in place; blocks until done."""
        ...

    def close(self) -> None:
        """Let go of everything; idempotent."""
        ...


class CpuMover:
    """State in host memory: streaming copies, run by run."""

    queues = False

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}
        self._places: dict[int, _Places] = {}

    def mark(self) -> None:
        """Nothing to note: what was done to the state is done."""

    def sample(self, pieces: Sequence[Piece], turn: int) -> Sample:
        places = self._places.get(id(pieces))
        if places is None or places.pieces is not pieces:
            if len(self._places) >= TABLES:
                self._places.clear()
            places = self._places[id(pieces)] = _Places.of(pieces)
        return places.sample(turn)

    def copy(self, pieces: Sequence[Piece], slot: memoryview, pause: Callable[[int], None]) -> None:
        table = self._table(pieces)
        base = np.array([0, _address(slot), 0], dtype=np.uint64)
        for batch in table.batches:
            pause(int(batch[:, 2].sum()))
            runs.copy(batch + base)
        for piece in table.odd:
            pause(piece.bytes)
            _in_slot(piece, slot).copy_(piece.tensor.detach())

    def fence(self) -> None:
        """Nothing is under way once `copy` has returned."""

    def finish(self) -> None:
        """Nothing is under way once `copy` has returned."""

    def load(self, pieces: Sequence[Piece], slot: memoryview) -> None:
        rows = [(_address(slot) + p.offset, p.tensor.data_ptr(), p.bytes) for p in pieces if p.is_plain]
        threads = max(1, min(LOAD_THREADS, len(os.sched_getaffinity(0))))
        with ThreadPoolExecutor(threads, "load") as pool:
            list(pool.map(runs.copy, runs.batches(runs.make_runs(rows))))
        for piece in pieces:
            if not piece.is_plain:
                piece.tensor.detach().copy_(_in_slot(piece, slot))

    def close(self) -> None:
        self._tables.clear()
        self._places.clear()

    def _table(self, pieces: Sequence[Piece]) -> _Table:
        """Made once for as long as the same pieces come."""
        table = self._tables.get(id(pieces))
        if table is None:
            if len(self._tables) >= TABLES:
                self._tables.clear()
            plain = [(p.tensor.data_ptr(), p.offset, p.bytes) for p in pieces if p.is_plain]
            odd = [piece for piece in pieces if not piece.is_plain]
            table = self._tables[id(pieces)] = _Table(pieces, runs.batches(runs.make_runs(plain)), odd)
        return table


class DeviceMovers:
    """A mover for each device that holds state."""

    def __init__(self, movers: Mapping[torch.device, Mover]) -> None:
        self._movers = dict(movers)
        self.queues = any(mover.queues for mover in self._movers.values())
        self._parts: dict[int, tuple[Sequence[Piece], list[tuple[Mover, tuple[Piece, ...]]]]] = {}

    def mark(self) -> None:
        for mover in self._movers.values():
            mover.mark()

    def sample(self, pieces: Sequence[Piece], turn: int) -> Sample:
        numbers = {id(piece): i for i, piece in enumerate(pieces)}
        taken = [(mover.sample(part, turn), part) for mover, part in self._divide(pieces)]
        if not taken:
            return CpuMover().sample(pieces, turn)
        index = [np.array([numbers[id(part[i])] for i in each.index.tolist()], np.int64) for each, part in taken]
        samples = [each for each, _ in taken]
        return Sample(
            np.concatenate(index),
            np.concatenate([each.start for each in samples]),
            np.concatenate([each.length for each in samples]),
            lambda: np.concatenate([each.read() for each in samples]),
        )

    def copy(self, pieces: Sequence[Piece], slot: memoryview, pause: Callable[[int], None]) -> None:
        for mover, part in self._divide(pieces):
            mover.copy(part, slot, pause)

    def fence(self) -> None:
        for mover in self._movers.values():
            mover.fence()

    def finish(self) -> None:
        for mover in self._movers.values():
            mover.finish()

    def load(self, pieces: Sequence[Piece], slot: memoryview) -> None:
        for mover, part in self._divide(pieces):
            mover.load(part, slot)

    def close(self) -> None:
        self._parts.clear()
        for mover in self._movers.values():
            mover.close()

    def _divide(self, pieces: Sequence[Piece]) -> list[tuple[Mover, tuple[Piece, ...]]]:
        """The same tuples for the same pieces, as movers remember what they were given."""
        known = self._parts.get(id(pieces))
        if known is None:
            if len(self._parts) >= TABLES:
                self._parts.clear()
            by_device: dict[torch.device, list[Piece]] = {}
            for piece in pieces:
                by_device.setdefault(piece.tensor.device, []).append(piece)
            parts = [(self._movers[device], tuple(part)) for device, part in by_device.items()]
            known = self._parts[id(pieces)] = (pieces, parts)
        return known[1]


def sampled(lengths: NDArray[np.int64], turn: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Where in memory of so many bytes a sample of that `turn` starts, and how long it is: whole `SAMPLE_BYTES` but at
    the end. Successive turns go far through it, so that nearby ones look at different parts."""
    lines = np.maximum(1, -(-lengths // SAMPLE_BYTES))
    start = (turn * 0x9E3779B1 % (1 << 31)) % lines * SAMPLE_BYTES
    return start, np.minimum(SAMPLE_BYTES, lengths - start)


def choose_mover(devices: Collection[torch.device]) -> Mover:
    """A mover for state on these devices.

    Raises:
        ConfigError: there is state on a device of another kind than CPU and CUDA.
    """
    host = CpuMover()
    others = {device for device in devices if device.type != "cpu"}
    if not others:
        return host
    from snapshot.cuda import CudaMover
    from snapshot.cuda_runtime import TorchRuntime

    if unknown := [str(device) for device in others if device.type != "cuda"]:
        raise ConfigError(f"there is state on {', '.join(unknown)}: only state on CPUs and CUDA devices is captured")
    return DeviceMovers({torch.device("cpu"): host, **{device: CudaMover(TorchRuntime(device)) for device in others}})


@dataclass(frozen=True, slots=True)
class _Table:
    """Addresses are those of `pieces`, which it keeps alive."""

    pieces: Sequence[Piece]
    batches: list[runs.Runs]
    odd: list[Piece]


@dataclass(frozen=True, slots=True)
class _Places:
    """Where pieces lie that have any bytes. Of those that are not plain only the first element is looked at.

    Attributes:
        table: what `runs.copy` takes, for the first bytes of each, as if they were copied to address 0 and on.
    """

    pieces: Sequence[Piece]
    index: NDArray[np.int64]
    bytes: NDArray[np.int64]
    table: runs.Runs

    @classmethod
    def of(cls, pieces: Sequence[Piece]) -> _Places:
        rows = [
            (i, p.tensor.data_ptr(), p.bytes if p.is_plain else p.tensor.element_size())
            for i, p in enumerate(pieces)
            if p.bytes
        ]
        index, address, lengths = np.array(rows, np.int64).reshape(-1, 3).T.copy()
        target = SAMPLE_BYTES * np.arange(len(index), dtype=np.int64)
        table = np.stack([address, target, np.zeros_like(target)], axis=1).astype(np.uint64)
        return cls(pieces, index, lengths, table)

    def sample(self, turn: int) -> Sample:
        start, length = sampled(self.bytes, turn)
        found = np.empty((len(start), SAMPLE_BYTES), np.uint8)
        if length.min(initial=SAMPLE_BYTES) < SAMPLE_BYTES:
            found[length < SAMPLE_BYTES] = 0
        table = self.table.copy()
        table[:, 0] += start.astype(np.uint64)
        table[:, 1] += np.uint64(found.ctypes.data)
        table[:, 2] = length
        runs.copy(table)
        return Sample(self.index, start, length, lambda: found)


def _address(slot: memoryview) -> int:
    return int(np.frombuffer(slot, np.uint8).ctypes.data)


def _in_slot(piece: Piece, slot: memoryview) -> torch.Tensor:
    return slot_tensor(slot, piece.offset, piece.tensor.dtype, tuple(piece.tensor.shape))
