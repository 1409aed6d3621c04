"""Which copy engine moves the state of which device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.cuda import CudaEngine
from holdfast.snapshot.copy.cuda_runtime import TorchRuntime
from holdfast.snapshot.copy.engines import CopyEngine, CpuEngine, Sample, SlotTensor, remembered


def choose_engine(devices: Collection[torch.device]) -> CopyEngine:
    """A copy engine for state on these devices.

    Raises:
        ConfigError: there is state on a device of another kind than CPU and CUDA.
    """
    host = CpuEngine()
    others = {device for device in devices if device.type != "cpu"}
    if not others:
        return host
    if unknown := [str(device) for device in others if device.type != "cuda"]:
        raise ConfigError(f"there is state on {', '.join(unknown)}: only state on CPUs and CUDA devices is captured")
    return DeviceEngines({torch.device("cpu"): host, **{device: CudaEngine(TorchRuntime(device)) for device in others}})


class DeviceEngines:
    """A copy engine for each device that holds state."""

    def __init__(self, engines: Mapping[torch.device, CopyEngine]) -> None:
        self._engines = dict(engines)
        self.queues = any(engine.queues for engine in self._engines.values())
        self._divided: dict[int, _Divided] = {}

    def mark(self) -> None:
        for engine in self._engines.values():
            engine.mark()

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        taken = [(engine.sample(part, turn), index) for engine, part, index in self._divide(pieces).parts]
        if not taken:
            return CpuEngine().sample(pieces, turn)
        samples = [each for each, _ in taken]
        return Sample(
            np.concatenate([index[each.index] for each, index in taken]),
            np.concatenate([each.start for each in samples]),
            np.concatenate([each.length for each in samples]),
            np.concatenate([each.place for each in samples]),
            lambda: np.concatenate([each.read() for each in samples]),
        )

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        for engine, part, _ in self._divide(pieces).parts:
            engine.copy(part, slot, pause)

    def fence(self) -> None:
        for engine in self._engines.values():
            engine.fence()

    def finish(self) -> None:
        for engine in self._engines.values():
            engine.finish()

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        for engine, part, _ in self._divide(pieces).parts:
            engine.load(part, slot)

    def forget(self) -> None:
        self._divided.clear()
        for engine in self._engines.values():
            engine.forget()

    def close(self) -> None:
        self._divided.clear()
        for engine in self._engines.values():
            engine.close()

    def _divide(self, pieces: Sequence[SlotTensor]) -> _Divided:
        """The same tuples for the same pieces, as copy engines remember what they were given."""
        return remembered(self._divided, pieces, self._by_device)

    def _by_device(self, pieces: Sequence[SlotTensor]) -> _Divided:
        by_device: dict[torch.device, list[int]] = {}
        for i, piece in enumerate(pieces):
            by_device.setdefault(piece.tensor.device, []).append(i)
        parts = [
            (self._engines[device], tuple(pieces[i] for i in index), np.array(index, np.int64))
            for device, index in by_device.items()
        ]
        return _Divided(pieces, parts)


@dataclass(frozen=True, slots=True)
class _Divided:
    """`pieces` by device, with the copy engine of each, and their numbers."""

    pieces: Sequence[SlotTensor]
    parts: list[tuple[CopyEngine, tuple[SlotTensor, ...], NDArray[np.int64]]]
