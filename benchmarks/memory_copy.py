"""How fast state is copied into a slot: the capture's own copy, alternating with memcpy of the same bytes."""

from __future__ import annotations

import mmap
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.snapshot.copy.engines import CpuEngine, SlotTensor

REPEATS = 7


@dataclass(frozen=True, slots=True)
class CopyRow:
    """Result for one kind of state. Throughputs are in 10^9 bytes per second."""

    what: str
    tensors: int
    bytes: int
    memcpy_gbps: float
    ours_gbps: float

    @property
    def ratio(self) -> float:
        """Our throughput divided by memcpy's."""
        return self.ours_gbps / self.memcpy_gbps


def measure_copies(part: int = 1) -> list[CopyRow]:
    """Compare large tensors with one memcpy each, and many small ones with memcpy of one flat buffer. About 20 s.

    Args:
        part: divides the number of tensors.
    """
    return [
        _row(48 // part, 2_732_032, flat=False),
        _row(10_000 // part, 1024, flat=True),
        _row(10_000 // part, 13_000, flat=True),
    ]


def _row(count: int, length: int, *, flat: bool) -> CopyRow:
    """Measure `count` tensors of `length` float32 numbers."""
    against = "memcpy of one flat buffer" if flat else "memcpy one by one"
    what = f"{count:,} tensors of {4 * length:,} bytes, {against}"
    tensors = [torch.full((length,), float(i)) for i in range(count)]
    total = 4 * count * length
    slot = memoryview(mmap.mmap(-1, total))
    np.frombuffer(slot, np.uint8)[:] = 1
    pieces = tuple(SlotTensor(tensor, 4 * length * i, 4 * length) for i, tensor in enumerate(tensors))
    engine = CpuEngine()
    target = np.ones(total, np.uint8)
    sources = [np.full(total, 1, np.uint8)] if flat else [tensor.numpy().view(np.uint8) for tensor in tensors]

    def memcpy() -> None:
        at = 0
        for source in sources:
            np.copyto(target[at : at + source.nbytes], source)
            at += source.nbytes

    def ours() -> None:
        engine.copy(pieces, slot, lambda count: True)

    memcpy_s, ours_s = _in_turn([memcpy, ours])
    return CopyRow(what, count, total, total / memcpy_s / 1e9, total / ours_s / 1e9)


def _in_turn(works: Sequence[Callable[[], None]]) -> list[float]:
    """Run `works` in turn, `REPEATS` times after a round that does not count. Returns the median seconds of each."""
    times: list[list[float]] = [[] for _ in works]
    for _ in range(REPEATS + 1):
        for work, took in zip(works, times, strict=True):
            began = time.perf_counter()
            work()
            took.append(time.perf_counter() - began)
    return [statistics.median(took[1:]) for took in times]
