"""The random generators of Python, NumPy and torch."""

from __future__ import annotations

import random
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from holdfast.snapshot.copy.cuda_runtime import uses_cuda


def capture() -> dict[str, Any]:
    """Copies of the state of every generator of this process: a few kilobytes.

    Python's 625 numbers are packed: one by one they would take a third of the time at a boundary.
    """
    version, numbers, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": (version, array("I", numbers).tobytes(), gauss),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
    }
    if uses_cuda():
        state["cuda"] = own_first(torch.cuda.get_rng_state_all(), torch.cuda.current_device())
    return state


def restore(state: dict[str, Any]) -> None:
    """Restore the state of every generator."""
    version, numbers, gauss = state["python"]
    random.setstate((version, tuple(array("I", numbers)), gauss))
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"])
    if "cuda" in state:
        now = torch.cuda.current_device()
        for device, each in placed(state["cuda"], now, torch.cuda.device_count()).items():
            torch.cuda.set_rng_state(each, device)


def own_first(states: Sequence[Any], current: int) -> list[Any]:
    """The states of all devices' generators, with that of this process's device first. So the states are equal on ranks
    that have drawn the same numbers, whichever device each uses. Pure."""
    return [states[current], *states[:current], *states[current + 1 :]]


def placed(states: Sequence[Any], current: int, count: int) -> dict[int, Any]:
    """Which of `own_first`'s states goes to which of `count` devices; `current` is this process's device.

    A rank may use another device than before, and see more or fewer devices. The generator of its old device continues
    on its new one; the others follow in order, as far as there are devices. Pure.
    """
    devices = [current, *(device for device in range(count) if device != current)]
    return dict(zip(devices, states, strict=False))
