"""Memory of the emulated device. Freed blocks are handed out again at once, as by a caching allocator.

A tensor of the device is a tensor over a block. When its storage is freed, the next request for the same size on the
same stream gets the block. Work that is still queued on that stream is done before the new owner's, but another stream
that reads the block too late reads the new owner's data.
"""

from __future__ import annotations

import ctypes
import weakref
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass

import torch

ALIGNMENT = 64
DUST = b"\xdd"
"""The byte that fills new blocks."""


@dataclass(eq=False)
class MemoryBlock:
    """A block of memory of a device.

    Attributes:
        device: number of the device.
        stream: the stream that the block was allocated on. Once freed, it is reused only there.
    """

    raw: ctypes.Array[ctypes.c_char]
    address: int
    size: int
    device: int
    stream: object


def _new(size: int) -> ctypes.Array[ctypes.c_char]:
    return (ctypes.c_char * size).from_buffer(bytearray(DUST * size))


class DeviceMemory:
    """All blocks of all devices. Blocks are never returned to the host, so an address always means the same block."""

    def __init__(self, allocate: Callable[[int], ctypes.Array[ctypes.c_char]] = _new) -> None:
        """`allocate` makes memory of that length, filled with `DUST`."""
        self._allocate = allocate
        self._addresses: list[int] = []
        self._blocks: list[MemoryBlock] = []
        self._free: dict[tuple[int, object, int], list[MemoryBlock]] = defaultdict(list)

    def tensor(
        self, device: int, stream: object, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype
    ) -> torch.Tensor:
        """An uninitialised tensor of the device. Its block can be reused as soon as its storage is freed."""
        extent = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True)) if all(shape) else 0
        block = self._take(device, stream, max(1, extent) * dtype.itemsize)
        lease = memoryview(block.raw)
        weakref.finalize(lease, self._free[device, stream, block.size].append, block)
        storage = torch.frombuffer(lease, dtype=dtype).untyped_storage()
        made = torch.empty(0, dtype=dtype)
        return made.set_(storage, 0, shape, strides)  # not a view: a view would keep its base alive

    @property
    def used(self) -> bool:
        """Whether anything was ever made on a device."""
        return bool(self._blocks)

    def find(self, address: int) -> MemoryBlock | None:
        """The block that contains an address; None: the address is in host memory."""
        place = bisect_right(self._addresses, address) - 1
        if place < 0:
            return None
        block = self._blocks[place]
        return block if address < block.address + block.size else None

    def of(self, tensor: torch.Tensor) -> MemoryBlock | None:
        """The block that holds a tensor; None: the tensor is in host memory."""
        return self.find(tensor.untyped_storage().data_ptr())

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the same elements that does not keep the block from being reused."""
        block = self.of(tensor)
        if block is None:
            return tensor
        plain = torch.frombuffer(block.raw, dtype=tensor.dtype, count=block.size // tensor.itemsize)
        plain = plain.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
        plain = plain.conj() if tensor.is_conj() else plain
        return torch._neg_view(plain) if tensor.is_neg() else plain

    def _take(self, device: int, stream: object, count: int) -> MemoryBlock:
        size = -(-count // ALIGNMENT) * ALIGNMENT
        free = self._free[device, stream, size]
        if free:
            return free.pop()
        raw = self._allocate(size)
        block = MemoryBlock(raw, ctypes.addressof(raw), size, device, stream)
        place = bisect_right(self._addresses, block.address)
        self._addresses.insert(place, block.address)
        self._blocks.insert(place, block)
        return block
