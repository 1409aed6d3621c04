"""Which mover moves the state of which device."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from holdfast.smp_daemon.shared.errors import ConfigError
from holdfast.snapshot.copy.cuda import CudaMover
from holdfast.snapshot.copy.cuda_runtime import TorchRuntime
from holdfast.snapshot.copy.movers import CpuMover, Mover, Sample, SlotTensor, remembered


def choose_mover(devices: Collection[torch.device]) -> Mover:
    """A mover for state on these devices.

    Raises:
        ConfigError: there is state on a device of another kind than CPU and CUDA.
    """
    host = CpuMover()
    others = {device for device in devices if device.type != "cpu"}
    if not others:
        return host
    if unknown := [str(device) for device in others if device.type != "cuda"]:
        raise ConfigError(f"there is state on {', '.join(unknown)}: only state on CPUs and CUDA devices is captured")
    return DeviceMovers({torch.device("cpu"): host, **{device: CudaMover(TorchRuntime(device)) for device in others}})


class DeviceMovers:
    """A mover for each device that holds state."""

    def __init__(self, movers: Mapping[torch.device, Mover]) -> None:
        self._movers = dict(movers)
        self.queues = any(mover.queues for mover in self._movers.values())
        self._divided: dict[int, _Divided] = {}

    def mark(self) -> None:
        for mover in self._movers.values():
            mover.mark()

    def sample(self, pieces: Sequence[SlotTensor], turn: int) -> Sample:
        taken = [(mover.sample(part, turn), index) for mover, part, index in self._divide(pieces).parts]
        if not taken:
            return CpuMover().sample(pieces, turn)
        samples = [each for each, _ in taken]
        return Sample(
            np.concatenate([index[each.index] for each, index in taken]),
            np.concatenate([each.start for each in samples]),
            np.concatenate([each.length for each in samples]),
            np.concatenate([each.place for each in samples]),
            lambda: np.concatenate([each.read() for each in samples]),
        )

    def copy(self, pieces: Sequence[SlotTensor], slot: memoryview, pause: Callable[[int], None]) -> None:
        for mover, part, _ in self._divide(pieces).parts:
            mover.copy(part, slot, pause)

    def fence(self) -> None:
        for mover in self._movers.values():
            mover.fence()

    def finish(self) -> None:
        for mover in self._movers.values():
            mover.finish()

    def load(self, pieces: Sequence[SlotTensor], slot: memoryview) -> None:
        for mover, part, _ in self._divide(pieces).parts:
            mover.load(part, slot)

    def forget(self) -> None:
        self._divided.clear()
        for mover in self._movers.values():
            mover.forget()

    def close(self) -> None:
        self._divided.clear()
        for mover in self._movers.values():
            mover.close()

    def _divide(self, pieces: Sequence[SlotTensor]) -> _Divided:
        """The same tuples for the same pieces, as movers remember what they were given."""
        return remembered(self._divided, pieces, self._by_device)

    def _by_device(self, pieces: Sequence[SlotTensor]) -> _Divided:
        by_device: dict[torch.device, list[int]] = {}
        for i, piece in enumerate(pieces):
            by_device.setdefault(piece.tensor.device, []).append(i)
        parts = [
            (self._movers[device], tuple(pieces[i] for i in index), np.array(index, np.int64))
            for device, index in by_device.items()
        ]
        return _Divided(pieces, parts)


@dataclass(frozen=True, slots=True)
class _Divided:
    """`pieces` by device, with the mover of each, and their numbers."""

    pieces: Sequence[SlotTensor]
    parts: list[tuple[Mover, tuple[SlotTensor, ...], NDArray[np.int64]]]
