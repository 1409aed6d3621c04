"""Who moves bytes between live tensors and slots: `CpuMover` here, `snapshot.cuda` for state on GPUs."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from smp_daemon.errors import ConfigError
from snapshot import runs
from snapshot.tensors import slot_tensor

TABLES = 8
"""How many sequences of pieces `CpuMover` remembers: a few are in use, the rest are of layouts that are over."""

LOAD_THREADS = 4
"""Most threads that fill live tensors: nothing else runs then."""


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """A dense tensor and its place in a slot, in bytes."""

    tensor: torch.Tensor
    offset: int
    bytes: int

    @property
    def is_plain(self) -> bool:
        """Whether its bytes are its memory, in order."""
        return self.tensor.is_contiguous() and not self.tensor.is_conj() and not self.tensor.is_neg()


class Mover(Protocol):
    """One rank's way between device memory and slots.

    At a boundary ``mark``, then (in the copy thread) ``copy`` and ``finish``; ``fence`` before what was marked changes.
    """

    def mark(self) -> None:
        """Training thread, right after ``optim.step()``: the state to copy is the state as of now."""
        ...

    def settle(self) -> None:
        """Training thread: more is to be copied, made just now, which ``fence`` need not wait for."""
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

    def __init__(self) -> None:
        self._tables: dict[int, _Table] = {}

    def mark(self) -> None:
        """Nothing to note: what `optim.step` did is done when it returns."""

    def settle(self) -> None:
        """Nothing to note: what was made is there."""

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
        self._parts: dict[int, tuple[Sequence[Piece], list[tuple[Mover, tuple[Piece, ...]]]]] = {}

    def mark(self) -> None:
        for mover in self._movers.values():
            mover.mark()

    def settle(self) -> None:
        for mover in self._movers.values():
            mover.settle()

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


def _address(slot: memoryview) -> int:
    return int(np.frombuffer(slot, np.uint8).ctypes.data)


def _in_slot(piece: Piece, slot: memoryview) -> torch.Tensor:
    return slot_tensor(slot, piece.offset, piece.tensor.dtype, tuple(piece.tensor.shape))
