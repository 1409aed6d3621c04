"""Chooses the copy engine for the state on each device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_runtime import Runtime
from holdfast.snapshot.copy.engines import (
    CopyEngine,
    CpuEngine,
    Filling,
    Pause,
    Sample,
    SlotTensor,
    Transfer,
    remembered,
)
from holdfast.snapshot.copy.pages import Pages
from holdfast.snapshot.copy.unit_digests import UnitDigests

HOST = torch.device("cpu")
PCI = Path("/sys/bus/pci/devices")


def numa_node(devices: Collection[torch.device]) -> int | None:
    """The NUMA node to which the CUDA devices among these are attached; None if there are several or none, or if it is
    unknown."""
    found = {_node_of(torch.cuda.get_device_properties(device)) for device in devices if device.type == "cuda"}
    return found.pop() if len(found) == 1 else None


def _node_of(properties: Any) -> int | None:
    try:
        place = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        node = int((PCI / place / "numa_node").read_text())
    except (AttributeError, OSError, ValueError):
        return None  # an older torch does not tell a device's address, and some machines do not tell its node
    return node if node >= 0 else None


def engine_of(device: torch.device, pages: Pages) -> CopyEngine:
    """Make the engine for state on that device. Raises `ConfigError` if it is neither a CPU nor a usable CUDA
    device."""
    if device.type == "cpu":
        return CpuEngine()
    if device.type == "cuda":
        return CudaEngine(Runtime(device), pages)
    raise ConfigError(f"there is state on {device}: only state on CPUs and CUDA devices is captured")


class DeviceEngines:
    """A copy engine for each device that holds state. Engines may be added as time goes by.

    Each CUDA device has an engine of its own; all engines write to the same slots, and share their registered pages.
    """

    def __init__(
        self,
        devices: Collection[torch.device] = (),
        make: Callable[[torch.device, Pages], CopyEngine] = engine_of,
    ) -> None:
        """`make` makes the engine of a device. Raises what `make` raises, as does `cover`."""
        self._make = make
        self._pages = Pages()
        # Replaced, not changed in place, when an engine is added: other threads iterate over it.
        self._engines = {HOST: make(HOST, self._pages)}
        self._divided: dict[tuple[int, int], _Divided] = {}
        self.cover(devices)

    @property
    def queues(self) -> bool:
        return any(engine.queues for engine in self._engines.values())

    @property
    def digests(self) -> bool:
        return all(engine.digests for engine in self._engines.values())

    def cover(self, devices: Collection[torch.device]) -> None:
        for device in sorted(devices, key=str):
            if device not in self._engines:
                self._engines = {**self._engines, device: self._make(device, self._pages)}

    def enter_thread(self) -> None:
        for engine in self._engines.values():
            engine.enter_thread()

    def capturing(self) -> bool:
        return any(engine.capturing() for engine in self._engines.values())

    def prepare(self, slots: Sequence[memoryview], turn: Callable[[], AbstractContextManager[object]]) -> None:
        for engine in self._engines.values():
            engine.prepare(slots, turn)

    def mark(self) -> Transfer:
        if len(self._engines) == 1:
            return self._engines[HOST].mark()
        return DeviceTransfers(self, {id(engine): engine.mark() for engine in self._engines.values()})

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        return self.sampled(pieces, lambda engine, part: engine.sample(part, turn))

    def sampled(
        self, pieces: Sequence[SlotTensor], sample: Callable[[CopyEngine, Sequence[SlotTensor]], Sample]
    ) -> Sample:
        """Take a sample of the pieces of each engine with `sample`, and join the samples."""
        parts = self.divided(pieces)
        if len(parts) < 2:
            engine, part = parts[0][:2] if parts else (self._engines[HOST], pieces)
            return sample(engine, part)
        taken = [(sample(engine, part), index) for engine, part, index in parts]
        samples = [each for each, _ in taken]
        return Sample(
            np.concatenate([index[each.index] for each, index in taken]),
            np.concatenate([each.start for each in samples]),
            np.concatenate([each.length for each in samples]),
            np.concatenate([each.place for each in samples]),
            lambda: np.concatenate([each.read() for each in samples]),
        )

    def fetch(self, tensors: Sequence[torch.Tensor]) -> Callable[[], list[NDArray[np.uint8]]]:
        """As in `CopyEngine`; the tensors may also be on devices that are not covered yet."""
        places = [tensor.device for tensor in tensors]
        self.cover(set(places))
        asked = [self._engines[place].fetch([tensor]) for place, tensor in zip(places, tensors, strict=True)]
        return lambda: [found for each in asked for found in each()]

    def parts(self, pieces: Sequence[SlotTensor]) -> list[tuple[CopyEngine, Sequence[SlotTensor]]]:
        return [(engine, part) for engine, part, _ in self.divided(pieces)]

    def fill(self) -> Filling:
        raise TypeError("ask each of the parts")

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        for engine, part in self.parts(pieces):
            engine.load(part, slot)

    def forget(self) -> None:
        self._divided.clear()
        for engine in self._engines.values():
            engine.forget()

    def settle(self) -> None:
        for engine in self._engines.values():
            engine.settle()

    def close(self) -> None:
        self._divided.clear()
        self.settle()  # each unregisters the slots of all
        for engine in self._engines.values():
            engine.close()

    def divided(self, pieces: Sequence[SlotTensor]) -> list[_Part]:
        """The pieces of each device, with its engine and their numbers. Gives the same tuples for the same pieces, as
        copy engines remember what they were given. Raises `ConfigError` if a piece is on a device that is not
        covered."""
        return remembered(self._divided, pieces, self._by_device).parts

    def _by_device(self, pieces: Sequence[SlotTensor]) -> _Divided:
        by_device: dict[torch.device, list[int]] = {}
        for i, piece in enumerate(pieces):
            by_device.setdefault(piece.tensor.device, []).append(i)
        if strangers := by_device.keys() - self._engines.keys():
            names = ", ".join(sorted(map(str, strangers)))
            raise ConfigError(f"state has come to {names} since the last layout was made")
        parts: list[_Part] = []
        for device, index in by_device.items():
            part = pieces if len(by_device) == 1 else tuple(pieces[i] for i in index)
            parts.append((self._engines[device], part, np.array(index, np.int64)))
        return _Divided(pieces, parts)


@dataclass(frozen=True, slots=True)
class DeviceTransfers:
    """A `Transfer` of the state of one moment on several devices."""

    _engines: DeviceEngines
    _transfers: dict[int, Transfer]

    def copy(
        self,
        pieces: Sequence[SlotTensor],
        slot: memoryview,
        pause: Pause,
        digests: UnitDigests | None = None,
    ) -> None:
        for engine, part, _ in self._engines.divided(pieces):
            self._transfers[id(engine)].copy(part, slot, pause, digests)

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        return self._engines.sampled(pieces, lambda engine, part: self._transfers[id(engine)].sample(part, turn))

    def guard(self) -> None:
        for transfer in self._transfers.values():
            transfer.guard()

    def fence(self) -> None:
        for transfer in self._transfers.values():
            transfer.fence()

    def finish(self) -> None:
        for transfer in self._transfers.values():
            transfer.finish()

    def settle(self) -> None:
        for transfer in self._transfers.values():
            transfer.settle()


_Part = tuple[CopyEngine, Sequence[SlotTensor], NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class _Divided:
    pieces: Sequence[SlotTensor]
    parts: list[_Part]
